"""uvicorn with this server's limits, and its end: a signal drains, the next one kills.

Lives on the thread that calls `run`; signals reach it on the main thread only.
"""

from __future__ import annotations

import signal
import socket
from typing import Any

import uvicorn

from rowstream.runtime.engine import Engine
from rowstream.serve.app import create_app
from rowstream.serve.connection import MAX_HEAD_BYTES, Connection
from rowstream.serve.metrics import Metrics

__all__ = ["HttpServer"]


class HttpServer(uvicorn.Server):
    """Serve an engine until `should_exit` is set, or a signal sets it."""

    def __init__(
        self,
        engine: Engine,
        *,
        metrics: Metrics | None = None,
        drain_s: int | None = None,
        connection: type[Connection] = Connection,
        **app_options: Any,
    ) -> None:
        """Give what has begun `drain_s` seconds to end; `app_options` are `create_app`'s."""
        self._engine = engine
        super().__init__(
            uvicorn.Config(
                create_app(engine, metrics=metrics, **app_options),
                http=connection,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=drain_s,
            )
        )

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.should_exit = True
        # the next signal must work even where this thread, or the model, is stuck
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.drain()
        await super().shutdown(sockets)
