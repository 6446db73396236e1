"""One answer in the making: chunks pass from the engine's thread to one consumer.

Owns the buffer between the two; what is generated, and when, is the engine's affair.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator

from rowstream.runtime.engine import Chunk, Request


class Generation:
    """Iterate, with `for` or `async for`, over the chunks of one request, or meet its error there.

    `put`, `fail` and `end` are the engine's side, the rest is the consumer's.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        # when the chunk that was taken last had been put, by time.perf_counter()
        self.put_s = 0.0
        # the engine's: reads that were begun for the prompt and are of use until it is answered
        self.read_ahead: list[object] = []
        self._changed = threading.Condition()
        self._chunks: deque[tuple[float, Chunk]] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._cancelled = False
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    # the engine's side

    def put(self, chunk: Chunk) -> None:
        """Hand a chunk over; one with a finish reason ends the answer."""
        with self._changed:
            if self._ended:
                return
            self._chunks.append((time.perf_counter(), chunk))
            self._ended = chunk.finish_reason is not None
            self._notify()

    def fail(self, error: BaseException) -> None:
        """End the answer with an error, raised after the chunks that came before it."""
        with self._changed:
            if self._ended:
                return
            self._error, self._ended = error, True
            self._notify()

    def end(self) -> None:
        """End the answer without a finish reason, as after `cancel`."""
        with self._changed:
            self._ended = True
            self._notify()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def ended(self) -> bool:
        return self._ended

    # the consumer's side

    def cancel(self) -> None:
        """Ask the engine to stop and drop what it still generates. Does nothing after the end."""
        with self._changed:
            if not self._ended:
                self._cancelled = True
                self._ended = True
                self._notify()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        with self._changed:
            while not self._chunks and not self._ended:
                self._changed.wait()
            chunk = self._pop()
        if chunk is None:
            raise StopIteration
        return chunk

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        while True:
            with self._changed:
                if self._chunks or self._ended:
                    chunk = self._pop()
                    break
                loop = asyncio.get_running_loop()
                arrival: asyncio.Future[None] = loop.create_future()
                self._waiter = (loop, arrival)
            await arrival
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def _pop(self) -> Chunk | None:
        if self._chunks:
            self.put_s, chunk = self._chunks.popleft()
            return chunk
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return None

    def _notify(self) -> None:
        self._changed.notify_all()
        if self._waiter is None:
            return
        loop, arrival = self._waiter
        self._waiter = None
        # a loop that was closed has no consumer left to wake
        if not loop.is_closed():
            loop.call_soon_threadsafe(_wake, arrival)


def _wake(arrival: asyncio.Future[None]) -> None:
    if not arrival.done():
        arrival.set_result(None)
