"""The reads that rows need, worked out from a manifest alone: the list that peers replay.

Shares no code with the core's plan, so that agreement of the two counts means something.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowstream import Manifest

__all__ = ["RowSpans", "Spans", "direct_alignment", "unique_rows"]


@dataclass(frozen=True, slots=True)
class Spans:
    """Aligned byte ranges of files, one read each."""

    files: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, part: slice) -> Spans:
        return Spans(self.files[part], self.offsets[part], self.lengths[part])


class RowSpans:
    """Where the rows of a table with one plane lie, in blocks of its files."""

    def __init__(self, manifest: Manifest, alignment: int) -> None:
        (plane,) = manifest.planes
        self.alignment = alignment
        self._row_bytes = plane.row_bytes
        self._first_rows = np.array([e.first_row for e in plane.extents])
        self._starts = np.array([e.offset for e in plane.extents])
        self._files = np.array([e.file for e in plane.extents])
        # the most that one row can need, and so the longest read
        self.slot_bytes = ((plane.row_bytes + alignment - 2) // alignment + 1) * alignment

    def each(self, row_ids: NDArray[np.int64]) -> Spans:
        """Return one span for each row, in the order given, nothing merged."""
        file, first, end = self._blocks(row_ids)
        return _spans(file, first * self.alignment, (end - first) * self.alignment)

    def merged(self, row_ids: NDArray[np.int64]) -> Spans:
        """Return the spans of all rows in disk order; what shares a block is read once.

        A span grows while the next row begins in one of its blocks and it still fits a slot.
        """
        file, first, end = self._blocks(row_ids)
        order = np.lexsort((end, first, file))
        blocks = np.stack([file[order], first[order], end[order]], axis=1)
        slot_blocks = self.slot_bytes // self.alignment
        spans: list[list[int]] = []
        current = [-1, 0, 0]
        for in_file, begins, ends in blocks.tolist():
            joins = in_file == current[0] and begins < current[2]
            if joins and max(ends, current[2]) - current[1] <= slot_blocks:
                current[2] = max(ends, current[2])
            else:
                current = [in_file, begins, ends]
                spans.append(current)
        found = np.array(spans, np.int64).reshape(-1, 3)
        lengths = (found[:, 2] - found[:, 1]) * self.alignment
        return _spans(found[:, 0], found[:, 1] * self.alignment, lengths)

    def _blocks(
        self, row_ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        extent = np.searchsorted(self._first_rows, row_ids, side="right") - 1
        begin = self._starts[extent] + (row_ids - self._first_rows[extent]) * self._row_bytes
        end = begin + self._row_bytes
        return self._files[extent], begin // self.alignment, -(-end // self.alignment)


def _spans(
    files: NDArray[np.int64], offsets: NDArray[np.int64], lengths: NDArray[np.int64]
) -> Spans:
    return Spans(files.astype(np.uint32), offsets.astype(np.uint64), lengths.astype(np.uint32))


def direct_alignment(paths: Sequence[str | os.PathLike[str]]) -> int:
    """Return the smallest block, 512 or 4096 bytes, in which all files take a direct read."""
    with mmap.mmap(-1, 4096) as memory:
        for alignment in (512, 4096):
            with memoryview(memory)[:alignment] as into:
                if all(_takes_direct_read(path, into) for path in paths):
                    return alignment
    raise OSError(f"{os.fspath(paths[0])}: takes no direct reads of 512 or 4096 bytes")


def _takes_direct_read(path: str | os.PathLike[str], into: memoryview) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        return os.preadv(fd, [into], len(into)) >= 0
    except OSError:
        return False
    finally:
        os.close(fd)


def unique_rows(random: np.random.Generator, num_rows: int, count: int) -> NDArray[np.int64]:
    """Return `count` different row ids below `num_rows`, in no order."""
    found = np.empty(0, np.int64)
    while len(found) < count:
        more = random.integers(num_rows, size=count - len(found) + count // 64 + 16)
        found = np.unique(np.concatenate([found, more]))
    return random.permutation(found)[:count]
