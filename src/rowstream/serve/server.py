"""From a checkpoint to a listening server: loads model and engine, runs uvicorn until a signal.

Heavy imports happen inside, after the port is known to be free.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rowstream.errors import RowstreamError, UnavailableError

if TYPE_CHECKING:
    from rowstream.backends import Progress
    from rowstream.profile import DeviceProfile
    from rowstream.runtime.engine import Engine
    from rowstream.serve.metrics import Metrics

_log = logging.getLogger(__name__)

# after a signal, running answers get this long to end
DEFAULT_DRAIN_S = 60
_SEND_BUFFER_BYTES = 1 << 17
# a peer that is gone without a word, or does not read, is given up after about a minute
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}


def serve(
    path: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    table_backend: str = "auto",
    sync: str = "auto",
    reader: str = "auto",
    read_timeout_s: float = 10.0,
    on_read_error: str = "raise",
    table_paths: Sequence[str] = (),
    table_cache_bytes: int = 64 << 20,
    dtype: Any = "auto",
    device: Any = None,
    served_model_name: str | None = None,
    max_queue: int = 64,
    drain_s: int = DEFAULT_DRAIN_S,
    progress: Progress | None = None,
) -> None:
    """Serve a checkpoint, a folder or an id in the local hub cache, until SIGTERM or Ctrl-C.

    Port 0 takes a free one and prints it. `sync` says how a GPU waits for rows, see
    `LookupOptions`. `progress` is called with bytes done and bytes in all while pinned tables are
    read. Raises UnavailableError if the address cannot be had or the `serve` extra is not
    installed, and what loading the model raises.
    """
    _require("starlette", "uvicorn", "prometheus_client", "torch", "transformers")
    with bind(host, port) as listener:
        from transformers import AutoTokenizer

        from rowstream.checkpoint import locate
        from rowstream.device.lookup import LookupOptions
        from rowstream.engines import transformers as models
        from rowstream.runtime.generate import TransformersEngine
        from rowstream.serve.metrics import Metrics

        folder = locate(path)
        # a GPU gives a step up sooner than a host does a read
        gives_up_s = min(read_timeout_s, LookupOptions().read_timeout_s)
        model = models.load_model(
            path,
            table_backend=table_backend,
            reader=reader,
            read_timeout_s=read_timeout_s,
            on_read_error=on_read_error,
            table_paths=table_paths,
            profile=_profile(path, table_paths, table_backend, reader),
            cache_bytes=table_cache_bytes,
            progress=progress,
            lookup=LookupOptions(sync=sync, read_timeout_s=gives_up_s),
            read_ahead=False,  # the engine does, as soon as a request is admitted
            dtype=dtype,
            device=device,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        models.warm_up(model)
        tables = models.model_tables(model)
        for table in tables:
            stats = table.stats()
            print(
                f"table {table.name}: backend {stats['backend']},"
                f" reader {stats.get('reader') or 'none'} ({stats['reason']})",
                flush=True,
            )
            for way in table.ways():
                print(f"table {table.name} on {way}", flush=True)
        engine = TransformersEngine(
            model,
            tokenizer,
            name=served_model_name or model_name(path),
            tables=tables,
            max_queue=max_queue,
            check=functools.partial(models.check, model),
        )
        metrics = Metrics(engine)
        models.observe(model, metrics.lookup)
        try:
            run(engine, listener, metrics=metrics, drain_s=drain_s)
        finally:
            engine.close()
            models.close(model)


def _profile(
    path: str, table_paths: Sequence[str], table_backend: str, reader: str
) -> DeviceProfile | None:
    """Measure what the table lies on, say what was found, and keep it; None where there is no need.

    What is wrong with the table is for the opening to say.
    """
    from rowstream.block_device import device_of
    from rowstream.catalog import tables
    from rowstream.profile import DeviceProfile, expectation

    if table_backend not in ("auto", "disk") or reader == "inline":
        return None
    try:
        manifest = tables(path, table_paths=table_paths)[0]
        if all(device_of(file.path).kind == "memory" for file in manifest.files):
            return None
        profile = DeviceProfile.measure(manifest, reader=reader)
    except (RowstreamError, OSError):
        return None
    print(f"device {profile}", flush=True)
    profile.keep()
    if profile.slow is not None:
        reads = manifest.heads * len(manifest.planes)
        expect = expectation(profile.p50_us, profile.reads_per_s, reads)
        _log.warning("slow device: %s; %s", profile.slow, expect)
    return profile if profile.from_device is not False else None


def run(
    engine: Engine,
    listener: socket.socket,
    *,
    metrics: Metrics | None = None,
    drain_s: int = DEFAULT_DRAIN_S,
) -> None:
    """Answer requests on a bound socket until SIGTERM or Ctrl-C.

    After the signal nothing new is accepted, what waits gets a 503, and what has begun has
    `drain_s` seconds to end. A second signal ends the process at once. The engine stays the
    caller's to close.
    """
    from rowstream.serve.http import HttpServer

    server = HttpServer(engine, metrics=metrics, drain_s=drain_s)
    try:
        # clients may connect from here on: the kernel queues them until uvicorn accepts
        listener.listen(server.config.backlog)
    except OSError as error:
        # another server can have begun to listen since our bind
        raise _unavailable(url(listener), error) from error
    print(f"serving {engine.name} at {url(listener)}/v1", flush=True)
    server.run(sockets=[listener])


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
        _limit_peers(listener)
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


def _limit_peers(listener: socket.socket) -> None:
    """Let the kernel end connections without a living reader; accepted sockets inherit this."""
    # grown to megabytes, a buffer would take a slow reader minutes to show as writable again
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        option = getattr(socket, name, None)
        if option is not None:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)


def _unavailable(address: str, error: OSError) -> UnavailableError:
    return UnavailableError(f"{address}: {(error.strerror or str(error)).lower()}")


def _require(*modules: str) -> None:
    from importlib.util import find_spec

    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise UnavailableError(
            f"serve: needs {', '.join(missing)}, install with: pip install 'rowstream[serve]'"
        )
