"""Gathers rows of all sizes for a long time and watches memory and waits:
python benchmarks/soak.py --dir FOLDER.

The table is sparse: no read reaches a device, so what may grow is ours alone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device import Device
from benchmarks.measure import options, write_results
from benchmarks.places import holes_at

from rowstream import RowStore

# tokens of the gathers of one cycle: prompts, chunks, and the tokens of answers
_CYCLE = (8192, *[1024] * 4, *[128] * 16, *[1] * 256)
_SIZES = (1, 128, 1024, 8192)
_WARM_UP_CYCLES = 4
_TENTHS = 10
_FLAT_BYTES = 1 << 20
_NOISE = 1.10


@dataclass(frozen=True, slots=True)
class Tenth:
    """A tenth of the run: waits of gathers of one token and of 8,192, and resident memory."""

    tenth: int
    rows: int
    seconds: float
    rows_per_s: float
    token_p50_us: float
    token_p99_us: float
    bulk_p50_us: float
    bulk_p99_us: float
    rss_low_bytes: int
    rss_high_bytes: int


class Soak:
    """The open table and the arrays of the run, all of them made and touched before it starts."""

    def __init__(self, store: RowStore, cycles: int, seed: int) -> None:
        self.store = store
        self.random = np.random.default_rng(seed)
        self.cycle = np.array(_CYCLE)
        most = max(_CYCLE) * store.heads
        self._uniform = np.zeros(most)
        self._ids = np.zeros(most, np.int64)
        self._out = np.full((most, store.row_bytes), 0xEE, np.uint8)
        # waits in us, by size, in the order they came
        self.waits = {
            size: np.full(cycles * _CYCLE.count(size), np.nan, np.float32) for size in _SIZES
        }
        self.rss = np.zeros(cycles, np.int64)
        self.seconds = np.zeros(cycles)
        self.cycles = 0

    def run_cycle(self) -> None:
        """Gather each size as often as a cycle has it, in random order."""
        began = time.perf_counter()
        self.random.shuffle(self.cycle)
        seen = {size: self.cycles * _CYCLE.count(size) for size in _SIZES}
        for size in self.cycle.tolist():
            self.waits[size][seen[size]] = self._gather(size)
            seen[size] += 1
        self.seconds[self.cycles] = time.perf_counter() - began
        self.rss[self.cycles] = resident_bytes()
        self.cycles += 1

    def _gather(self, tokens: int) -> float:
        rows = tokens * self.store.heads
        uniform, ids, out = self._uniform[:rows], self._ids[:rows], self._out[:rows]
        self.random.random(out=uniform)
        np.multiply(uniform, self.store.num_rows, out=ids, casting="unsafe")
        out[0] = out[-1] = out[rows // 2] = 0xEE
        shape = (tokens, self.store.heads)
        began = time.perf_counter_ns()
        self.store.gather(ids.reshape(shape), out.reshape(*shape, -1))
        waited_us = (time.perf_counter_ns() - began) / 1000
        if out.max() != 0:
            raise RuntimeError("a row of a sparse table is not zeroes: no report")
        return waited_us

    def tenths(self) -> list[Tenth]:
        """Sum up."""
        found = []
        bounds = np.linspace(0, self.cycles, _TENTHS + 1).astype(int).tolist()
        for number, (first, last) in enumerate(pairwise(bounds)):
            rows = (last - first) * sum(_CYCLE) * self.store.heads
            seconds = float(self.seconds[first:last].sum())
            token, bulk = (
                self.waits[size][first * _CYCLE.count(size) : last * _CYCLE.count(size)]
                for size in (min(_SIZES), max(_SIZES))
            )
            found.append(
                Tenth(
                    number + 1,
                    rows,
                    seconds,
                    rows / seconds,
                    *_percentiles(token),
                    *_percentiles(bulk),
                    int(self.rss[first:last].min()),
                    int(self.rss[first:last].max()),
                )
            )
        return found


def _percentiles(waits: NDArray[np.float32]) -> tuple[float, float]:
    p50, p99 = np.percentile(waits, (50, 99)).tolist()
    return p50, p99


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def verdicts(found: Sequence[Tenth]) -> list[str]:
    """Judge memory over the run, and the waits of its last tenth by those before."""
    low = min(tenth.rss_low_bytes for tenth in found)
    high = max(tenth.rss_high_bytes for tenth in found)
    flat = "met" if high - low <= 2 * _FLAT_BYTES else "missed"
    lines = [
        f"memory {low / 2**20:.1f} to {high / 2**20:.1f} MiB: {flat} (within 1 MiB either way)"
    ]
    p99s = [tenth.token_p99_us for tenth in found]
    worst = max(*p99s[:-1], _NOISE * p99s[0])
    steady = "met" if p99s[-1] <= worst else "missed"
    lines.append(
        f"one token's p99 {p99s[0]:.0f} us in the first tenth, {p99s[-1]:.0f} us in the last: "
        f"{steady} (at most {worst:.0f}, the worst before)"
    )
    return lines


def main() -> int:
    parser = options(__doc__, gib=48.0)
    add = parser.add_argument
    add("--rows", type=float, default=1e8, help="rows to gather in all (default 1e8)")
    add("--seconds", type=float, default=3600.0, help="give up after so long (default 3600)")
    add("--seed", type=int, default=0, help="of the row ids (default 0)")
    arguments = parser.parse_args()
    folder = holes_at(arguments.dir, arguments.gib)
    with RowStore.open(folder, backend="disk") as store:
        cycles = max(_TENTHS, round(arguments.rows / sum(_CYCLE) / store.heads))
        for _ in range(_WARM_UP_CYCLES):  # of all code paths; its arrays are dropped
            warm = Soak(store, 1, arguments.seed)
            warm.run_cycle()
        del warm
        soak = Soak(store, cycles, arguments.seed)
        load = os.getloadavg()[0]
        began = time.monotonic()
        while soak.cycles < cycles and time.monotonic() - began < arguments.seconds:
            soak.run_cycle()
        stats = store.stats()
        machine = arguments.machine or Device(store.manifest.files[0].path).machine()
    if soak.cycles < cycles:
        print(f"gave up after {arguments.seconds:g} s: {soak.cycles} of {cycles} cycles")
        return 1
    found = soak.tenths()
    print(f"reader {stats['reader']}, store {stats['memory_bytes'] / 2**20:.1f} MiB, {load=:.2f}")
    print("tenth      rows/s   token p50   p99 us     8K p50    p99 us   RSS MiB")
    for t in found:
        print(
            f"{t.tenth:5}{t.rows_per_s:12.0f}{t.token_p50_us:12.1f}{t.token_p99_us:9.1f}"
            f"{t.bulk_p50_us:11.0f}{t.bulk_p99_us:10.0f}"
            f"   {t.rss_low_bytes / 2**20:.2f} to {t.rss_high_bytes / 2**20:.2f}"
        )
    lines = verdicts(found)
    print(*lines, sep="\n")
    if not arguments.no_results:
        results = arguments.out / f"soak-{machine}.csv"
        write_results(results, found)
        print(f"written to {results}")
    return 0 if all("missed" not in line for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
