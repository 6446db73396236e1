"""A store with a cache, and the simulator of that cache beside it: their counts must be equal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from benchmarks.ngrams import Trace, gather_ends
from benchmarks.policy import ROWSTREAM, Simulator
from numpy.typing import NDArray

from rowstream import RowStore

__all__ = ["MirroredStore", "TokenRange", "groups_of_a_shard"]

TokenRange = tuple[int, int]  # of the corpus, within one document

_SHARDS = 16
_WIDTH = 8
_PAGE = 4096


def groups_of_a_shard(cache_bytes: int, row_bytes: int, shards: int = _SHARDS) -> int:
    """Return how many groups a shard of a cache that takes `cache_bytes` in memory can hold."""
    group = _WIDTH * (8 + row_bytes) + 16  # ids, rows, link
    beside = 1 + 8  # uses, both queues
    most = cache_bytes // shards // (group + beside)
    for groups in range(most, most // 2, -1):
        # a bucket and a ghost for each group, in powers of two
        buckets = 1 << (groups - 1).bit_length()
        pages = -(-(groups * group + buckets * 4) // _PAGE) * _PAGE
        if (pages + groups * beside + buckets * 4) * shards == cache_bytes:
            return groups
    raise RuntimeError(f"a cache of {cache_bytes} bytes is not one that the simulator knows")


class MirroredStore:
    """A store whose gathers are tokens of a trace, all of them noted for the simulator."""

    def __init__(self, folder: Path, trace: Trace, cache_bytes: int, depth: int = 128) -> None:
        """Open the store at a folder; its table's sizes must be those of the trace."""
        self.store = RowStore.open(
            folder,
            backend="disk",
            queue_depth=depth,
            cache_bytes=cache_bytes,
        )
        self.trace = trace
        constants = self.store.manifest.hash
        if constants is None or constants.sizes != trace.constants.sizes:
            raise ValueError(f"{folder}: the trace was made for another table")
        self._keys: list[NDArray[np.uint32]] = []
        self._tokens: list[int] = []
        self._misses: list[int] = []
        self._out = np.zeros((0, self.store.heads, self.store.row_bytes), np.uint8)

    @property
    def reads(self) -> int:
        """Reads issued so far."""
        return int(self.store.stats()["reads"])

    @property
    def misses(self) -> NDArray[np.int64]:
        """Distinct groups that each gather did not find."""
        return np.array(self._misses, np.int64)

    def gather(self, ranges: Sequence[TokenRange]) -> int:
        """Gather the rows of some tokens at once; returns the nanoseconds that it took."""
        ids = np.concatenate([self.trace.row_ids(first, last) for first, last in ranges])
        if len(ids) > len(self._out):
            self._out = np.zeros((len(ids), *self._out.shape[1:]), np.uint8)
        out = self._out[: len(ids)]
        before = self._counted()
        began = time.perf_counter_ns()
        self.store.gather(ids, out)
        elapsed_ns = time.perf_counter_ns() - began
        self._keys += [self.trace.flat(first, last) for first, last in ranges]
        self._tokens.append(len(ids))
        self._misses.append(self._counted() - before)
        return elapsed_ns

    def fill(self, tokens: int, chunk: int) -> int:
        """Read whole documents from the start of the text, at least so many tokens, in chunks."""
        for first, last in self.trace.chunks(chunk):
            if first >= tokens and first in self.trace.corpus.starts:
                return first
            self.gather([(first, last)])
        return len(self.trace.keys)

    def full(self) -> float:
        """Return how much of the cache holds groups, 1 for all of it."""
        stats = self.store.stats()
        entries = groups_of_a_shard(stats["cache_bytes"], self.store.row_bytes)
        return float(stats["cache_groups"]) / (entries * _SHARDS)

    def check(self) -> None:
        """Simulate all gathers so far; raise RuntimeError unless every count is the same."""
        stats = self.store.stats()
        entries = groups_of_a_shard(stats["cache_bytes"], self.store.row_bytes)
        simulator = Simulator(ROWSTREAM, self.trace.hashes, entries, _SHARDS)
        pieces = [len(gather_ends([count])) for count in self._tokens]
        outcome = simulator.run(np.concatenate(self._keys), gather_ends(self._tokens))
        begins = np.cumsum([0, *pieces[:-1]])
        missed = np.add.reduceat(outcome.missed.astype(np.int64), begins)
        different = np.flatnonzero(missed != self.misses)
        if len(different):
            at = int(different[0])
            raise RuntimeError(
                f"gather {at} missed {self._misses[at]} groups, {int(missed[at])} in the "
                f"simulator; {len(different)} of {len(missed)} gathers differ"
            )
        hits = int(outcome.found.sum())
        if (stats["cache_hits"], stats["cached_rows"]) != (hits, hits * _WIDTH):
            raise RuntimeError(f"the cache had {stats['cache_hits']} hits, {hits} in the simulator")

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def _counted(self) -> int:
        return int(self.store.stats()["cache_misses"])
