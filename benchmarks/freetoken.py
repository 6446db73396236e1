"""Measures gathers beside FreeToken's row store: python benchmarks/freetoken.py --dir FOLDER.

A peer that may be absent: `pip install --no-deps --target build/bench/freetoken freetoken`, with
torch installed. On the disk: rows per second and CPU per row, on rows not read before. On a file
of holes and one core, where the medium is never the limit: time per row.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cache import holes_at
from benchmarks.device import Device
from benchmarks.reader import Measure, table_at, verdict, write_results
from benchmarks.spans import unique_rows

from rowstream import Manifest, RowStore, tables

_ROOT = Path(__file__).resolve().parents[1]
_DEPTH = 128


class PeerMissing(RuntimeError):
    """FreeToken's row store cannot be loaded here; the text says why."""


def load_peer() -> ModuleType:
    """Return the extension module of FreeToken, without the rest of the package."""
    try:
        importlib.import_module("torch")  # it links to its libraries
    except ImportError as failure:
        raise PeerMissing("FreeToken needs torch, which is not installed") from failure
    places = [_ROOT / "build" / "bench" / "freetoken", *map(Path, sys.path)]
    suffix = f"cpython-{sys.version_info.major}{sys.version_info.minor}-*.so"
    for place in places:
        for path in sorted(place.glob(f"freetoken/kernel/_row_store.{suffix}")):
            spec = importlib.util.spec_from_file_location("_row_store", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except ImportError as failure:
                raise PeerMissing(f"{path}: {failure}") from failure
            return module
    raise PeerMissing(
        "FreeToken is not installed: pip install --no-deps --target build/bench/freetoken freetoken"
    )


class Peer:
    """FreeToken's row store over the files of a manifest."""

    def __init__(self, manifest: Manifest) -> None:
        """Open it. Raises PeerMissing where it is not here or cannot have this layout."""
        module = load_peer()
        (plane,) = manifest.planes
        lengths = {extent.num_rows for extent in plane.extents}
        if len(lengths) != 1:
            raise PeerMissing(f"FreeToken needs shards of one length, here are {sorted(lengths)}")
        self._store: Any = module.RowStore(
            paths=[str(file.path) for file in manifest.files],
            extent_file=[extent.file for extent in plane.extents],
            extent_base=[extent.offset for extent in plane.extents],
            rows_per_extent=lengths.pop(),
            row_bytes=plane.row_bytes,
            row_stride=plane.row_bytes,
            use_io_uring=True,
        )

    @property
    def how(self) -> str:
        """Say how it reads."""
        return str(self._store.io_backend())

    def gather(self, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Fill out with rows and wait for them."""
        self._store.stage_rows(ids.ctypes.data, len(ids), out.ctypes.data)
        self._store.flush()


class Contest:
    """Both over one table, on rows that neither read before."""

    def __init__(self, folder: Path, device: Device | None) -> None:
        (self.manifest,) = tables(folder)
        self.device = device
        self.store = RowStore(self.manifest, backend="disk", queue_depth=_DEPTH)
        self.peer = Peer(self.manifest)
        self._random = np.random.default_rng()

    def run(self, rows: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Take turns; returns rows per second and CPU us per row of each arm."""
        outs = [np.zeros((rows, self.manifest.row_bytes), np.uint8) for _ in range(2)]
        gathers: dict[str, Callable[[NDArray[np.int64]], object]] = {
            "ours": lambda ids: self.store.gather(ids, outs[0]),
            "peer": lambda ids: self.peer.gather(ids, outs[1]),
            "peer again": lambda ids: self.peer.gather(ids, outs[1]),
        }
        rates: dict[str, list[float]] = {arm: [] for arm in gathers}
        cpu_us: dict[str, list[float]] = {arm: [] for arm in gathers}
        for arm in gathers:  # rings and pages of memory are there after a first turn
            gathers[arm](self._rows(rows))
        for turn in range(rounds):
            arms = list(gathers)
            arms = arms[turn % 3 :] + arms[: turn % 3]
            for arm in arms if turn % 2 == 0 else arms[::-1]:
                # the same rows again would come from a cache below the device
                ids = self._rows(rows)
                before = self.device.reads() if self.device else 0
                cpu, began = time.process_time_ns(), time.perf_counter_ns()
                gathers[arm](ids)
                elapsed_ns = time.perf_counter_ns() - began
                cpu_us[arm].append((time.process_time_ns() - cpu) / 1000 / rows)
                rates[arm].append(rows / elapsed_ns * 1e9)
                if self.device:
                    # of that many random rows few share a block
                    self.device.check(before, int(0.97 * rows))
        same = self._rows(min(rows, 65_536))
        gathers["ours"](same) if rows == len(same) else self.store.gather(
            same, outs[0][: len(same)]
        )
        self.peer.gather(same, outs[1][: len(same)])
        if not np.array_equal(outs[0][: len(same)], outs[1][: len(same)]):
            raise RuntimeError("both gathered different bytes: no report")
        return rates, cpu_us

    def _rows(self, count: int) -> NDArray[np.int64]:
        return unique_rows(self._random, self.manifest.num_rows, count)


def paired(
    name: str,
    rows: int,
    values: dict[str, list[float]],
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Measure:
    """Make a line of medians of pairs."""
    pairs = list(zip(values["peer"], values["peer again"], strict=True))
    both = [(one + other) / 2 for one, other in pairs]
    ratio = median(ours / theirs for ours, theirs in zip(values["ours"], both, strict=True))
    aa = median(other / one for one, other in pairs)
    judged = verdict(ratio, aa, at_least, at_most)
    return Measure(
        name, rows, _DEPTH, median(values["ours"]), median(both), ratio, aa, unit, judged
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--dir", type=Path, default=_ROOT / "build" / "bench", help="where the tables are or go")
    add("--gib", type=float, default=8.0, help="size of the tables (default 8)")
    add("--rounds", type=int, default=11, help="turns of each (default 11)")
    add("--machine", help="name of the results (default: processors, kernel, device)")
    add("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()
    try:
        load_peer()
    except PeerMissing as reason:
        print(f"skipped: {reason}")
        return
    folder = table_at(arguments.dir, arguments.gib)
    device = Device(folder / "config.json")
    load = os.getloadavg()
    contest = Contest(folder, device)
    print(f"FreeToken reads with {contest.peer.how}")
    rates, cpu_us = contest.run(65_536, arguments.rounds)
    found = [
        paired("disk, rows/s / FreeToken", 65_536, rates, "1/s", at_least=1.1),
        paired("disk, CPU / FreeToken", 65_536, cpu_us, "us/row", at_most=0.8),
    ]
    contest.store.close()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    contest = Contest(holes_at(arguments.dir, arguments.gib), None)
    for rows, bound in ((65_536, 1.2), (1_048_576, 1.8)):
        rates, cpu_us = contest.run(rows, arguments.rounds)
        name = "holes on one core, rows/s / FreeToken"
        found.append(paired(name, rows, rates, "1/s", at_least=bound))
        found.append(paired("holes on one core, CPU / FreeToken", rows, cpu_us, "us/row"))
    for m in found:
        print(
            f"{m.measure:40}{m.rows:9}{m.ours:10.5g}{m.peer:10.5g}{m.ratio:8.3f}{m.aa:8.3f}  "
            f"{m.unit}, {m.verdict}"
        )
    print(f"load average {load[0]:.2f} before, {os.getloadavg()[0]:.2f} after")
    if not arguments.no_results:
        name = f"freetoken-{arguments.machine or device.machine()}.csv"
        write_results(_ROOT / "benchmarks" / "results" / name, found)
        print(f"written to {name}")


if __name__ == "__main__":
    main()
