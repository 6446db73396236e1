"""SHA-256 of a table's row bytes in row order, whatever its shards, and the file that keeps them.

One pass over the table in pieces of 8 MiB; the next is read while one is hashed and looked at.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from rowstream.errors import ManifestError
from rowstream.verify.second_path import Shard

__all__ = ["Checksums", "Look", "read_file", "write_file"]

_PIECE_BYTES: Final = 8 << 20
_VERSION: Final = 1
_FILE_BYTES_MAX: Final = 100_000_000

# called with the first row of a piece and its rows
Look = Callable[[int, NDArray[np.uint8]], None]


class _Table(Protocol):
    row_bytes: int
    shards: list[Shard]

    def span(self, first_row: int, num_rows: int) -> NDArray[np.uint8]: ...


@dataclass(frozen=True, slots=True)
class Checksums:
    """Hexadecimal SHA-256 of all row bytes of a table, and of each shard's."""

    num_rows: int
    row_bytes: int
    table: str
    shard_rows: tuple[int, ...]
    shards: tuple[str, ...]

    @classmethod
    def of(cls, table: _Table, look: Look, progress: Callable[[int], None]) -> Checksums:
        """Read a table once, in row order.

        `look` sees each piece in turn, on the calling thread; `progress` is called with the bytes
        of each.
        """
        whole = hashlib.sha256()
        parts = [hashlib.sha256() for _ in table.shards]
        pieces = _pieces(table)
        with ThreadPoolExecutor(3, thread_name_prefix="rowstream-verify") as pool:

            def read_next() -> tuple[int, int, Future[NDArray[np.uint8]]] | None:
                piece = next(pieces, None)
                if piece is None:
                    return None
                shard, first_row, num_rows = piece
                return shard, first_row, pool.submit(table.span, first_row, num_rows)

            pending = read_next()
            while pending is not None:
                shard, first_row, reading = pending
                rows = reading.result()
                pending = read_next()
                flat = rows.reshape(-1)
                hashing = [pool.submit(h.update, flat.data) for h in (whole, parts[shard])]
                look(first_row, rows)
                for hashed in hashing:
                    hashed.result()
                progress(rows.size)
        return cls(
            sum(shard.num_rows for shard in table.shards),
            table.row_bytes,
            whole.hexdigest(),
            tuple(shard.num_rows for shard in table.shards),
            tuple(part.hexdigest() for part in parts),
        )

    @classmethod
    def from_json(cls, stored: Any) -> Checksums:
        """Build checksums from what `as_json` returned. Raises TypeError, ValueError, KeyError."""
        shards = [(shard["rows"], shard["sha256"]) for shard in stored["shards"]]
        made = cls(
            stored["rows"],
            stored["row_bytes"],
            stored["sha256"],
            tuple(rows for rows, _ in shards),
            tuple(digest for _, digest in shards),
        )
        if sum(made.shard_rows) != made.num_rows or not isinstance(made.table, str):
            raise ValueError("shards do not add up to the table")
        return made

    def as_json(self) -> dict[str, Any]:
        """Return the checksums as plain lists and dictionaries."""
        return {
            "rows": self.num_rows,
            "row_bytes": self.row_bytes,
            "sha256": self.table,
            "shards": [
                {"rows": rows, "sha256": digest}
                for rows, digest in zip(self.shard_rows, self.shards, strict=True)
            ],
        }

    def difference(self, other: Checksums) -> str | None:
        """Say how the rows differ from those of another time, or None; shards may differ."""
        for what, found, needed in (
            ("rows", self.num_rows, other.num_rows),
            ("bytes a row", self.row_bytes, other.row_bytes),
        ):
            if found != needed:
                return f"needs {needed} {what}, found {found}"
        if self.table == other.table:
            return None
        if self.shard_rows != other.shard_rows:
            return f"needs sha256 {other.table}, found {self.table}"
        changed = [
            str(shard)
            for shard, (a, b) in enumerate(zip(self.shards, other.shards, strict=True))
            if a != b
        ]
        more = f" and {len(changed) - 8} more" if len(changed) > 8 else ""
        return f"other bytes in shard {', '.join(changed[:8])}{more}"


def read_file(path: Path) -> dict[str, Checksums]:
    """Read a file of checksums, by table. Raises ManifestError, OSError."""
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise ValueError("too long")
        stored = json.loads(path.read_bytes())
        if stored["rowstream_checksums"] != _VERSION:
            raise ValueError("another version")
        return {name: Checksums.from_json(table) for name, table in stored["tables"].items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise ManifestError.mismatch(
            "", "checksums as verify writes them", "something else", file=path.name
        ) from None


def write_file(path: Path, tables: dict[str, Checksums]) -> None:
    """Write a file of checksums: all of it or, with an OSError that names it, nothing."""
    stored = {
        "rowstream_checksums": _VERSION,
        "tables": {name: table.as_json() for name, table in tables.items()},
    }
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        try:
            with temporary.open("x") as file:
                file.write(json.dumps(stored, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _pieces(table: _Table) -> Iterator[tuple[int, int, int]]:
    """Yield (shard, first row, rows) in row order."""
    step = max(1, _PIECE_BYTES // table.row_bytes)
    for number, shard in enumerate(table.shards):
        for row in range(shard.first_row, shard.first_row + shard.num_rows, step):
            yield number, row, min(step, shard.first_row + shard.num_rows - row)
