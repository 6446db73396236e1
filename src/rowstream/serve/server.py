"""From a checkpoint to a listening server: loads model and engine, runs uvicorn until a signal.

Heavy imports happen inside, after the port is known to be free.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rowstream.errors import UnavailableError

if TYPE_CHECKING:
    from rowstream.runtime.engine import Engine

# after a signal, running answers get this long to end
DEFAULT_DRAIN_S = 60


def serve(
    path: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    table_backend: str = "auto",
    reader: str = "auto",
    dtype: Any = "auto",
    device: Any = None,
    served_model_name: str | None = None,
    max_queue: int = 64,
    drain_s: int = DEFAULT_DRAIN_S,
) -> None:
    """Serve a checkpoint, a folder or an id in the local hub cache, until SIGTERM or Ctrl-C.

    Port 0 takes a free one and prints it. Raises UnavailableError if the address cannot be had or
    the `serve` extra is not installed, and what loading the model raises.
    """
    _require("starlette", "uvicorn", "torch", "transformers")
    with bind(host, port) as listener:
        from transformers import AutoTokenizer

        from rowstream.checkpoint import locate
        from rowstream.engines.transformers import load_model, stores
        from rowstream.runtime.generate import TransformersEngine

        folder = locate(path)
        model = load_model(
            path, table_backend=table_backend, reader=reader, dtype=dtype, device=device
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tables: Sequence[Any] = stores(model)
        for table in tables:
            stats = table.stats()
            print(
                f"table {table.manifest.name}: backend {stats['backend']},"
                f" reader {stats.get('reader') or 'none'} ({stats['reason']})",
                flush=True,
            )
        engine = TransformersEngine(
            model,
            tokenizer,
            name=served_model_name or model_name(path),
            tables=tables,
            max_queue=max_queue,
        )
        try:
            run(engine, listener, drain_s=drain_s)
        finally:
            engine.close()
            for table in tables:
                table.close()


def run(engine: Engine, listener: socket.socket, *, drain_s: int = DEFAULT_DRAIN_S) -> None:
    """Answer requests on a bound socket until SIGTERM or Ctrl-C.

    After the signal nothing new is accepted, and answers under way have `drain_s` seconds to end.
    The engine stays the caller's to close.
    """
    import uvicorn

    from rowstream.serve.app import create_app

    config = uvicorn.Config(
        create_app(engine),
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=drain_s,
    )
    try:
        # clients may connect from here on: the kernel queues them until uvicorn accepts
        listener.listen(config.backlog)
    except OSError as error:
        # another server can have begun to listen since our bind
        raise _unavailable(url(listener), error) from error
    print(f"serving {engine.name} at {url(listener)}/v1", flush=True)
    with _signals_absorbed():
        uvicorn.Server(config).run(sockets=[listener])


def bind(host: str, port: int) -> socket.socket:
    """Return a TCP socket bound to an address. Raises UnavailableError, ValueError."""
    if not 0 <= port <= 65535:
        # getaddrinfo would take its lower 16 bits
        raise ValueError(f"port: must be from 0 to 65535, got {port}")
    address = f"{host}:{port}"
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise _unavailable(address, error) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
    except OSError as error:
        listener.close()
        raise _unavailable(address, error) from error
    return listener


def url(listener: socket.socket) -> str:
    """Return the address of a bound socket as http://host:port."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def model_name(path: str) -> str:
    """Return the name clients use by default: a folder's last part, or a hub id as it is."""
    return Path(path).resolve().name if os.path.exists(path) else path


def _unavailable(address: str, error: OSError) -> UnavailableError:
    return UnavailableError(f"{address}: {(error.strerror or str(error)).lower()}")


def _require(*modules: str) -> None:
    from importlib.util import find_spec

    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise UnavailableError(
            f"serve: needs {', '.join(missing)}, install with: pip install 'rowstream[serve]'"
        )


@contextlib.contextmanager
def _signals_absorbed() -> Iterator[None]:
    """Let uvicorn drain on a signal and return: it raises the signal again once it is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {sig: signal.signal(sig, lambda *_: None) for sig in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for sig, handler in old.items():
            signal.signal(sig, handler)
