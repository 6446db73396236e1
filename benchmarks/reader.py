"""Measures gathers from disk against a bare ring and fio: python benchmarks/reader.py --dir FOLDER.

Everything runs in turn in one process on rows not read before, and each baseline also against
itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device import Device
from benchmarks.measure import (
    Measure,
    at_least,
    at_most,
    compare,
    finish,
    judged,
    one_of_each,
    options,
    turn_of,
)
from benchmarks.peers import FioMissing, RawRing, need_fio, run_fio
from benchmarks.places import table_at
from benchmarks.spans import RowSpans, Spans, direct_alignment, unique_rows

from rowstream import RowStore, tables
from rowstream.synth import Recipe

_DEPTHS = (32, 64, 128, 256, 512)
_FIO_ROUNDS = 5
_PERCENTILES = {50: at_most(1.05), 95: at_most(1.10), 99: None, 99.9: None}


class Table:
    """The table measured: its store, and what is known of its files without the store."""

    def __init__(self, folder: Path, depth: int) -> None:
        (self.manifest,) = tables(folder)
        self.recipe = Recipe.read(folder)
        if self.recipe.sparse:
            raise RuntimeError(f"{folder}: a sparse table is not read from the device")
        self.paths = [file.path for file in self.manifest.files]
        self.device = Device(self.paths[0])
        alignment = direct_alignment(self.paths)
        self.spans = RowSpans(self.manifest, alignment, depth=depth)
        self.apart = RowSpans(self.manifest, alignment)
        self.store = RowStore(self.manifest, backend="disk", reader="uring", queue_depth=depth)
        self.ring = RawRing(self.paths, depth=depth, slot_bytes=self.spans.slot_bytes)
        self.depth = depth
        self._random = np.random.default_rng()

    def fresh_rows(self, count: int) -> NDArray[np.int64]:
        """Return different random row ids."""
        return unique_rows(self._random, self.manifest.num_rows, count)

    def reads(self) -> int:
        """Return the reads that the store has issued, repetitions aside."""
        stats = self.store.stats()
        return int(stats["reads"]) - int(stats["retries"])


def bulk(table: Table, rows: int, rounds: int) -> list[Measure]:
    """Compare the rate of large gathers with a replay of the same reads.

    A pair is two gathers and twice two replays, the second time on other rows and in the opposite
    order, so that a device that slows down does so for all.
    """
    arms = ["gather", "raw", "raw again"]
    out = np.zeros((rows, table.manifest.row_bytes), np.uint8)
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    cpu_us: dict[str, list[float]] = {arm: [] for arm in arms}
    touches: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(rounds):
        elapsed_ns = dict.fromkeys(arms, 0)
        cpu_ns = dict.fromkeys(arms, 0)
        reads = 0
        order = turn_of(arms, turn)
        for arms_now in (order, order[::-1]):
            ids = table.fresh_rows(rows)
            spans = table.spans.merged(ids)
            reads += len(spans)
            for place, arm in enumerate(arms_now):
                before = table.device.reads()
                cpu = time.process_time_ns()
                taken_ns = (
                    _gather(table, ids, out, len(spans))
                    if arm == "gather"
                    else table.ring.replay_ns(spans)
                )
                cpu_ns[arm] += time.process_time_ns() - cpu
                elapsed_ns[arm] += taken_ns
                table.device.check(before, len(spans))
                if arm != "gather":
                    touches[place == 0].append(len(spans) / taken_ns * 1e9)
            if not np.array_equal(out, table.recipe.rows(ids)):
                raise RuntimeError("gathered rows differ from what was written: no report")
        for arm in arms:
            rates[arm].append(reads / elapsed_ns[arm] * 1e9)
            cpu_us[arm].append(cpu_ns[arm] / 1000 / rows / 2)
    # work beyond the bare reads, beside that of the replay against itself
    beyond = [
        ours - (one + other) / 2
        for ours, one, other in zip(*(cpu_us[arm] for arm in arms), strict=True)
    ]
    peers = ("raw", "raw again")
    work = {"beyond": beyond, "raw": cpu_us["raw"], "raw again": cpu_us["raw again"]}
    print(
        f"raw replay of reads done before in the round: {median(touches[False]):.0f}/s, "
        f"of new ones: {median(touches[True]):.0f}/s"
    )
    return [
        compare(
            "gather / raw replay", rows, table.depth, rates, "reads/s", at_least(0.95),
            ours="gather", peers=peers,
        ),
        compare(
            "gather less raw replay, CPU", rows, table.depth, work, "us/row",
            at_most(0.6, "us/row"), ours="beyond", peers=peers,
        ),
    ]  # fmt: skip


def _gather(table: Table, ids: NDArray[np.int64], out: NDArray[np.uint8], reads: int) -> int:
    before = table.reads()
    began = time.perf_counter_ns()
    table.store.gather(ids, out)
    elapsed_ns = time.perf_counter_ns() - began
    if table.reads() - before != reads:
        raise RuntimeError(f"gather did {table.reads() - before} reads, {reads} are needed")
    return elapsed_ns


def depths(table: Table, rows: int, rounds: int) -> list[Measure]:
    """Compare bare replays at the reader's depth with the best of all depths."""
    rings = {
        depth: RawRing(table.paths, depth=depth, slot_bytes=table.apart.slot_bytes)
        for depth in sorted({*_DEPTHS, table.depth})
    }
    again = -table.depth
    rates: dict[int, list[float]] = {depth: [] for depth in (*rings, again)}
    for turn in range(rounds):
        for depth in turn_of(list(rates), turn):
            spans = table.apart.merged(table.fresh_rows(rows))
            before = table.device.reads()
            rates[depth].append(len(spans) / rings[abs(depth)].replay_ns(spans) * 1e9)
            table.device.check(before, len(spans))
    middle = {depth: median(rates[depth]) for depth in rings}
    best = max(middle, key=middle.__getitem__)
    print("reads/s at", ", ".join(f"{depth}: {rate:.0f}" for depth, rate in middle.items()))
    twice = list(zip(rates[table.depth], rates[again], strict=True))
    own = [(one + other) / 2 for one, other in twice]
    ratio = median(mine / theirs for mine, theirs in zip(own, rates[best], strict=True))
    aa = median(other / one for one, other in twice)
    name = f"raw replay at {table.depth} / at {best}, the best"
    line = Measure(name, rows, table.depth, median(own), middle[best], ratio, aa, "reads/s")
    found = [judged(line, at_least(0.95))]
    for depth, rate in middle.items():
        found.append(
            Measure(f"raw replay at {depth}", rows, depth, rate, middle[best],
                    rate / middle[best], float("nan"), "reads/s")
        )  # fmt: skip
    return found


def beside_fio(table: Table, rows: int, seconds: float) -> list[Measure]:
    """Compare large gathers with fio at the same depth, where there is fio."""
    try:
        need_fio()
    except FioMissing as reason:
        print(f"without fio: {reason}")
        return []
    rates: dict[str, list[float]] = {"gather": [], "fio": [], "fio again": []}
    out = np.zeros((rows, table.manifest.row_bytes), np.uint8)
    for turn in range(_FIO_ROUNDS):
        for arm in turn_of(list(rates), turn):
            before = table.device.reads()
            if arm == "gather":
                ids = table.fresh_rows(rows)
                reads = len(table.spans.merged(ids))
                rates[arm].append(reads / _gather(table, ids, out, reads) * 1e9)
                table.device.check(before, reads)
                continue
            ran = run_fio(table.paths, depth=table.depth, seconds=seconds)
            table.device.check(before, ran.reads)
            rates[arm].append(ran.reads_per_s)
    peers = ("fio", "fio again")
    return [
        compare("gather / fio", rows, table.depth, rates, "reads/s", ours="gather", peers=peers)
    ]


def token(table: Table, turns: int) -> list[Measure]:
    """Compare the wait for the rows of one token with as many raw reads submitted at once."""
    heads = table.manifest.heads
    out = np.zeros((heads, table.manifest.row_bytes), np.uint8)
    rows = table.fresh_rows(turns * 3 * heads).reshape(turns, 3, heads)

    def gather(ids: NDArray[np.int64], spans: Spans) -> int:
        began = time.perf_counter_ns()
        table.store.gather(ids, out)
        return time.perf_counter_ns() - began

    def raw(ids: NDArray[np.int64], spans: Spans) -> int:
        return table.ring.once_ns(spans)

    arms: Sequence[Callable[[NDArray[np.int64], Spans], int]] = (gather, raw, raw)
    waits = np.zeros((3, turns))
    cpu = np.zeros(3)
    before = table.device.reads()
    for turn in range(turns):
        for place, arm in enumerate(turn_of(range(3), turn)):
            ids = rows[turn, place]
            spans = table.apart.each(ids)
            began = time.process_time_ns()
            waits[arm, turn] = arms[arm](ids, spans)
            cpu[arm] += time.process_time_ns() - began
    table.device.check(before, turns * 3 * heads)
    found = []
    for percentile, bound in _PERCENTILES.items():
        each = (np.percentile(waits, percentile, axis=1) / 1000).tolist()
        found.append(one_of_each(f"token p{percentile}", heads, table.depth, each, "us", bound))
    each = (cpu / 1000 / turns / heads).tolist()
    found.append(one_of_each("token CPU", heads, table.depth, each, "us/row"))
    return found


def main() -> None:
    parser = options(__doc__, rounds=11)
    add = parser.add_argument
    add("--rows", type=int, default=65_536, help="rows of a large gather (default 65536)")
    add("--turns", type=int, default=5000, help="gathers of one token (default 5000)")
    add("--depth", type=int, nargs="+", default=[128], help="reads in flight (default 128)")
    add("--fio-seconds", type=float, default=2.0, help="length of each run of fio (default 2)")
    arguments = parser.parse_args()
    folder = table_at(arguments.dir, arguments.gib)
    found: list[Measure] = []
    for depth in arguments.depth:
        table = Table(folder, depth)
        print(f"depth {depth}, raw ring: {table.ring.registered} registered", flush=True)
        found += bulk(table, arguments.rows, arguments.rounds)
        found += beside_fio(table, arguments.rows, arguments.fio_seconds)
        found += depths(table, max(1, arguments.rows // 2), arguments.rounds)
        found += token(table, arguments.turns)
        table.store.close()
    finish("reader", found, arguments, table.device.machine())


if __name__ == "__main__":
    main()
