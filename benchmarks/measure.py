"""What all benchmarks say alike: a figure beside its peer's, the verdict on it, and the CSV file.

A ratio is judged only where the peer against itself (aa) is within 0.97 to 1.03: beyond that the
machine was too busy for a verdict.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

__all__ = [
    "RESULTS",
    "Bound",
    "Measure",
    "after",
    "at_least",
    "at_most",
    "compare",
    "finish",
    "judged",
    "one_of_each",
    "options",
    "paced",
    "turn_of",
    "write_results",
]

_ROOT = Path(__file__).resolve().parents[1]
RESULTS = _ROOT / "benchmarks" / "results"
_AA = (0.97, 1.03)
_Arm = TypeVar("_Arm")
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the results: ratio is ours / peer, aa the peer against itself.

    What has no noise, as a count, has no aa (nan). `wanted` is empty for what is only shown; it
    bounds the ratio, or ours where it names the unit.
    """

    measure: str
    rows: int
    depth: int
    ours: float
    peer: float
    ratio: float
    aa: float
    unit: str
    wanted: str = ""
    verdict: str = "shown"


@dataclass(frozen=True, slots=True)
class Bound:
    """What a ratio must be, or with a unit what our own figure must be."""

    limit: float
    most: bool
    unit: str = ""

    def __str__(self) -> str:
        return f"{'<=' if self.most else '>='} {self.limit:g} {self.unit}".strip()

    def judge(self, ratio: float, ours: float, aa: float) -> str:
        """Return met, missed or unmeasured."""
        if not (math.isnan(aa) or _AA[0] <= aa <= _AA[1]):
            return "unmeasured"
        value = ours if self.unit else ratio
        good = value <= self.limit if self.most else value >= self.limit
        return "met" if good else "missed"


def at_least(limit: float) -> Bound:
    """Bound a ratio from below."""
    return Bound(limit, False)


def at_most(limit: float, unit: str = "") -> Bound:
    """Bound a ratio, or our figure in a unit, from above."""
    return Bound(limit, True, unit)


def turn_of(arms: Sequence[_Arm], turn: int) -> list[_Arm]:
    """Return the arms in the order of a turn; over the turns each has every place."""
    first = turn % len(arms)
    order = [*arms[first:], *arms[:first]]
    return order if turn % 2 == 0 else order[::-1]


def paced(items: Iterable[_Item], every_s: float) -> Iterator[_Item]:
    """Yield items, one every so many seconds; who is late does not catch up."""
    for item, _ in zip(items, after(repeat(every_s)), strict=False):
        yield item


def after(pauses_s: Iterable[float]) -> Iterator[float]:
    """Yield pauses, each when it is over; who is late does not catch up."""
    next_at = time.perf_counter()
    for pause_s in pauses_s:
        next_at = max(next_at + pause_s, time.perf_counter())
        time.sleep(max(0.0, next_at - time.perf_counter()))
        yield pause_s


def compare(
    name: str,
    rows: int,
    depth: int,
    values: Mapping[str, Sequence[float]],
    unit: str,
    bound: Bound | None = None,
    *,
    ours: str = "ours",
    peers: tuple[str, str] = ("peer", "peer again"),
) -> Measure:
    """Make a line of medians of pairs: the peer has two turns for each of ours."""
    pairs = list(zip(values[peers[0]], values[peers[1]], strict=True))
    both = [(one + other) / 2 for one, other in pairs]
    ratio = median(mine / theirs for mine, theirs in zip(values[ours], both, strict=True))
    aa = median(other / one for one, other in pairs)
    mine, theirs = median(values[ours]), median(both)
    return judged(Measure(name, rows, depth, mine, theirs, ratio, aa, unit), bound)


def one_of_each(
    name: str,
    rows: int,
    depth: int,
    each: Sequence[float],
    unit: str,
    bound: Bound | None = None,
) -> Measure:
    """Make a line of ours, the peer's and the peer's again, each a figure of a whole run."""
    ours, one, other = each
    peer = (one + other) / 2
    return judged(Measure(name, rows, depth, ours, peer, ours / peer, other / one, unit), bound)


def judged(found: Measure, bound: Bound | None) -> Measure:
    """Return the line with its bound and the verdict; without a bound as it is."""
    if bound is None:
        return found
    verdict = bound.judge(found.ratio, found.ours, found.aa)
    return replace(found, wanted=str(bound), verdict=verdict)


def options(
    text: str | None, *, gib: float = 8.0, rounds: int | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the options that the benchmarks share."""
    parser = argparse.ArgumentParser(description=text)
    add = parser.add_argument
    add("--dir", type=Path, default=_ROOT / "build" / "bench", help="where the tables are or go")
    add("--gib", type=float, default=gib, help=f"size of the tables (default {gib:g})")
    if rounds is not None:
        add("--rounds", type=int, default=rounds, help=f"turns of each (default {rounds})")
    add("--machine", help="name of the results (default: processors, kernel, device)")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    add("--no-results", action="store_true", help="print only")
    return parser


def finish(
    name: str, found: Sequence[Measure], arguments: argparse.Namespace, machine: str
) -> None:
    """Print the lines, and write them unless that was forbidden."""
    width = max(len(m.measure) for m in found)
    print(f"{'':{width}}{'rows':>10}{'ours':>11}{'peer':>11}{'ratio':>8}{'aa':>8}  unit")
    for m in found:
        print(
            f"{m.measure:{width}}{m.rows:10}{m.ours:11.5g}{m.peer:11.5g}{m.ratio:8.3f}{m.aa:8.3f}"
            f"  {m.unit}, {m.verdict} {m.wanted}".rstrip()
        )
    print(f"load average {os.getloadavg()[0]:.2f}", flush=True)
    if not arguments.no_results:
        path = arguments.out / f"{name}-{arguments.machine or machine}.csv"
        write_results(path, found)
        print(f"written to {path}")


def write_results(path: Path, found: Sequence[Any]) -> None:
    """Write one line for each of some results of one dataclass, at least one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [field.name for field in fields(found[0])]
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(names)
        for measure in found:
            values = (getattr(measure, name) for name in names)
            lines.writerow(f"{v:.5g}" if isinstance(v, float) else v for v in values)
