"""Measures gathers from tmpfs against a loop of pread: python benchmarks/tmpfs.py.

Writes a table to /dev/shm and removes it. One thread; ours and the peer in turn, on rows not read
before. There is no device here: what is compared is work.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device import Device
from benchmarks.native import compiled
from benchmarks.reader import Measure, table_at, verdict, write_results
from benchmarks.spans import RowSpans, unique_rows

from rowstream import Manifest, RowStore
from rowstream.synth import Recipe

_ROOT = Path(__file__).resolve().parents[1]


class Loop:
    """A loop of pread over the files of a table."""

    def __init__(self, manifest: Manifest) -> None:
        self._run = compiled("pread_rows").pread_rows
        self._run.restype = ctypes.c_int64
        self._run.argtypes = [ctypes.c_void_p] * 3 + [
            *(ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p)
        ]
        self._spans = RowSpans(manifest, 1)
        self._row_bytes = manifest.row_bytes
        files = [os.open(file.path, os.O_RDONLY) for file in manifest.files]
        self._files = np.array(files, np.int32)

    def read(self, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> int:
        """Fill `out` with rows and return the nanoseconds taken; where they lie is not counted."""
        spans = self._spans.each(ids)
        found = self._run(
            self._files.ctypes.data,
            spans.files.ctypes.data,
            spans.offsets.ctypes.data,
            len(ids),
            self._row_bytes,
            out.ctypes.data,
        )
        if found < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"pread loop: {os.strerror(code)}")
        return int(found)


def measure(store: RowStore, recipe: Recipe, rows: int, rounds: int) -> Measure:
    """Compare the time of gathers of so many different rows with the loop's."""
    loop = Loop(store.manifest)
    random = np.random.default_rng()
    out = np.zeros((rows, store.row_bytes), np.uint8)

    def gather(ids: NDArray[np.int64], into: NDArray[np.uint8]) -> int:
        began = time.perf_counter_ns()
        store.gather(ids, into)
        return time.perf_counter_ns() - began

    arms = {"gather": gather, "pread": loop.read, "pread again": loop.read}
    each: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(rounds + 1):
        names = list(arms)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            ids = unique_rows(random, store.num_rows, rows)
            spent = arms[name](ids, out)
            if not np.array_equal(out, recipe.rows(ids)):
                raise RuntimeError(f"{name}: rows differ from what was written: no report")
            if turn > 0:  # the first touches memory for the first time
                each[name].append(rows / spent * 1e9)
    pairs = list(zip(each["pread"], each["pread again"], strict=True))
    both = [(one + other) / 2 for one, other in pairs]
    ratio = median(mine / theirs for mine, theirs in zip(each["gather"], both, strict=True))
    aa = median(other / one for one, other in pairs)
    judged = verdict(ratio, aa, 1.0, None)
    ours, theirs = median(each["gather"]), median(both)
    return Measure("tmpfs: gather / pread loop", rows, 1, ours, theirs, ratio, aa, "rows/s", judged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--dir", type=Path, default=Path("/dev/shm"), help="a folder of tmpfs")
    add("--gib", type=float, default=2.0, help="size of the table (default 2)")
    add("--rows", type=int, nargs="+", default=[65_536], help="of a gather (default 65536)")
    add("--rounds", type=int, default=11, help="turns of each (default 11)")
    add("--machine", help="name of the results (default: processors, kernel, device)")
    add("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="rowstream-bench-") as made:
        folder = table_at(Path(made), arguments.gib)
        with RowStore.open(folder) as store:
            print(f"{store.backend}: {store.reason}")
            if store.stats()["reader"] != "inline":
                raise RuntimeError(f"{arguments.dir} is no tmpfs: no report")
            recipe = Recipe.read(folder)
            found = [measure(store, recipe, rows, arguments.rounds) for rows in arguments.rows]
    for m in found:
        print(
            f"{m.measure}, {m.rows} rows: {m.ours:.5g} {m.unit} against {m.peer:.5g}, "
            f"ratio {m.ratio:.3f}, A/A {m.aa:.3f}, {m.verdict}"
        )
    print(f"load average {load[0]:.2f} before, {os.getloadavg()[0]:.2f} after")
    if not arguments.no_results:
        machine = arguments.machine or Device(_ROOT).machine()
        path = _ROOT / "benchmarks" / "results" / f"tmpfs-{machine}.csv"
        write_results(path, found)
        print(f"written to {path.name}")


if __name__ == "__main__":
    main()
