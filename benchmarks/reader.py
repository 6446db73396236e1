"""Measures gathers from disk against a bare ring and fio: python benchmarks/reader.py --dir FOLDER.

Everything runs in turn in one process on rows not read before, and each baseline also against
itself: where that ratio (aa) is outside 0.97 to 1.03, the machine was too busy for a verdict.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device import Device
from benchmarks.peers import FioMissing, RawRing, need_fio, run_fio
from benchmarks.spans import RowSpans, Spans, direct_alignment, unique_rows

from rowstream import RowStore, tables
from rowstream.synth import Recipe, write_checkpoint

_ROOT = Path(__file__).resolve().parents[1]
_AA = (0.97, 1.03)
_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the results: ratio is ours / peer, aa the peer against itself.

    The peer takes two turns for each of ours; it is compared by the mean of the two.
    """

    measure: str
    rows: int
    depth: int
    ours: float
    peer: float
    ratio: float
    aa: float
    unit: str
    verdict: str


def verdict(ratio: float, aa: float, at_least: float | None, at_most: float | None) -> str:
    """Judge a ratio by its bound; without one it is only shown."""
    if not _AA[0] <= aa <= _AA[1]:
        return "unmeasured"
    if at_least is not None:
        return f"{'met' if ratio >= at_least else 'missed'} (>= {at_least})"
    if at_most is not None:
        return f"{'met' if ratio <= at_most else 'missed'} (<= {at_most})"
    return "shown"


class Table:
    """The table measured: its store, and what is known of its files without the store."""

    def __init__(self, folder: Path, depth: int) -> None:
        (self.manifest,) = tables(folder)
        self.recipe = Recipe.read(folder)
        if self.recipe.sparse:
            raise RuntimeError(f"{folder}: a sparse table is not read from the device")
        self.paths = [file.path for file in self.manifest.files]
        self.device = Device(self.paths[0])
        self.spans = RowSpans(self.manifest, direct_alignment(self.paths))
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


def bulk(table: Table, rows: int, rounds: int, fio_seconds: float) -> list[Measure]:
    """Compare the rate of large gathers with a replay of the same reads, and with fio's rate."""
    arms = ["gather", "raw", "raw again"]
    try:
        need_fio()
        arms[2:] = ["fio", "raw again", "fio again"]
    except FioMissing as reason:
        print(f"without fio: {reason}")
    out = np.zeros((rows, table.manifest.row_bytes), np.uint8)
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    cpu_us: dict[str, list[float]] = {arm: [] for arm in arms}
    first_touch: list[float] = []
    touched: list[float] = []
    for turn in range(rounds):
        ids = table.fresh_rows(rows)
        spans = table.spans.merged(ids)
        first = turn % len(arms)
        order = arms[first:] + arms[:first]
        seen = False
        for arm in order if turn % 2 == 0 else order[::-1]:
            before = table.device.reads()
            cpu = time.process_time_ns()
            if arm.startswith("fio"):
                ran = run_fio(table.paths, depth=table.depth, seconds=fio_seconds)
                table.device.check(before, ran.reads)
                rates[arm].append(ran.reads_per_s)
                continue
            elapsed_ns = (
                _gather(table, ids, out, len(spans))
                if arm == "gather"
                else table.ring.replay_ns(spans)
            )
            cpu_us[arm].append((time.process_time_ns() - cpu) / 1000 / rows)
            table.device.check(before, len(spans))
            rates[arm].append(len(spans) / elapsed_ns * 1e9)
            if arm != "gather":
                (touched if seen else first_touch).append(rates[arm][-1])
            seen = True
        if not np.array_equal(out, table.recipe.rows(ids)):
            raise RuntimeError("gathered rows differ from what was written: no report")
    found = [
        _paired("gather / raw replay", table, rows, rates, "raw", "reads/s", at_least=0.95),
        _paired("gather / raw replay, CPU", table, rows, cpu_us, "raw", "us/row"),
    ]
    if "fio" in arms:
        found.insert(
            1, _paired("gather / fio", table, rows, rates, "fio", "reads/s", at_least=0.90)
        )
    if first_touch and touched:
        print(
            f"raw replay of reads done before in the round: {median(touched):.0f}/s, "
            f"of new ones: {median(first_touch):.0f}/s"
        )
    return found


def _gather(table: Table, ids: NDArray[np.int64], out: NDArray[np.uint8], reads: int) -> int:
    before = table.reads()
    began = time.perf_counter_ns()
    table.store.gather(ids, out)
    elapsed_ns = time.perf_counter_ns() - began
    if table.reads() - before != reads:
        raise RuntimeError(f"gather did {table.reads() - before} reads, {reads} are needed")
    return elapsed_ns


def _paired(
    name: str,
    table: Table,
    rows: int,
    values: dict[str, list[float]],
    peer: str,
    unit: str,
    *,
    at_least: float | None = None,
) -> Measure:
    pairs = list(zip(values[peer], values[f"{peer} again"], strict=True))
    peers = [(one + other) / 2 for one, other in pairs]
    ratio = median(ours / theirs for ours, theirs in zip(values["gather"], peers, strict=True))
    aa = median(other / one for one, other in pairs)
    judged = verdict(ratio, aa, at_least, None)
    ours, theirs = median(values["gather"]), median(peers)
    return Measure(name, rows, table.depth, ours, theirs, ratio, aa, unit, judged)


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
        for place in range(3):
            arm = (turn + place) % 3
            ids = rows[turn, place]
            spans = table.spans.each(ids)
            began = time.process_time_ns()
            waits[arm, turn] = arms[arm](ids, spans)
            cpu[arm] += time.process_time_ns() - began
    table.device.check(before, turns * 3 * heads)
    found = []
    for percentile in _PERCENTILES:
        each = np.percentile(waits, percentile, axis=1) / 1000
        bound = 1.15 if percentile == 50 else None
        found.append(_single(f"token p{percentile}", table, each, "us", at_most=bound))
    each = cpu / 1000 / turns / heads
    found.append(_single("token CPU", table, each, "us/row"))
    return found


def _single(
    name: str,
    table: Table,
    each: NDArray[np.float64],
    unit: str,
    *,
    at_most: float | None = None,
) -> Measure:
    ours, one, other = each.tolist()
    peer, aa = (one + other) / 2, other / one
    judged = verdict(ours / peer, aa, None, at_most)
    heads = table.manifest.heads
    return Measure(name, heads, table.depth, ours, peer, ours / peer, aa, unit, judged)


def table_at(folder: Path, gib: float) -> Path:
    """Return the checkpoint with a table of that size under a folder, written if it is missing."""
    place = folder / f"table-{gib:g}gib"
    if not (place / "config.json").exists():
        print(f"writing {gib:g} GiB to {place}", flush=True)
        write_checkpoint(place, table_gib=gib)
    return place


def write_results(path: Path, found: Sequence[Measure]) -> None:
    """Write one line for each measure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [field.name for field in fields(Measure)]
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(names)
        for measure in found:
            values = (getattr(measure, name) for name in names)
            lines.writerow(f"{v:.5g}" if isinstance(v, float) else v for v in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--dir", type=Path, default=_ROOT / "build" / "bench", help="where the table is or goes")
    add("--gib", type=float, default=8.0, help="size of the table (default 8)")
    add("--rows", type=int, default=65_536, help="rows of a large gather (default 65536)")
    add("--rounds", type=int, default=7, help="large gathers (default 7)")
    add("--turns", type=int, default=5000, help="gathers of one token (default 5000)")
    add("--depth", type=int, nargs="+", default=[128], help="reads in flight (default 128)")
    add("--fio-seconds", type=float, default=2.0, help="length of each run of fio (default 2)")
    add("--machine", help="name of the results (default: processors, kernel, device)")
    add("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()
    folder = table_at(arguments.dir, arguments.gib)
    found: list[Measure] = []
    machine = arguments.machine
    load = os.getloadavg()
    for depth in arguments.depth:
        table = Table(folder, depth)
        machine = machine or table.device.machine()
        print(f"depth {depth}, raw ring: {table.ring.registered} registered", flush=True)
        some = bulk(table, arguments.rows, arguments.rounds, arguments.fio_seconds)
        some += token(table, arguments.turns)
        table.store.close()
        found += some
        print(f"{'':26}{'ours':>10}{'peer':>10}{'ratio':>8}{'aa':>8}  unit")
        for m in some:
            print(
                f"{m.measure:26}{m.ours:10.5g}{m.peer:10.5g}{m.ratio:8.3f}{m.aa:8.3f}  "
                f"{m.unit}, {m.verdict}"
            )
    print(f"load average {load[0]:.2f} before, {os.getloadavg()[0]:.2f} after")
    if not arguments.no_results:
        results = _ROOT / "benchmarks" / "results" / f"reader-{machine}.csv"
        write_results(results, found)
        print(f"written to {results}")


if __name__ == "__main__":
    main()
