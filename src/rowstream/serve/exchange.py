"""One call on its way to its client: what its generations give, whole or as server-sent events.

However it ends (a client that leaves, that waits or that stops reading included), so do they.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rowstream.runtime.engine import Chunk, Usage
from rowstream.runtime.generation import Generation
from rowstream.serve.answer import Answer, Choice
from rowstream.serve.metrics import Metrics
from rowstream.serve.refusal import Refusals

__all__ = ["CLIENT_GONE", "OUTCOME", "Exchange", "json_response"]

# nobody is left to read it; the number is nginx's for a client that closed the request
CLIENT_GONE = 499
# key of the scope where a stream that failed leaves the status that it could not send
OUTCOME = "rowstream.outcome"

_Result = TypeVar("_Result")
_Chunks = AsyncIterator[tuple[int, Chunk]]


class Exchange:
    """The generations of one call, and the way to its client."""

    def __init__(
        self,
        generations: Sequence[Generation],
        answer: Answer,
        *,
        began_s: float,
        stall_s: float,
        metrics: Metrics,
        refusals: Refusals,
    ) -> None:
        """Count from `began_s`; give a client up that leaves a stream unread for `stall_s`."""
        self._generations = generations
        self._answer = answer
        self._began_s = began_s
        self._stall_s = stall_s
        self._metrics = metrics
        self._refusals = refusals
        self._prompt_tokens = sum(len(one.request.prompt) for one in generations)
        self._completion_tokens = 0
        metrics.prompt(self._prompt_tokens)

    async def whole(self, request: Request) -> Response:
        """Wait for all choices. Raises ClientDisconnect, and what the engine raised."""
        try:
            choices = await self._while_connected(request.receive, self._collect())
        finally:
            self._cancel()
        return json_response(self._answer.whole(choices, self._usage()))

    async def stream(self, request: Request) -> Response:
        """Wait for the first chunk: an error before it can still be an HTTP status."""
        chunks = self._chunks()
        try:
            first = await self._while_connected(request.receive, _first(chunks))
        except BaseException:
            self._cancel()
            raise
        return _EventStream(self, first, chunks)

    async def send_events(
        self, first: tuple[int, Chunk] | None, rest: _Chunks, scope: Scope, receive: Receive,
        send: Send,
    ) -> None:  # fmt: skip
        """Send the body of a stream, whose status is out already."""

        async def send_all() -> None:
            async for event in self._events(first, rest, scope):
                body = {"type": "http.response.body", "body": event, "more_body": True}
                # a client that does not read fills the buffers before `send` waits
                await asyncio.wait_for(send(body), self._stall_s)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await self._while_connected(receive, send_all())
        except ClientDisconnect:
            scope[OUTCOME] = CLIENT_GONE
        except (OSError, asyncio.TimeoutError):
            scope[OUTCOME] = CLIENT_GONE
            self._metrics.cancelled()
        finally:
            self._cancel()

    async def _events(
        self, first: tuple[int, Chunk] | None, rest: _Chunks, scope: Scope
    ) -> AsyncIterator[bytes]:
        opened = -1
        try:
            async for index, chunk in _chain(first, rest):
                if index != opened:
                    opened = index
                    for event in self._answer.opening(index):
                        yield _event(event)
                for event in self._answer.piece(index, chunk):
                    yield _event(event)
            if (usage := self._answer.closing(self._usage())) is not None:
                yield _event(usage)
        except Exception as error:
            refusal = self._refusals.of(error)
            scope[OUTCOME] = refusal.status
            yield _event(refusal.body())
            return
        yield b"data: [DONE]\n\n"

    async def _collect(self) -> list[Choice]:
        parts: list[list[Chunk]] = [[] for _ in self._generations]
        async for index, chunk in self._chunks():
            parts[index].append(chunk)
        return [Choice.of(chunks) for chunks in parts]

    async def _chunks(self) -> _Chunks:
        for index, generation in enumerate(self._generations):
            before_s: float | None = None
            async for chunk in generation:
                tokens = len(chunk.token_ids)
                if tokens and self._completion_tokens == 0:
                    self._metrics.first_token(generation.put_s - self._began_s)
                elif tokens and before_s is not None:
                    self._metrics.next_tokens(tokens, generation.put_s - before_s)
                before_s = generation.put_s
                self._metrics.completion(tokens)
                self._completion_tokens += tokens
                yield index, chunk

    async def _while_connected(
        self, receive: Receive, work: Coroutine[Any, Any, _Result]
    ) -> _Result:
        """Do work unless the client leaves meanwhile, which raises ClientDisconnect."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._metrics.cancelled()
                raise ClientDisconnect
            return task.result()
        finally:
            task.cancel()
            gone.cancel()

    def _usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._completion_tokens)

    def _cancel(self) -> None:
        for generation in self._generations:
            generation.cancel()


class _EventStream(Response):
    """Server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, first: tuple[int, Chunk] | None, rest: _Chunks) -> None:
        # proxies that buffer would turn a stream into one late answer
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._exchange = exchange
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await self._exchange.send_events(self._first, self._rest, scope, receive, send)


def json_response(
    body: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON body as a response."""
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _event(body: Mapping[str, object]) -> bytes:
    # ASCII only: some clients split lines at every line separator that Unicode has
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n".encode("ascii")


async def _first(chunks: _Chunks) -> tuple[int, Chunk] | None:
    async for numbered in chunks:
        return numbered
    return None


async def _chain(first: tuple[int, Chunk] | None, rest: _Chunks) -> _Chunks:
    if first is not None:
        yield first
        async for numbered in rest:
            yield numbered


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
