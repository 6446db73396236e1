"""The HTTP side: routes of the OpenAI API over an `Engine`, and the one shape of every error.

Owns bodies, streams and clients that go away; what fields mean is in `schema`, what objects look
like in `answer`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rowstream.errors import UnavailableError
from rowstream.runtime import engine as runtime
from rowstream.runtime.engine import Engine, PromptError, QueueFullError, SamplingParams, Usage
from rowstream.runtime.generation import Generation
from rowstream.serve.answer import Answer, ChatAnswer, Choice, CompletionAnswer
from rowstream.serve.checks import RequestError
from rowstream.serve.schema import Prompt, parse_chat, parse_completion, parse_json

logger = logging.getLogger("rowstream.serve")

DEFAULT_MAX_BODY_BYTES = 1 << 20
# nobody is left to read it; the number is nginx's for a client that closed the request
_CLIENT_GONE = 499
# a body somewhat over the limit is read to its end, or its sender would not see the answer
_DRAIN_FACTOR = 16


def create_app(engine: Engine, *, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES) -> Starlette:
    """Build the ASGI application; the engine stays the caller's to close."""
    api = _Api(engine, max_body_bytes)
    return Starlette(
        routes=[
            Route("/health", _guarded(api.health), methods=["GET"]),
            Route("/v1/models", _guarded(api.models), methods=["GET"]),
            Route("/v1/models/{name:path}", _guarded(api.model), methods=["GET"]),
            Route("/v1/completions", _guarded(api.completions), methods=["POST"]),
            Route("/v1/chat/completions", _guarded(api.chat), methods=["POST"]),
        ],
        exception_handlers={HTTPException: _no_route},
    )


class _Api:
    """The endpoints."""

    def __init__(self, engine: Engine, max_body_bytes: int) -> None:
        self._engine = engine
        self._max_body_bytes = max_body_bytes

    async def health(self, request: Request) -> Response:
        stats = dict(self._engine.stats())
        closed = bool(stats.pop("closed", False))
        body = {"status": "closed" if closed else "ok", "model": self._engine.name, **stats}
        return _json(body, 503 if closed else 200)

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return _json(self._card())

    async def completions(self, request: Request) -> Response:
        call = parse_completion(parse_json(await self._body(request)))
        self._check_name(call.model)
        several = len(call.prompts) > 1
        requests = []
        for index, prompt in enumerate(call.prompts):
            path = f"prompt[{index}]" if several else "prompt"
            ids = await self._encode(path, prompt)
            self._check_room(ids, call.sampling, path, "max_tokens")
            requests.append(runtime.Request(ids, call.sampling))
        answer = CompletionAnswer(self._engine.name, include_usage=call.include_usage)
        return await self._answer(request, requests, answer, call.stream, call.include_usage)

    async def chat(self, request: Request) -> Response:
        call = parse_chat(parse_json(await self._body(request)))
        self._check_name(call.model)
        try:
            ids = await run_in_threadpool(self._engine.encode_chat, call.messages)
        except PromptError as error:
            raise RequestError(
                f"messages: {error}", param="messages", code="invalid_value"
            ) from error
        self._check_room(ids, call.sampling, "messages", call.max_tokens_field)
        answer = ChatAnswer(self._engine.name, include_usage=call.include_usage)
        requests = [runtime.Request(ids, call.sampling)]
        return await self._answer(request, requests, answer, call.stream, call.include_usage)

    async def _body(self, request: Request) -> bytes:
        """Read the body, as far as the limit allows."""
        body = bytearray()
        received_bytes = 0
        async for part in request.stream():
            received_bytes += len(part)
            if received_bytes <= self._max_body_bytes:
                body += part
            elif received_bytes > _DRAIN_FACTOR * self._max_body_bytes:
                break
        if received_bytes > self._max_body_bytes:
            raise RequestError(
                f"body: must be at most {self._max_body_bytes} bytes",
                code="request_too_large",
                status=413,
                # what was not read would be taken for the next request
                headers={"connection": "close"},
            )
        return bytes(body)

    async def _encode(self, path: str, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            try:
                return await run_in_threadpool(self._engine.encode, prompt)
            except PromptError as error:
                raise RequestError(f"{path}: {error}", param=path, code="invalid_value") from error
        size = self._engine.vocab_size
        if max(prompt) >= size:
            raise RequestError(
                f"{path}: token ids must be below {size}, got {max(prompt)}",
                param=path,
                code="invalid_value",
            )
        return prompt

    def _check_name(self, name: str) -> None:
        if name != self._engine.name:
            raise RequestError(
                f"model: {name!a} is not served here, {self._engine.name!a} is",
                param="model",
                code="model_not_found",
                status=404,
            )

    def _check_room(
        self, ids: Sequence[int], sampling: SamplingParams, path: str, max_tokens_path: str
    ) -> None:
        context = self._engine.context_tokens
        if not ids:
            raise RequestError(f"{path}: must have a token", param=path, code="invalid_value")
        if len(ids) >= context:
            message = (
                f"{path}: has {len(ids)} tokens, which leaves no room in a context of {context}"
            )
        elif len(ids) + (sampling.max_tokens or 1) > context:
            message = (
                f"{max_tokens_path}: {sampling.max_tokens} tokens after {len(ids)} of the prompt"
                f" do not fit a context of {context}"
            )
            path = max_tokens_path
        else:
            return
        raise RequestError(message, param=path, code="context_length_exceeded")

    def _card(self) -> dict[str, object]:
        return {
            "id": self._engine.name,
            "object": "model",
            "created": 0,
            "owned_by": "rowstream",
            "max_model_len": self._engine.context_tokens,
        }

    async def _answer(
        self,
        request: Request,
        requests: Sequence[runtime.Request],
        answer: Answer,
        stream: bool,
        include_usage: bool,
    ) -> Response:
        generations = self._engine.submit(requests)
        if stream:
            return _EventStream(_events(generations, answer, include_usage), generations)
        work = asyncio.ensure_future(_collect(generations))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=_CLIENT_GONE)
            choices, usage = work.result()
        finally:
            _cancel(generations)
            gone.cancel()
            work.cancel()
        return _json(answer.whole(choices, usage))


class _EventStream(StreamingResponse):
    """Server-sent events; however the response ends, so do the generations behind it."""

    def __init__(self, events: AsyncIterator[bytes], generations: Sequence[Generation]) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            # proxies that buffer would turn a stream into one late answer
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ClientDisconnect:
            pass
        finally:
            _cancel(self._generations)


async def _events(
    generations: Sequence[Generation], answer: Answer, include_usage: bool
) -> AsyncIterator[bytes]:
    prompt_tokens = sum(len(generation.request.prompt) for generation in generations)
    completion_tokens = 0
    try:
        for index, generation in enumerate(generations):
            for event in answer.opening(index):
                yield _event(event)
            async for chunk in generation:
                completion_tokens += len(chunk.token_ids)
                for event in answer.piece(index, chunk.text, chunk.finish_reason):
                    yield _event(event)
        if include_usage:
            yield _event(answer.usage(Usage(prompt_tokens, completion_tokens)))
    except Exception as error:
        # the status line is out already
        yield _event(_refusal(error).body())
        return
    yield b"data: [DONE]\n\n"


async def _collect(generations: Sequence[Generation]) -> tuple[list[Choice], Usage]:
    choices = []
    completion_tokens = 0
    for generation in generations:
        pieces = []
        reason = None
        async for chunk in generation:
            pieces.append(chunk.text)
            completion_tokens += len(chunk.token_ids)
            reason = chunk.finish_reason
        choices.append(Choice("".join(pieces), reason))
    prompt_tokens = sum(len(generation.request.prompt) for generation in generations)
    return choices, Usage(prompt_tokens, completion_tokens)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _cancel(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.cancel()


def _event(body: Mapping[str, object]) -> bytes:
    # ASCII only: some clients split lines at every line separator that Unicode has
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n".encode("ascii")


def _json(
    body: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(json.dumps(body), status, headers, media_type="application/json")


Endpoint = Callable[[Request], Awaitable[Response]]


def _guarded(endpoint: Endpoint) -> Endpoint:
    """Turn every error of an endpoint into an answer."""

    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except Exception as error:
            refusal = _refusal(error)
            return _json(refusal.body(), refusal.status, refusal.headers)

    return guarded


def _refusal(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, QueueFullError):
        return RequestError(
            str(error),
            code="queue_full",
            status=429,
            kind="rate_limit_error",
            headers={"retry-after": "1"},
        )
    # the cause stays in the log: a message can hold paths of the machine
    error_id = f"err-{uuid.uuid4().hex[:12]}"
    logger.error("%s: %s", error_id, error, exc_info=error)
    unavailable = isinstance(error, UnavailableError)
    return RequestError(
        f"the server failed to answer, error id {error_id}",
        code="unavailable" if unavailable else "internal_error",
        status=503 if unavailable else 500,
        kind="server_error",
    )


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path: Any = request.url.path
    known = {
        404: (f"{path}: is not a path of this server", "unknown_url"),
        405: (f"{path}: does not take {request.method}", "method_not_allowed"),
    }
    message, code = known.get(error.status_code, (error.detail, None))
    refusal = RequestError(message, code=code)
    return _json(refusal.body(), error.status_code, error.headers)
