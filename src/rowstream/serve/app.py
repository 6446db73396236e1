"""The HTTP side: routes of the OpenAI API over an `Engine`.

Owns paths and bodies; what fields mean is in `schema`, what objects look like in `answer`, how they
reach a client in `exchange`, and errors in `refusal`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rowstream.runtime import engine as runtime
from rowstream.runtime.engine import Engine, PromptError, SamplingParams
from rowstream.serve.answer import Answer, ChatAnswer, CompletionAnswer
from rowstream.serve.checks import RequestError
from rowstream.serve.exchange import CLIENT_GONE, OUTCOME, Exchange, json_response
from rowstream.serve.health import Health
from rowstream.serve.metrics import CONTENT_TYPE, Metrics
from rowstream.serve.refusal import Refusals
from rowstream.serve.schema import Prompt, parse_chat, parse_completion, parse_json

DEFAULT_MAX_BODY_BYTES = 1 << 20
# a client may leave a stream unread for so long; what it does not read is generated meanwhile
DEFAULT_STALL_S = 30.0
DEFAULT_BODY_TIMEOUT_S = 60.0
# a body somewhat over the limit is read to its end, or its sender would not see the answer
_DRAIN_FACTOR = 16


def create_app(
    engine: Engine,
    *,
    metrics: Metrics | None = None,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    body_timeout_s: float = DEFAULT_BODY_TIMEOUT_S,
    stall_s: float = DEFAULT_STALL_S,
) -> Starlette:
    """Build the ASGI application; the engine stays the caller's to close.

    A request's body must come within `body_timeout_s`; a stream that its client does not read for
    `stall_s` is cancelled.
    """
    metrics = Metrics(engine) if metrics is None else metrics
    api = _Api(engine, metrics, max_body_bytes, body_timeout_s, stall_s)
    endpoints = {
        "/health": (api.health, "GET"),
        "/metrics": (api.metrics, "GET"),
        "/v1/models": (api.models, "GET"),
        "/v1/models/{name:path}": (api.model, "GET"),
        "/v1/completions": (api.completions, "POST"),
        "/v1/chat/completions": (api.chat, "POST"),
    }
    return Starlette(
        routes=[
            Route(path, api.guarded(endpoint), methods=[method])
            for path, (endpoint, method) in endpoints.items()
        ],
        middleware=[Middleware(_Counted, metrics=metrics, paths=endpoints)],
        exception_handlers={HTTPException: api.no_route},
    )


Endpoint = Callable[[Request], Awaitable[Response]]


class _Api:
    """The endpoints."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        max_body_bytes: int,
        body_timeout_s: float,
        stall_s: float,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._health = Health()
        self._refusals = Refusals(metrics, self._health)
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._stall_s = stall_s

    def guarded(self, endpoint: Endpoint) -> Endpoint:
        """Turn every error of an endpoint into an answer."""

        async def guarded(request: Request) -> Response:
            try:
                return await endpoint(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)
            except Exception as error:
                return self._refuse(error)

        return guarded

    async def no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path: Any = request.url.path
        known = {
            404: (f"{path}: is not a path of this server", "unknown_url"),
            405: (f"{path}: does not take {request.method}", "method_not_allowed"),
        }
        message, code = known.get(error.status_code, (error.detail, None))
        return self._refuse(
            RequestError(message, code=code, status=error.status_code, headers=error.headers)
        )

    async def health(self, request: Request) -> Response:
        status, body = self._health.report(self._engine.name, self._engine.stats())
        return json_response(body, status)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return json_response(self._card())

    async def completions(self, request: Request) -> Response:
        began_s = time.perf_counter()
        call = parse_completion(parse_json(await self._body(request)))
        self._check_name(call.model)
        several = len(call.prompts) > 1
        requests = []
        for index, prompt in enumerate(call.prompts):
            path = f"prompt[{index}]" if several else "prompt"
            ids = await self._encode(path, prompt)
            self._check_room(ids, call.sampling, path, "max_tokens")
            requests.append(runtime.Request(ids, call.sampling))
        answer = CompletionAnswer(
            self._engine.name,
            include_usage=call.include_usage,
            logprobs=call.sampling.logprobs is not None,
        )
        return await self._answer(request, requests, answer, call.stream, began_s)

    async def chat(self, request: Request) -> Response:
        began_s = time.perf_counter()
        call = parse_chat(parse_json(await self._body(request)))
        self._check_name(call.model)
        try:
            ids = await run_in_threadpool(self._engine.encode_chat, call.messages)
        except PromptError as error:
            raise RequestError(
                f"messages: {error}", param="messages", code="invalid_value"
            ) from error
        self._check_room(ids, call.sampling, "messages", call.max_tokens_field)
        answer = ChatAnswer(
            self._engine.name,
            include_usage=call.include_usage,
            logprobs=call.sampling.logprobs is not None,
        )
        requests = [runtime.Request(ids, call.sampling)]
        return await self._answer(request, requests, answer, call.stream, began_s)

    async def _body(self, request: Request) -> bytes:
        """Read the body, as far as the limits allow."""
        try:
            return await asyncio.wait_for(self._whole_body(request), self._body_timeout_s)
        except asyncio.TimeoutError:
            raise RequestError(
                f"body: did not come within {self._body_timeout_s:g} s",
                code="request_timeout",
                status=408,
                headers={"connection": "close"},
            ) from None

    async def _whole_body(self, request: Request) -> bytes:
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
        began_s: float,
    ) -> Response:
        exchange = Exchange(
            self._engine.submit(requests),
            answer,
            began_s=began_s,
            stall_s=self._stall_s,
            metrics=self._metrics,
            refusals=self._refusals,
        )
        return await (exchange.stream(request) if stream else exchange.whole(request))

    def _refuse(self, error: Exception) -> Response:
        refusal = self._refusals.of(error)
        return json_response(refusal.body(), refusal.status, refusal.headers)


class _Counted:
    """Count every request by endpoint and by what came of it."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, paths: Collection[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._metrics.request(self._endpoint(scope["path"]), scope.get(OUTCOME, status))

    def _endpoint(self, path: str) -> str:
        # few values, whatever clients ask for
        if path.startswith("/v1/models/"):
            return "/v1/models"
        return path if path in self._paths else "other"
