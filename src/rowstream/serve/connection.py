"""uvicorn's HTTP/1.1 connection with limits that uvicorn lacks: their number, and a time for heads.

Lives on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# request line and headers together
MAX_HEAD_BYTES = 1 << 16
# below the usual limit of 1024 open files
MAX_CONNECTIONS = 512
HEAD_TIMEOUT_S = 20.0

_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-length: 0\r\n\r\n"
)


class Connection(H11Protocol):
    """Close a connection whose next request does not begin and get its head across in time.

    uvicorn itself limits only the silence after an answer, so that a client that sends nothing, or
    a byte now and then, would keep its connection.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    max_connections = MAX_CONNECTIONS

    def connection_made(self, transport: Any) -> None:
        self._head_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.write(_TOO_MANY)
            transport.close()
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_head()

    def _watch_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_head()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
