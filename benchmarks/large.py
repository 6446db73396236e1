"""Measures gathers of millions of rows on a file of holes: python benchmarks/large.py --dir FOLDER.

The reads issued beside those worked out from ids, extents and alignment alone; and the time that
planning takes for a row, in one gather of 4 million rows and in gathers of 65,536.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device import Device
from benchmarks.measure import Measure, at_most, compare, finish, options, turn_of
from benchmarks.places import holes_at
from benchmarks.spans import PIECE_ROWS, RowSpans, direct_alignment, unique_rows

from rowstream import RowStore, tables

_DEPTH = 128
_SMALL = 65_536
_SMALL_TURNS = 16


def measure(folder: Path, rows: int, rounds: int, piece_rows: int) -> list[Measure]:
    """Gather many rows at once, and in small gathers before and after."""
    (manifest,) = tables(folder)
    alignment = direct_alignment([file.path for file in manifest.files])
    places = RowSpans(manifest, alignment, depth=_DEPTH, piece_rows=piece_rows)
    random = np.random.default_rng()
    out = np.ones((rows, manifest.row_bytes), np.uint8)
    arms = {"large": (rows, 1), "small": (_SMALL, _SMALL_TURNS)}
    arms["small again"] = arms["small"]
    plan_us: dict[str, list[float]] = {arm: [] for arm in arms}
    gather_us: dict[str, list[float]] = {arm: [] for arm in arms}
    issued = needed = 0
    with RowStore(manifest, backend="disk", queue_depth=_DEPTH) as store:
        store.gather(unique_rows(random, manifest.num_rows, _SMALL), out[:_SMALL])  # warm
        for turn in range(rounds):
            for arm in turn_of(list(arms), turn):
                count, times = arms[arm]
                ids = unique_rows(random, manifest.num_rows, count * times)
                before = store.stats()
                began = time.perf_counter()
                for part in np.split(ids, times):
                    store.gather(part, out[:count])
                elapsed_s = time.perf_counter() - began
                after = store.stats()
                if out[:count].any():
                    raise RuntimeError("a row of a file of holes is not zeroes: no report")
                done = len(ids)
                gather_us[arm].append(elapsed_s / done * 1e6)
                # a build that does not count it has no figure
                planned = after.get("plan_s", math.nan) - before.get("plan_s", math.nan)
                plan_us[arm].append(planned / done * 1e6)
                if arm == "large":
                    issued += after["reads"] - after["retries"]
                    issued -= before["reads"] - before["retries"]
                    needed += len(places.merged(ids))
    exact = "met" if issued == needed else "missed"
    peers = ("small", "small again")
    name = f"plan time a row / in gathers of {_SMALL}"
    found = [
        Measure("reads issued / distinct spans", rows, _DEPTH, issued / rounds, needed / rounds,
                issued / needed, math.nan, "reads", "exact", exact),
    ]  # fmt: skip
    planned = compare(name, rows, _DEPTH, plan_us, "us/row", at_most(3), ours="large", peers=peers)
    if math.isnan(planned.ours):
        print("this build does not say how long planning takes: no figure for it")
    else:
        found.append(planned)
    name = f"gather time a row / in gathers of {_SMALL}"
    found.append(compare(name, rows, _DEPTH, gather_us, "us/row", ours="large", peers=peers))
    return found


def main() -> None:
    parser = options(__doc__, rounds=5)
    add = parser.add_argument
    add("--rows", type=int, default=4_194_304, help="rows of one gather (default 4194304)")
    add("--piece", type=int, default=PIECE_ROWS, help="rows that are planned at a time")
    arguments = parser.parse_args()
    folder = holes_at(arguments.dir, arguments.gib)
    found = measure(folder, arguments.rows, arguments.rounds, arguments.piece)
    finish("large", found, arguments, Device(folder / "config.json").machine())


if __name__ == "__main__":
    main()
