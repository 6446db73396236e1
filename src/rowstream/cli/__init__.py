"""The command line: one module for each command, one line for each error.

Owns dispatch and exit statuses. What a command does is in its module, which imports what is heavy
when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rowstream import __version__
from rowstream.cli import bench, chat, doctor, gather, inspect, serve, synth, verify
from rowstream.errors import ReadError, RowstreamError

__all__ = ["main"]

_COMMANDS = (inspect, gather, synth, serve, chat, verify, bench, doctor)

_INTERRUPTED = 130  # 128 + SIGINT, what a shell reports
_PIPE_CLOSED = 141  # 128 + SIGPIPE

_EXAMPLES = """\
try it without a model to download:
  rowstream synth demo --table-gib 0.01
  rowstream inspect demo
  rowstream gather demo --tokens 17,42,99
  rowstream doctor demo
  rowstream serve demo
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0; 1 after an error, 2 after wrong usage, 130 after Ctrl-C, 141 where nobody reads the output.
    """
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed what there is to say
        return stop.code if isinstance(stop.code, int) else 1
    try:
        status: int = args.run(args)
        sys.stdout.flush()  # a closed pipe must show here, not when the interpreter ends
    except BrokenPipeError:
        _drop_stdout()
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (RowstreamError, OSError, ValueError) as error:
        print(f"rowstream: error: {_line(error)}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rowstream",
        description="Run language models whose embedding tables are larger than memory:\n"
        "rows stream from the checkpoint, only the ones that a token needs.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rowstream {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_to(commands)
    return parser


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, ReadError) and error.strerror:
        reason = error.strerror[:1].lower() + error.strerror[1:]
        text = reason if error.filename is None else f"{error.filename}: {reason}"
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())


def _drop_stdout() -> None:
    # what is still buffered would fail again when the interpreter flushes it
    try:
        stdout = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stdout)
    os.close(nowhere)
