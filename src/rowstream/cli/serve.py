"""`rowstream serve`: arguments of the OpenAI-compatible server."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from rowstream.cli.arguments import (
    Commands,
    add_command,
    add_reader,
    add_table_paths,
    positive,
    size,
)
from rowstream.cli.progress import Progress
from rowstream.errors import UnavailableError

__all__ = ["add_to"]

_EXAMPLES = """\
  rowstream serve demo
  rowstream serve demo --port 8080 --table-backend disk --served-model-name tiny

then, with any OpenAI client:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}'
"""


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "serve",
        help="serve a model through an OpenAI-compatible API, its table left on disk",
        description="Serve a model through an OpenAI-compatible API while its table stays in the "
        "checkpoint. Needs the extra: pip install 'rowstream[serve]'. "
        "Ctrl-C or SIGTERM ends it once the running answers have ended, a second one at once.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="checkpoint folder, or id in the local hub cache; never downloaded",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=_port, default=8000, help="port; 0 takes a free one (default: 8000)"
    )
    parser.add_argument(
        "--table-backend",
        default="auto",
        choices=("auto", "disk", "mmap", "pinned", "device", "file"),
        help="where the table's rows live; with --device cuda also device, the GPU's own memory, "
        "and file, the mapped checkpoint that the GPU reads by itself (default: auto)",
    )
    parser.add_argument(
        "--sync",
        default="auto",
        choices=("auto", "doorbell", "kernel", "hostnode", "gate"),
        help="how a GPU waits for rows that are read from the disk; auto takes the first of these "
        "that works, doctor says which do (default: auto)",
    )
    add_reader(parser)
    add_table_paths(parser)
    parser.add_argument(
        "--table-cache",
        metavar="SIZE",
        type=size,
        default=64 << 20,
        help="memory for rows that were read before, as 1GiB or 64MiB; 0 for none (default: 64MiB)",
    )
    parser.add_argument(
        "--read-timeout",
        metavar="S",
        type=_seconds,
        default=10.0,
        help="seconds without any answer from the disk after which a read fails; a GPU waits for 2 "
        "at most (default: 10)",
    )
    parser.add_argument(
        "--on-read-error",
        default="raise",
        choices=("raise", "zero-rows"),
        help="fail the request whose rows cannot be read, or go on with zeroes, which /health and "
        "/metrics tell (default: raise)",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        help="type of the model's weights, as torch names it (default: auto)",
    )
    parser.add_argument(
        "--device", help="where the model runs, as torch names it: cpu, cuda, cuda:1"
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="name that clients see (default: the folder's)"
    )
    parser.add_argument(
        "--max-queue",
        metavar="N",
        type=positive,
        default=64,
        help="requests that may wait; the next ones are refused (default: 64)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    try:
        from rowstream.serve.server import serve

        if args.device is not None:
            _check_device(args.device)
        options: dict[str, Any] = {}
        if args.table_backend == "pinned":
            options["progress"] = _progress()
        serve(
            args.model,
            host=args.host,
            port=args.port,
            table_backend=args.table_backend,
            sync=args.sync,
            reader=args.reader,
            read_timeout_s=args.read_timeout,
            on_read_error=args.on_read_error,
            table_paths=args.table_path,
            table_cache_bytes=args.table_cache,
            dtype=args.dtype,
            device=args.device,
            served_model_name=args.served_model_name,
            max_queue=args.max_queue,
            **options,
        )
    except ImportError as error:
        raise UnavailableError(
            f"serve: {str(error).lower()}; install with: pip install 'rowstream[serve]'"
        ) from error
    return 0


def _progress() -> Callable[[int, int], None]:
    """Draw a bar while the table is read, and nothing afterwards."""
    bar = Progress("loading table")

    def draw(done_bytes: int, total_bytes: int) -> None:
        bar(done_bytes, total_bytes)
        if done_bytes >= total_bytes:
            bar.clear()

    return draw


def _check_device(name: str) -> None:
    """Refuse what torch does not know or have before a model is loaded for it."""
    if find_spec("torch") is None:
        return  # the server says what to install
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).split("\n")[0]
        reason = reason[:1].lower() + reason[1:]
        raise UnavailableError(f"--device {name}: {reason}") from error


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.001 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"needs seconds from 0.001 to 86400, got {text!r}")
    return seconds


def _port(text: str) -> int:
    try:
        port = int(text)
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"needs a port in [0, 65535], got {text!r}")
    return port
