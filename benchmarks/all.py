"""Runs the benchmarks one after the other and judges their figures: python benchmarks/all.py.

Each part is a process of its own with a time limit. A part that fails is reported and the others go
on. Needs a quiet machine, 8 GiB of disk for the table and 2 GiB of /dev/shm; the text as kept by
text.py and FreeToken's wheel may come from folders.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent


@dataclass(frozen=True, slots=True)
class Part:
    """A script, its options, the longest it may take, and the results that it writes."""

    script: str
    limit_s: float
    results: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    # whether it takes the size of the table on disk
    table: bool = True


PARTS = {
    "tables": Part("places.py", 240),
    "reader": Part("reader.py", 180, ("reader",)),
    "freetoken": Part("freetoken.py", 150, ("freetoken",)),
    "tmpfs": Part("tmpfs.py", 60, ("tmpfs",), table=False),
    "large": Part("large.py", 120, ("large",), ("--rounds", "3")),
    "prefill": Part("cache.py", 180, ("cache-prefill",), ("--part", "prefill")),
    "decode": Part("decode.py", 210, ("decode", "lanes")),
    "lookahead": Part("lookahead.py", 150, ("lookahead",)),
    "mmap": Part("mmap_budget.py", 180, ("mmap",), ("--rows",)),
    # no figure of theirs is judged: only where they are asked for
    "curve": Part("cache.py", 600, ("cache-curve",), ("--part", "curve")),
    "cold": Part("mmap_budget.py", 600, ("mmap",)),
    "overtaking": Part("overtaking.py", 180, ("overtaking",)),
}
_DEFAULT = [name for name in PARTS if name not in ("curve", "cold", "overtaking")]


def run(name: str, arguments: argparse.Namespace) -> str:
    """Run a part, its output shown and kept; returns why it failed, or nothing."""
    part = PARTS[name]
    command = [sys.executable, str(_HERE / part.script), *part.options]
    command += ["--dir", str(arguments.dir), "--out", str(arguments.out)]
    if arguments.machine:
        command += ["--machine", arguments.machine]
    if part.table:
        command += ["--gib", str(arguments.gib)]
    if name == "freetoken" and arguments.freetoken:
        command += ["--freetoken", str(arguments.freetoken)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if arguments.text:
        environment["BENCH_TEXT"] = str(arguments.text)
    log = arguments.out / f"{name}.log"
    print(f"--- {name}", flush=True)
    with log.open("w", encoding="utf-8") as output:
        try:
            ran = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=part.limit_s * arguments.patience,
                env=environment,
                check=False,
            )
            failure = f"exit status {ran.returncode}" if ran.returncode else ""
        except subprocess.TimeoutExpired as expired:
            failure = f"not done in {expired.timeout:.0f} s"
    text = log.read_text(encoding="utf-8", errors="replace").rstrip()
    print(text, flush=True)
    last = text.splitlines()[-1] if text else ""
    if failure:
        return f"{failure}: {last}"
    return last if last.startswith("skipped") else ""


def judged(part: Part, out: Path, since: float) -> list[list[str]]:
    """Return the lines of the table for the results that a part wrote."""
    lines = []
    for name in part.results:
        for path in sorted(out.glob(f"{name}-*.csv")):
            if path.stat().st_mtime < since:
                continue
            with path.open(newline="", encoding="utf-8") as file:
                lines += [_line(found) for found in csv.DictReader(file) if found["wanted"]]
    return lines


def _line(found: dict[str, str]) -> list[str]:
    # a bound with a unit is one on the figure itself
    unit = found["wanted"].partition(" ")[2].partition(" ")[2]
    measured = f"{float(found['ours']):.4g} {unit}" if unit else f"{float(found['ratio']):.3f}"
    aa = float(found["aa"])
    against_itself = "" if aa != aa else f"{aa:.3f}"
    name = f"{found['measure']} ({int(found['rows']):,} rows)"
    return [name, found["wanted"], measured, against_itself, found["verdict"]]


def table(lines: Sequence[Sequence[str]]) -> str:
    """Lay out lines in columns."""
    heads = ("measure", "wanted", "measured", "A/A", "verdict")
    whole = [heads, *lines]
    widths = [max(len(line[column]) for line in whole) for column in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in whole
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--dir", type=Path, default=_ROOT / "build" / "bench", help="where the tables are or go")
    add("--gib", type=float, default=8.0, help="size of the tables (default 8)")
    add("--out", type=Path, default=_ROOT / "build" / "bench" / "out", help="results and logs")
    add("--text", type=Path, help="folder of tokens that text.py kept")
    add("--freetoken", type=Path, help="folder of FreeToken's package or wheel")
    add("--machine", help="name of the results (default: processors, kernel, device)")
    add("--part", nargs="+", default=_DEFAULT, choices=list(PARTS), help="what to run, in order")
    add("--patience", type=float, default=1.0, help="multiplies the time limits (default 1)")
    arguments = parser.parse_args()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines: list[list[str]] = []
    failed = False
    began = time.monotonic()
    for name in arguments.part:
        since, part_began = time.time() - 1, time.monotonic()
        failure = run(name, arguments)
        print(f"--- {name}: {time.monotonic() - part_began:.0f} s {failure}".rstrip(), flush=True)
        lines += judged(PARTS[name], arguments.out, since)
        if failure:
            lines.append([f"{name}: {failure}", "", "", "", "no figure"])
            failed = True
    text = table(lines)
    (arguments.out / "table.txt").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\n{time.monotonic() - began:.0f} s in all")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
