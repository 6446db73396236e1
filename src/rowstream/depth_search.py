"""How many reads a device wants in flight, and of which size, found within a budget of time.

Reads through the core's own reader, in turns, so that what else the machine does meets every depth
alike. Knows no table and keeps nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import numpy as np

from rowstream import _core

__all__ = ["DEPTHS", "Open", "Search", "search"]

DEPTHS = (16, 32, 64, 128, 256, 512)

_TOKEN_READS = 16  # of the released tables
_ROUNDS = 3
_MOST_READS = 2048  # of one turn
# of the budget, up to the end of each part
_TOKENS_SHARE = 0.15
_DEPTHS_SHARE = 0.75
# of the best rate: what a queue half as deep reaches, a deeper one only adds waiting to
_ENOUGH = 0.97
# no device is that much slower for a deeper queue: something else ran meanwhile
_DISTURBED = 0.85

# (depth, block in bytes) to a table whose rows are the blocks to read
Open = Callable[[int, int], _core.DiskTable]


@dataclass(frozen=True, slots=True)
class Search:
    """What was found; a depth or block that the time did not suffice for is left out."""

    p50_us: float  # until 16 reads submitted at once are all there
    depth_rates: tuple[tuple[int, float], ...]  # reads/s with so many in flight, of the first block
    block_rates: tuple[tuple[int, float], ...]  # reads/s of so many bytes, at the chosen depth
    queue_depth: int | None  # the smallest as good as the best; None where that cannot be told
    block: int
    reads: int

    @property
    def reads_per_s(self) -> float:
        """The best rate of all depths."""
        return max(rate for _, rate in self.depth_rates)


def search(
    open_at: Open, blocks: Sequence[int], budget_s: float, *, most_depth: int | None = None
) -> Search:
    """Try depths with reads of `blocks[0]` bytes, then the other blocks at the depth chosen.

    Takes about `budget_s` seconds, and one gather of 16 reads at least. `most_depth` bounds what is
    tried.
    """
    began = time.perf_counter()
    with ExitStack() as stack:
        tables = _Tables(open_at, stack, max(blocks))
        batches = [tables.gather(_TOKEN_READS, blocks[0], _TOKEN_READS)]
        while time.perf_counter() - began < _TOKENS_SHARE * budget_s:
            batches.append(tables.gather(_TOKEN_READS, blocks[0], _TOKEN_READS))
        p50_s = median(batches)
        depths = [d for d in DEPTHS if most_depth is None or d <= max(most_depth, DEPTHS[0])]
        rates = _depth_rates(
            tables, blocks[0], depths, _TOKEN_READS / p50_s, began + _DEPTHS_SHARE * budget_s
        )
        depth = _smallest(rates)
        block_rates: dict[int, float] = {}
        if len(blocks) > 1 and depth is not None:
            block_rates = _block_rates(tables, blocks, depth, rates[depth], began + budget_s)
        reads = tables.reads()
    # a larger block reads more than is needed: it has to be faster
    block = blocks[0]
    for other, rate in block_rates.items():
        if _ENOUGH * rate > block_rates[block]:
            block = other
    return Search(
        p50_s * 1e6, tuple(rates.items()), tuple(block_rates.items()), depth, block, reads
    )


class _Tables:
    """Open tables, and what is read from them."""

    def __init__(self, open_at: Open, stack: ExitStack, most_bytes: int) -> None:
        self._open_at = open_at
        self._stack = stack
        self._open: dict[tuple[int, int], _core.DiskTable] = {}
        self._random = np.random.default_rng()
        # written: a page's first touch is not the disk's
        self._out = np.ones(_MOST_READS * most_bytes, np.uint8)

    def gather(self, depth: int, block: int, reads: int) -> float:
        """Return the seconds that so many random reads take."""
        table = self.table(depth, block)
        ids = self._random.integers(table.num_rows, size=(reads, 1))
        out = self._out[: reads * block].reshape(reads, 1, block)
        began = time.perf_counter()
        table.gather(ids, (1,), out)
        return time.perf_counter() - began

    def table(self, depth: int, block: int) -> _core.DiskTable:
        key = (depth, block)
        if key not in self._open:
            self._open[key] = self._open_at(depth, block)
            self._stack.callback(self._open[key].close)
        return self._open[key]

    def reads(self) -> int:
        return sum(table.counters()["reads"] for table in self._open.values())


def _depth_rates(
    tables: _Tables, block: int, depths: list[int], rate: float, until: float
) -> dict[int, float]:
    """Return reads/s by depth, `rate` is a first guess.

    Of several turns the best counts: the others lost time to something else on the machine.
    """
    round_s = (until - time.perf_counter()) / _ROUNDS
    found: dict[int, list[float]] = {}
    for number in range(_ROUNDS):
        for position, depth in enumerate(depths):
            rate = max(found[depth]) if depth in found else rate
            # both ends of a gather have a queue that is not full: twice the depth at least
            reads = min(_MOST_READS, max(2 * depth, int(rate * round_s / len(depths))))
            if number == 0 and reads / rate > round_s / 2:
                # a slow device: neither this depth nor deeper ones
                found = found or {depth: [rate]}
                del depths[position:]
                break
            if number > 0 and time.perf_counter() + reads / rate > until:
                break
            rate = reads / tables.gather(depth, block, reads)
            found.setdefault(depth, []).append(rate)
    return {depth: max(rates) for depth, rates in found.items()}


def _smallest(rates: dict[int, float]) -> int | None:
    if len(rates) < 2:
        return None
    best = max(rates.values())
    depth = min(depth for depth, rate in rates.items() if rate >= _ENOUGH * best)
    deeper = [rates[d] for d in sorted(rates) if d > depth]
    return None if deeper and deeper[0] < _DISTURBED * rates[depth] else depth


def _block_rates(
    tables: _Tables, blocks: Sequence[int], depth: int, rate: float, until: float
) -> dict[int, float]:
    turn_s = (until - time.perf_counter()) / (_ROUNDS * len(blocks))
    reads = max(1, min(_MOST_READS, int(rate * turn_s)))
    found: dict[int, list[float]] = {block: [] for block in blocks}
    for number in range(_ROUNDS):
        for block in blocks:
            if number > 0 and time.perf_counter() + reads / rate > until:
                break
            found[block].append(reads / tables.gather(depth, block, reads))
    return {block: max(rates) for block, rates in found.items()}
