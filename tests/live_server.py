"""The server over real sockets, in a thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rowstream.runtime.engine import Engine
from rowstream.serve.http import HttpServer
from rowstream.serve.server import bind, url

CALL: dict[str, Any] = {"model": "org/tiny", "prompt": "hello"}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def served(engine: Engine, **options: Any) -> Iterator[Any]:
    """Run the server in a thread; `server.address` is its address."""
    server: Any = HttpServer(engine, **options)
    with bind("127.0.0.1", 0) as listener:
        server.address = listener.getsockname()[:2]
        server.url = url(listener)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            until(lambda: bool(server.started))
            yield server
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive()
