"""Tables of random bytes in plain files, and the native tables over them, for tests of the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowstream import _core

# every way to open a table; each must give the same bytes
DISK_KINDS = (
    *("uring-direct", "uring-buffered", "pool-direct", "pool-buffered"),
    *("inline-direct", "inline-buffered"),
)
KINDS = (*DISK_KINDS, "mapped", "loaded")

Extents = list[tuple[int, int, int, int]]


@dataclass
class RawTable:
    """Files of random bytes of which some are rows. `rows[plane]` is what a gather must return."""

    paths: list[str]
    planes: list[tuple[int, Extents]]
    rows: list[NDArray[np.uint8]]

    @property
    def num_rows(self) -> int:
        return len(self.rows[0])

    @property
    def row_bytes(self) -> int:
        return sum(row_bytes for row_bytes, _ in self.planes)

    def open(self, kind: str, **options: Any) -> _core.DiskTable | _core.ResidentTable:
        if kind in ("mapped", "loaded"):
            return _core.ResidentTable(self.paths, self.planes, mapped=kind == "mapped", **options)
        reader, access = kind.split("-")
        return _core.DiskTable(
            self.paths, self.planes, reader=reader, direct=access == "direct", **options
        )

    def expected(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The rows of ids [n, heads], straight from the arrays that were written."""
        whole = np.concatenate(self.rows, axis=1)
        picked = whole[np.where(ids < 0, 0, ids)]
        picked[ids < 0] = 0
        return picked


def write(
    folder: Path,
    rng: np.random.Generator,
    *,
    row_bytes: Sequence[int] = (160,),
    shard_rows: Sequence[int] = (700, 700, 700, 311),
    shards_per_file: int = 2,
    lead: int = 2239,
    gap: int = 0,
    tail: int = 0,
) -> RawTable:
    """Write shards of random rows: `lead` bytes first, `gap` between shards, `tail` at the end."""
    planes: list[tuple[int, Extents]] = []
    rows: list[NDArray[np.uint8]] = []
    files: list[list[bytes]] = [
        [rng.bytes(lead)] for _ in range(-(-len(shard_rows) // shards_per_file))
    ]
    for width in row_bytes:
        extents: Extents = []
        parts = []
        first = 0
        for shard, count in enumerate(shard_rows):
            file = files[shard // shards_per_file]
            extents.append((shard // shards_per_file, sum(map(len, file)), first, count))
            part = rng.integers(0, 256, (count, width), dtype=np.uint8)
            file += [part.tobytes(), rng.bytes(gap)]
            parts.append(part)
            first += count
        planes.append((width, extents))
        rows.append(np.concatenate(parts))
    paths = []
    for number, chunks in enumerate(files):
        path = folder / f"table-{number}.bin"
        # the last row ends the file unless a tail was asked for
        data = b"".join(chunks)
        path.write_bytes((data[: len(data) - gap] if gap else data) + rng.bytes(tail))
        paths.append(str(path))
    return RawTable(paths, planes, rows)


def gather(
    table: _core.DiskTable | _core.ResidentTable,
    ids: NDArray[np.int64],
    groups: Sequence[int] | None = None,
) -> NDArray[np.uint8]:
    """Gather ids [n, heads] into a poisoned array."""
    out = np.full((*ids.shape, table.row_bytes), 0xEE, np.uint8)
    table.gather(ids, groups if groups is not None else [ids.shape[1]], out)
    return out
