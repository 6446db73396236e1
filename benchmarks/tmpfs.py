"""Measures gathers from tmpfs against a loop of pread: python benchmarks/tmpfs.py.

Writes a table to /dev/shm and removes it. One thread; ours and the peer in turn, on rows not read
before. There is no device here: what is compared is work.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device import Device
from benchmarks.measure import Measure, at_least, compare, finish, options, turn_of
from benchmarks.native import compiled
from benchmarks.places import table_at
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
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(rounds + 1):
        for arm in turn_of(list(arms), turn):
            ids = unique_rows(random, store.num_rows, rows)
            spent = arms[arm](ids, out)
            if not np.array_equal(out, recipe.rows(ids)):
                raise RuntimeError(f"{arm}: rows differ from what was written: no report")
            if turn > 0:  # the first touches memory for the first time
                rates[arm].append(rows / spent * 1e9)
    name, peers = "tmpfs: gather / pread loop", ("pread", "pread again")
    return compare(name, rows, 1, rates, "rows/s", at_least(1.0), ours="gather", peers=peers)


def main() -> None:
    parser = options(__doc__, gib=1.0, rounds=11)
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[65_536], help="of a gather (default 65536)")
    add("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder of tmpfs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.tmpfs, prefix="rowstream-bench-") as made:
        folder = table_at(Path(made), arguments.gib)
        with RowStore.open(folder) as store:
            print(f"{store.backend}: {store.reason}")
            if store.stats()["reader"] != "inline":
                raise RuntimeError(f"{arguments.tmpfs} is no tmpfs: no report")
            recipe = Recipe.read(folder)
            found = [measure(store, recipe, rows, arguments.rounds) for rows in arguments.rows]
    finish("tmpfs", found, arguments, Device(_ROOT).machine())


if __name__ == "__main__":
    main()
