"""Draws the results of the benchmarks into docs/plots: python benchmarks/plots.py.

Needs matplotlib. Each picture comes from one CSV file of benchmarks/results and is named after it;
what is there is drawn.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
_PLOTS = _ROOT / "docs" / "plots"

Lines = list[dict[str, str]]


def policies(axes: Any, lines: Lines) -> None:
    """Draw reads per token over the budget, a line for each policy."""
    for name in dict.fromkeys(line["policy"] for line in lines):
        of_policy = [line for line in lines if line["policy"] == name]
        sizes = [int(line["mib"]) for line in of_policy]
        ours = name == "S3-FIFO"
        axes.plot(
            sizes,
            [float(line["chunks"]) for line in of_policy],
            marker="o" if ours else ".",
            linewidth=2 if ours else 1,
            label=name,
        )
    _over_budget(axes, "simulated, 16K chunks, second half of the text")


def cache(axes: Any, lines: Lines) -> None:
    """Draw the curve of the store beside the simulator's."""
    found = [
        (int(match[1]), float(line["ours"]), float(line["peer"]))
        for line in lines
        if (match := re.match(r"16K chunks, (\d+) MiB cache", line["measure"]))
    ]
    sizes, ours, simulated = zip(*found, strict=True)
    axes.plot(sizes, ours, marker="o", linewidth=2, label="store, reads")
    axes.plot(sizes, simulated, linestyle="--", label="simulator, rows")
    _over_budget(axes, "16K chunks, second half of the text")


def lanes(axes: Any, lines: Lines) -> None:
    """Draw reads of a token and the wait for a step over the lanes, with and without a cache."""
    reads = [line for line in lines if line["unit"] == "reads/token"]
    steps = [line for line in lines if line["unit"] == "us"]

    def counts(some: Lines) -> list[int]:
        return [int(line["measure"].split()[0]) for line in some]

    if steps:
        for arm, label in (("ours", "256 MiB cache"), ("peer", "no cache")):
            waits = [float(line[arm]) for line in steps]
            axes.plot(counts(steps), waits, marker="o", label=f"step p50, us, {label}")
        axes.set_yscale("log")
        axes.set_ylabel("wait for a step, us")
    beside = axes.twinx()
    values = [float(line["ours"]) for line in reads]
    beside.plot(counts(reads), values, "k.--", label="reads per token")
    beside.set_ylim(0, 16)
    beside.set_ylabel("device reads per token, of 16")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("lanes")
    axes.figure.legend(loc="lower center", bbox_to_anchor=(0.5, 0.9), ncol=3, fontsize="small")


def _over_budget(axes: Any, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel("cache, MiB")
    axes.set_ylabel("device reads per token, of 16")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def ratios(axes: Any, lines: Lines) -> None:
    """Draw each measure's ratio, and how far the peer was from itself."""
    # counts and what has no peer are not ratios
    lines = [line for line in lines if line["ratio"] != "nan"]
    names = [
        f"{line['measure']} ({int(line['rows']):,} rows, depth {line['depth']})" for line in lines
    ]
    places = range(len(lines), 0, -1)
    colors = ["#999999" if abs(float(line["aa"]) - 1) > 0.03 else "#1f77b4" for line in lines]
    axes.barh(places, [float(line["ratio"]) for line in lines], color=colors, height=0.6)
    axes.plot(
        [float(line["aa"]) for line in lines], places, "k|", markersize=12, label="peer / peer"
    )
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(places, names, fontsize="small")
    axes.set_xlabel("ours / peer")
    axes.legend(fontsize="small")


def lookups(axes: Any, lines: Lines) -> None:
    """Draw what a lookup adds to a step, p50 to p99.9, over the rows of a step."""
    kinds = {
        "cached rows beside 56 us": "cached, beside 56 us",
        "lanes read beside 100 us": "from the disk, beside 100 us",
        "lanes behind layer 0, start and finish": "from the disk, behind layer 0",
    }
    for kind, name in kinds.items():
        for share, style in (("p50", "-"), ("p99", "--"), ("p99.9", ":")):
            found = sorted(
                (int(line["rows"]), float(line["ours"]))
                for line in lines
                if kind in line["measure"] and line["measure"].endswith(f", {share}")
            )
            if found:
                rows, added = zip(*found, strict=True)
                axes.plot(rows, added, style, marker=".", label=f"{name}, {share}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("rows of a step, 16 a token")
    axes.set_ylabel("us that a step takes longer")
    axes.set_title("a lookup beside work of the GPU", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


_DRAWN: dict[str, Callable[[Any, Lines], None]] = {
    "policies": policies,
    "cache-curve": cache,
    "cache-decode": ratios,
    "decode": ratios,
    "lanes": lanes,
    "reader": ratios,
    "lookup": lookups,
    "behind": lookups,
    "large": ratios,
    "tmpfs": ratios,
    "mmap": ratios,
    "lookahead": ratios,
    "freetoken": ratios,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=_RESULTS, help="folder of CSV files")
    parser.add_argument("--plots", type=Path, default=_PLOTS, help="where the pictures go")
    arguments = parser.parse_args()
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    arguments.plots.mkdir(parents=True, exist_ok=True)
    for path in sorted(arguments.results.glob("*.csv")):
        draws = [draw for name, draw in _DRAWN.items() if path.stem.startswith(f"{name}-")]
        if not draws:
            continue
        draw = draws[0]
        print(f"{path.name}: ", end="")
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
        if not lines or not {"ratio", "policy"} & set(lines[0]):
            print("nothing to draw")  # as another version wrote it
            continue
        height = 4.0 if draw is not ratios else 1.2 + 0.35 * len(lines)
        figure, axes = pyplot.subplots(figsize=(7.0, height))
        draw(axes, lines)
        place = arguments.plots / f"{path.stem}.png"
        # without a date and version the same results give the same file
        figure.savefig(place, dpi=80, bbox_inches="tight", metadata={"Software": None})
        pyplot.close(figure)
        print(f"{place}: {place.stat().st_size} bytes")


if __name__ == "__main__":
    main()
