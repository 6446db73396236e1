"""How the commands write sizes, aligned lines and JSON. Knows no command."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

__all__ = ["fields", "json_text", "plural", "size"]

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def size(num_bytes: int) -> str:
    """Return a size for people: `160 bytes`, `47.68 GiB`."""
    if num_bytes < 1024:
        return plural(num_bytes, "byte")
    power = min(len(_UNITS), (num_bytes.bit_length() - 1) // 10)
    return f"{num_bytes / 1024**power:.2f} {_UNITS[power - 1]}"


def plural(count: int, noun: str) -> str:
    """Return `1 file`, `1,024 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def fields(pairs: Iterable[tuple[str, str]], indent: int = 2) -> str:
    """Return aligned lines of label and value; a value's further lines stay under its first."""
    rows = list(pairs)
    width = max((len(label) for label, _ in rows), default=0)
    lines = []
    for label, value in rows:
        for number, part in enumerate(value.split("\n")):
            head = label if number == 0 else ""
            lines.append(f"{'':{indent}}{head:<{width}}  {part}".rstrip())
    return "\n".join(lines)


def json_text(value: Any) -> str:
    """Return strict JSON: NaN and infinities, which it has no words for, raise ValueError."""
    return json.dumps(value, indent=2, allow_nan=False)
