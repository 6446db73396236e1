"""Arguments that several commands share, and how their text is read."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # a private name of argparse, generic in type stubs only
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = Any

__all__ = [
    "Commands",
    "add_command",
    "add_reader",
    "add_table",
    "add_table_paths",
    "ids",
    "positive",
    "size",
]

_INT64 = 2**63


def add_command(
    commands: Commands, name: str, *, help: str, description: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command whose `--help` ends with examples."""
    return commands.add_parser(
        name,
        help=help,
        # the formatter that keeps the examples' lines does not break the description's
        description=textwrap.fill(description, 80),
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_table(parser: argparse.ArgumentParser) -> None:
    """Add PATH and `--table`."""
    parser.add_argument(
        "path",
        metavar="PATH",
        help="checkpoint folder, .safetensors file, or id in the local hub cache",
    )
    parser.add_argument(
        "--table",
        metavar="NAME",
        help="which table, as inspect names it; needed where there are several",
    )


def add_table_paths(parser: argparse.ArgumentParser) -> None:
    """Add `--table-path`, which may be given several times."""
    parser.add_argument(
        "--table-path",
        metavar="PATH",
        action="append",
        default=[],
        help="folder or file on another drive from which shards of the table are taken; may be "
        "given several times: of a shard that several have, the less busy drive's copy is read",
    )


def add_reader(parser: argparse.ArgumentParser) -> None:
    """Add `--reader`."""
    parser.add_argument(
        "--reader",
        default="auto",
        choices=("auto", "uring", "pool", "inline"),
        help="how files are read: io_uring, 16 threads where that is refused, or, on tmpfs, the "
        "calling thread (default: auto)",
    )


def ids(text: str) -> list[int]:
    """Read `1,2,3`."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"needs integers like 1,2,3, got {text!r}") from None
    for value in values:
        if not -_INT64 <= value < _INT64:
            raise argparse.ArgumentTypeError(f"needs integers of 64 bits, got {value}")
    return values


def positive(text: str) -> int:
    """Read a whole number from 1 on."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"needs a whole number from 1 on, got {text!r}")
    return value


def size(text: str) -> int:
    """Read a size in bytes: a number, or one with KiB, MiB or GiB behind it."""
    units = {"kib": 10, "mib": 20, "gib": 30}
    lower = text.strip().lower()
    shift = units.get(lower[-3:], 0)
    try:
        value = float(lower[:-3] if shift else lower)
        found = int(value * (1 << shift))
    except (ValueError, OverflowError):
        found = -1
    if found < 0:
        raise argparse.ArgumentTypeError(f"needs a size such as 64MiB, got {text!r}")
    return found
