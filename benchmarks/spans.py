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

__all__ = ["PIECE_ROWS", "RowSpans", "Spans", "direct_alignment", "unique_rows"]

# the constants of docs/design.md, "Planning"
PIECE_ROWS = 4_194_304  # rows that are planned at a time, at most
_JOIN_BYTES = 4096  # what nobody needs is read where it parts two rows by no more
_BOUNCE_BYTES = 4 << 20  # for all reads in flight, of gathers of more than 1,024 rows
_FILE_BITS = 48  # blocks of a file are numbered below


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

    def __init__(
        self,
        manifest: Manifest,
        alignment: int,
        *,
        depth: int | None = None,
        join_bytes: int = _JOIN_BYTES,
        piece_rows: int = PIECE_ROWS,
    ) -> None:
        """Find them. Without a depth only what shares a block is one read."""
        (plane,) = manifest.planes
        self.alignment = alignment
        self._row_bytes = plane.row_bytes
        self._first_rows = np.array([e.first_row for e in plane.extents])
        self._starts = np.array([e.offset for e in plane.extents])
        self._files = np.array([e.file for e in plane.extents])
        self._piece_rows = piece_rows
        # the most that one row can need
        slot_blocks = (plane.row_bytes + alignment - 2) // alignment + 1
        self._join_blocks = -1
        if depth is not None:
            self._join_blocks = join_bytes // alignment
            # an odd number of blocks
            slot_blocks = max(slot_blocks, (_BOUNCE_BYTES // depth // alignment - 1) | 1)
        self.slot_bytes = slot_blocks * alignment  # the longest read

    def each(self, row_ids: NDArray[np.int64]) -> Spans:
        """Return one span for each row, in the order given, nothing merged."""
        file, first, end = self._blocks(row_ids)
        return _spans(file, first * self.alignment, (end - first) * self.alignment)

    def merged(self, row_ids: NDArray[np.int64]) -> Spans:
        """Return the spans of a gather, in disk order within each piece of it.

        A span grows while the next row begins in one of its blocks, or no farther behind them than
        is worth reading, and while it still fits a slot.
        """
        parts = [
            self._of_piece(row_ids[begin : begin + self._piece_rows])
            for begin in range(0, len(row_ids), self._piece_rows)
        ]
        file, first, end = np.concatenate([np.empty((3, 0), np.int64), *parts], axis=1)
        return _spans(file, first * self.alignment, (end - first) * self.alignment)

    def _of_piece(self, row_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        file, first, end = self._blocks(row_ids)
        # places in all files as one number; of rows of one length who begins first ends first
        begins, ends = np.sort(file << _FILE_BITS | first), np.sort(file << _FILE_BITS | end)
        count = len(begins)
        # a span goes on until a gap, or until it would be too long
        gaps = np.flatnonzero(begins[1:] - ends[:-1] > self._join_blocks) + 1
        gaps = np.append(gaps, count)
        until_gap = gaps[np.searchsorted(gaps, np.arange(count), side="right")]
        until_full = np.searchsorted(ends, begins + self.slot_bytes // self.alignment, side="right")
        after = np.minimum(until_gap, until_full).tolist()
        heads = []
        at = 0
        while at < count:
            heads.append(at)
            at = after[at]
        starts = begins[heads]
        stops = ends[np.array([*heads[1:], count]) - 1]
        file = starts >> _FILE_BITS
        return np.stack([file, starts - (file << _FILE_BITS), stops - (file << _FILE_BITS)])

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
    if count > num_rows:
        raise ValueError(f"{count} different rows are asked for, there are {num_rows}")
    draws = count + count // 8 + 64
    while True:
        drawn = np.sort(random.integers(num_rows, size=draws))
        found = drawn[np.append(True, drawn[1:] != drawn[:-1])]
        if len(found) >= count:
            return random.permutation(found)[:count]
        draws *= 2
