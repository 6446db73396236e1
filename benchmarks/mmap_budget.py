"""Measures a mapped table: python benchmarks/mmap_budget.py --dir FOLDER.

Resident pages under a budget over many gathers, sampled by another process without a pause; cold
gathers with and without advice; what advice and the budget cost when every row is in memory.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device import Device
from benchmarks.measure import Measure, at_most, finish, judged, options
from benchmarks.places import forget, table_at

from rowstream import Manifest, RowStore, tables

_SLACK_BYTES = 64 << 20
_MIB = 1 << 20

# the sum of Rss of every mapping of the folder's files, again and again, until told to stop
_SAMPLER = """
import json, os, select, sys
pid, folder = sys.argv[1:]
most = samples = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    total, ours = 0, False
    with open(f"/proc/{pid}/smaps") as smaps:
        for line in smaps:
            if line[0] in "0123456789abcdef":
                ours = folder in line
            elif ours and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    most, samples = max(most, total), samples + 1
print(json.dumps([most, samples, total]))
"""


class Sampler:
    """Another process that looks at this one's resident pages of a folder's files."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", _SAMPLER, str(os.getpid()), str(folder)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def stop(self) -> tuple[int, int, int]:
        """Return the most bytes seen, the number of looks, and the bytes at the last one."""
        said, _ = self._process.communicate("stop\n")
        most, samples, last = json.loads(said)
        return most, samples, last


def read_all(manifest: Manifest) -> None:
    """Bring the table into the page cache, with the read-ahead of any sequential reader."""
    for file in manifest.files:
        with open(file.path, "rb", buffering=0) as whole:
            while whole.read(8 * _MIB):
                pass


def token_rate(store: RowStore, gathers: int) -> tuple[float, list[int]]:
    """Gather random tokens one by one; return microseconds a gather and each gather's ns."""
    rng = np.random.default_rng()
    ids = rng.integers(0, store.num_rows, (gathers, 1, store.heads))
    out = np.empty((1, store.heads, store.row_bytes), np.uint8)
    taken = []
    began = time.perf_counter()
    for token in ids:
        start = time.perf_counter_ns()
        store.gather(token, out)
        taken.append(time.perf_counter_ns() - start)
    return (time.perf_counter() - began) / gathers * 1e6, taken


def budget(manifest: Manifest, folder: Path, budget_bytes: int, gathers: int) -> list[Measure]:
    """Gather with and without a budget from a table that is all in the page cache."""
    read_all(manifest)
    found = []
    means: list[float] = []
    limit_mib = (budget_bytes + _SLACK_BYTES) / _MIB
    for limit in (None, budget_bytes):
        name = "without a budget" if limit is None else f"budget {limit // _MIB} MiB"
        with RowStore(manifest, backend="mmap", resident_budget_bytes=limit) as store:
            sampler = Sampler(folder)
            mean, taken = token_rate(store, gathers)
            most, samples, _ = sampler.stop()
            stats = store.stats()
        print(
            f"{name}: {mean:.1f} us a gather, p99 {np.percentile(taken, 99) / 1000:.1f}; at most "
            f"{most / _MIB:.1f} MiB resident in {samples} samples, {stats['drops']} slices, "
            f"{stats['advise_failures']} failures"
        )
        means.append(mean)
    most_mib, heads = most / _MIB, manifest.heads
    name = f"{gathers} gathers, budget {budget_bytes // _MIB} MiB: most resident"
    line = Measure(name, heads, 0, most_mib, limit_mib, most_mib / limit_mib, math.nan, "MiB")
    found.append(judged(line, at_most(limit_mib, "MiB")))
    found.append(Measure("mean of a gather, with a budget / without", heads, 0, means[1], means[0],
                         means[1] / means[0], math.nan, "us"))  # fmt: skip
    return found


class PlainMapping:
    """The rows by mmap alone: RANDOM advice and a copy, as a program without any care has it."""

    def __init__(self, manifest: Manifest) -> None:
        (plane,) = manifest.planes
        self._row_bytes = plane.row_bytes
        self._first = np.array([extent.first_row for extent in plane.extents])
        self._views = []
        for extent in plane.extents:
            with open(manifest.files[extent.file].path, "rb") as file:
                view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            view.madvise(mmap.MADV_RANDOM)
            rows = np.frombuffer(view, np.uint8, extent.num_rows * self._row_bytes, extent.offset)
            self._views.append(rows.reshape(-1, self._row_bytes))

    def gather(self, row_ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Copy rows one shard at a time."""
        extents = np.searchsorted(self._first, row_ids, "right") - 1
        for number in np.unique(extents):
            here = extents == number
            out[here] = self._views[number][row_ids[here] - self._first[number]]


def cold(manifest: Manifest, rows: int, rounds: int) -> list[Measure]:
    """Gather rows that are not in memory, beside a plain mapping of the same files."""
    device = Device(manifest.files[0].path)
    rng = np.random.default_rng()
    seconds: dict[str, list[float]] = {"plain mmap": [], "gather": []}
    warm: dict[str, list[float]] = {"plain mmap": [], "gather": []}
    out = np.ones((rows, manifest.row_bytes), np.uint8)
    for _ in range(rounds):
        for arm in seconds:
            ids = rng.choice(manifest.num_rows, rows, replace=False)
            for file in manifest.files:
                forget(file.path)
            before = device.reads()
            if arm == "gather":
                with RowStore(manifest, backend="mmap") as store:
                    for kept in (seconds, warm):
                        began = time.perf_counter()
                        store.gather(ids, out)
                        kept[arm].append(time.perf_counter() - began)
                    if store.stats()["advise_failures"]:
                        raise RuntimeError("advice failed: no report")
            else:
                plain = PlainMapping(manifest)
                for kept in (seconds, warm):
                    began = time.perf_counter()
                    plain.gather(ids, out)
                    kept[arm].append(time.perf_counter() - began)
                del plain
            device.check(before, int(rows * 0.9))
    found = []
    for name, kept in (("cold gather", seconds), ("again", warm)):
        ours, theirs = (median(kept[arm]) * 1e3 for arm in ("gather", "plain mmap"))
        found.append(Measure(f"{name}, advised / fault by fault", rows, 0, ours, theirs,
                             ours / theirs, math.nan, "ms"))  # fmt: skip
    return found


def main() -> None:
    parser = options(__doc__, rounds=3)
    add = parser.add_argument
    add("--budget-mib", type=int, default=64)
    add("--gathers", type=int, default=100_000)
    add("--rows", type=int, nargs="*", default=[16, 65_536], help="of cold gathers")
    arguments = parser.parse_args()
    (manifest,) = tables(table_at(arguments.dir, arguments.gib))
    folder = manifest.root.resolve()
    found = []
    for rows in arguments.rows:
        found += cold(manifest, rows, arguments.rounds)
    found += budget(manifest, folder, arguments.budget_mib * _MIB, arguments.gathers)
    finish("mmap", found, arguments, Device(manifest.files[0].path).machine())


if __name__ == "__main__":
    main()
