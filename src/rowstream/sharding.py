"""Which rows of a table are whose, where several ranks share the reading.

A rank gives zeroes for the rows of others, so the sum over all ranks is the table, whatever the
partition. Knows no file and no device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = ["SHARD_BY", "OwnedRows", "Shard", "owner"]

SHARD_BY = ("heads", "rows")
Lookup = Callable[[NDArray[np.int64], Sequence[int], NDArray[np.uint8]], None]


def owner(head: int, world: int) -> int:
    """Return the rank that owns the rows of a head.

    Neighbors go to different ranks: rows are ordered by head, low orders first, and low orders
    repeat more, so that ranges of heads would give the last rank the most to read.
    """
    return head % world


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of several. Raises ValueError for what cannot be.

    By "heads" every rank owns whole heads, see `owner`; with more ranks than heads some own
    nothing. By "rows" it owns one range of rows, as engines cut a vocabulary: for more ranks than
    heads, and where an engine hides the ids of other ranks before they are seen.
    """

    rank: int = 0
    world: int = 1
    by: str = "heads"  # one of SHARD_BY

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ValueError(f"world needs 1 or more, got {self.world}")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank needs to be in [0, {self.world}), got {self.rank}")
        if self.by not in SHARD_BY:
            raise ValueError(f"shard_by needs one of {', '.join(SHARD_BY)}, got {self.by!r}")

    def heads(self, heads: int) -> tuple[int, ...]:
        """Return the heads of which this rank owns rows, by heads."""
        return tuple(head for head in range(heads) if owner(head, self.world) == self.rank)

    def rows(self, num_rows: int) -> range:
        """Return the range of rows that this rank owns, by rows; the last ones may be shorter."""
        each = -(-num_rows // self.world)
        return range(min(self.rank * each, num_rows), min((self.rank + 1) * each, num_rows))


@dataclass(frozen=True)
class OwnedRows:
    """What one rank looks up of a table whose tokens need `sum(groups)` rows each."""

    shard: Shard
    num_rows: int
    groups: tuple[int, ...]  # heads of each order

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """The heads of which the rank may own rows."""
        heads = sum(self.groups)
        return self.shard.heads(heads) if self.shard.by == "heads" else tuple(range(heads))

    @cached_property
    def rows(self) -> range:
        """The rows that the rank may own."""
        return self.shard.rows(self.num_rows) if self.shard.by == "rows" else range(self.num_rows)

    @cached_property
    def lookup_groups(self) -> tuple[int, ...]:
        """Owned heads of each order; orders of which the rank has none are left out."""
        ends = np.cumsum(self.groups).tolist()
        counts = [
            sum(end - width <= head < end for head in self.heads)
            for width, end in zip(self.groups, ends, strict=True)
        ]
        return tuple(count for count in counts if count)

    def gather(self, lookup: Lookup, row_ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Fill out [..., row_bytes] with the owned rows of row_ids [...], zeroes for all others.

        `lookup` fills rows [n, heads, row_bytes] for ids [n, heads] and their groups, and is asked
        for owned rows only. Raises IndexError for an id outside the table, whoever owns it, and
        ValueError for ids by which the owner cannot be told.
        """
        self._check(row_ids)
        heads, row_bytes = sum(self.groups), out.shape[-1]
        if row_ids.ndim > 0 and row_ids.shape[-1] == heads:
            rows = out.reshape(-1, heads, row_bytes)
            wanted = self.select(row_ids.reshape(-1, heads))
            groups = self.lookup_groups
        elif self.shard.by == "rows":
            rows = out.reshape(-1, 1, row_bytes)
            wanted, groups = self._masked(row_ids.reshape(-1, 1)), (1,)
        else:
            raise ValueError(
                f"row ids of a shard by heads need a last axis of {heads} heads, "
                f"got shape {row_ids.shape}"
            )
        if wanted.shape[1] == rows.shape[1]:
            lookup(wanted, groups, rows)
            return
        rows[...] = 0
        if wanted.shape[1] > 0:
            owned = np.empty((*wanted.shape, row_bytes), np.uint8)
            lookup(wanted, groups, owned)
            rows[:, list(self.heads)] = owned

    def select(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ids [tokens, len(self.heads)] of ids [tokens, all heads], -1 where not owned."""
        return self._masked(np.take(ids, self.heads, axis=1) if self.heads else ids[:, :0])

    def _masked(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.shard.by == "heads":
            return ids
        return np.where((ids >= self.rows.start) & (ids < self.rows.stop), ids, -1)

    def _check(self, ids: NDArray[np.int64]) -> None:
        if not ids.size or (ids.min() >= -1 and ids.max() < self.num_rows):
            return
        flat = ids.reshape(-1)
        at = int(np.flatnonzero((flat < -1) | (flat >= self.num_rows))[0])
        raise IndexError(f"row id {flat[at]} at position {at} is outside [0, {self.num_rows})")
