"""Measures gathers beside FreeToken's row store: python benchmarks/freetoken.py --dir FOLDER.

A peer that may be absent: `pip install --no-deps --target build/bench/freetoken freetoken`, or its
wheel in a folder, with torch installed. On the disk: rows per second and CPU per row, on rows not
read before. On a file of holes and one core, where the medium is never the limit: time per row.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device import Device
from benchmarks.measure import at_least, at_most, compare, finish, options, turn_of
from benchmarks.places import holes_at, table_at
from benchmarks.spans import unique_rows

from rowstream import Manifest, RowStore, tables

_PLACE = Path(__file__).resolve().parents[1] / "build" / "bench" / "freetoken"
_DEPTH = 128


class PeerMissing(RuntimeError):
    """FreeToken's row store cannot be loaded here; the text says why."""


def load_peer(place: Path = _PLACE) -> ModuleType:
    """Return the extension module of FreeToken, without the rest of the package.

    `place` holds the package or its wheel.
    """
    try:
        importlib.import_module("torch")  # it links to its libraries
    except ImportError as failure:
        raise PeerMissing("FreeToken needs torch, which is not installed") from failure
    unpack(place)
    places = [place, _PLACE, *map(Path, sys.path)]
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
        f"FreeToken for this Python is not in {place}: "
        f"pip install --no-deps --target {_PLACE} freetoken"
    )


def unpack(place: Path) -> None:
    """Take the extension modules out of wheels at a place."""
    for path in sorted(place.glob("freetoken-*.whl")):
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if name.startswith("freetoken/kernel/_row_store.") and name.endswith(".so"):
                    wheel.extract(name, _PLACE)


class Peer:
    """FreeToken's row store over the files of a manifest."""

    def __init__(self, manifest: Manifest, module: ModuleType) -> None:
        """Open it. Raises PeerMissing where it cannot have this layout."""
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
        self.stage(ids, out)
        self.flush()

    def stage(self, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Begin to fill out; both must stay until `flush`."""
        self._store.stage_rows(ids.ctypes.data, len(ids), out.ctypes.data)

    def flush(self) -> None:
        """Wait for all rows that were staged."""
        self._store.flush()


class Contest:
    """Both over one table, on rows that neither read before."""

    def __init__(self, folder: Path, module: ModuleType, device: Device | None) -> None:
        (self.manifest,) = tables(folder)
        self.device = device
        self.store = RowStore(self.manifest, backend="disk", queue_depth=_DEPTH)
        self.peer = Peer(self.manifest, module)
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
            for arm in turn_of(list(gathers), turn):
                # the same rows again would come from a cache below the device
                ids = self._rows(rows)
                before = self.device.reads() if self.device else 0
                issued = self._issued()
                cpu, began = time.process_time_ns(), time.perf_counter_ns()
                gathers[arm](ids)
                elapsed_ns = time.perf_counter_ns() - began
                cpu_us[arm].append((time.process_time_ns() - cpu) / 1000 / rows)
                rates[arm].append(rows / elapsed_ns * 1e9)
                if self.device:
                    # how many the peer does is its own affair; few random rows share a block
                    ours = self._issued() - issued
                    self.device.check(before, ours if arm == "ours" else int(0.97 * rows))
        same = self._rows(min(rows, 65_536))
        gathers["ours"](same) if rows == len(same) else self.store.gather(
            same, outs[0][: len(same)]
        )
        self.peer.gather(same, outs[1][: len(same)])
        if not np.array_equal(outs[0][: len(same)], outs[1][: len(same)]):
            raise RuntimeError("both gathered different bytes: no report")
        return rates, cpu_us

    def _issued(self) -> int:
        return int(self.store.stats()["reads"])

    def _rows(self, count: int) -> NDArray[np.int64]:
        return unique_rows(self._random, self.manifest.num_rows, count)


def main() -> None:
    parser = options(__doc__, rounds=11)
    parser.add_argument("--freetoken", type=Path, default=_PLACE, help="its package or wheel")
    arguments = parser.parse_args()
    try:
        module = load_peer(arguments.freetoken)
        folder = table_at(arguments.dir, arguments.gib)
        device = Device(folder / "config.json")
        contest = Contest(folder, module, device)
    except PeerMissing as reason:
        print(f"skipped: {reason}")
        return
    print(f"FreeToken reads with {contest.peer.how}")
    rates, cpu_us = contest.run(65_536, arguments.rounds)
    found = [
        compare("disk, rows/s / FreeToken", 65_536, _DEPTH, rates, "rows/s", at_least(1.1)),
        compare("disk, CPU / FreeToken", 65_536, _DEPTH, cpu_us, "us/row", at_most(0.8)),
    ]
    contest.store.close()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    contest = Contest(holes_at(arguments.dir, arguments.gib), module, None)
    for rows, bound in ((65_536, 1.2), (1_048_576, 1.8)):
        rates, cpu_us = contest.run(rows, arguments.rounds)
        name = "holes on one core, rows/s / FreeToken"
        found.append(compare(name, rows, _DEPTH, rates, "rows/s", at_least(bound)))
        found.append(compare("holes on one core, CPU / FreeToken", rows, _DEPTH, cpu_us, "us/row"))
    finish("freetoken", found, arguments, device.machine())


if __name__ == "__main__":
    main()
