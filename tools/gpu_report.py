"""Run all tests of tests/gpu on this machine and write what they said as Markdown.

    python tools/gpu_report.py [--bench] [--jobs N] [FILE ...]

Needs pytest and the package, with torch and cuda-bindings. Each file runs in a process of its own,
some beside each other, that is ended after a while: a test that hangs, as a stream without an
answer does, costs the rest of its file and nothing else. Benchmarks run alone. The exit status is 0
where something passed and nothing failed.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
# All of the tests, with what the machine is asked before in less than ten minutes; a file that does
# not hang takes two at most.
MACHINE_S, ALL_S, FILE_S, BENCH_S = 100.0, 450.0, 240.0, 600.0
JOBS = 4
BENCHMARKS = {
    "lookup.py": ("--gib", "2", "--turns", "2000"),
    "behind.py": ("--gib", "2", "--turns", "500"),
    "hidden.py": (),
}

# not pyproject.toml's, which names plugins
PYTEST = f"""\
[pytest]
pythonpath = {TESTS}
addopts = --strict-markers --import-mode=importlib -p no:cacheprovider
filterwarnings = error
markers =
    gpu: needs an NVIDIA GPU
    slow: runs for more than a few seconds
    platform: changes or mounts something for a moment
"""

MACHINE = """\
import os, platform
def tell(name, ask):
    try:
        print(f"- {name}: {ask()}", flush=True)
    except Exception as error:
        print(f"- {name}: {type(error).__name__}: {error}", flush=True)
kernel = platform.release().split("-")[0]
tell("host", lambda: f"{platform.machine()}, {os.cpu_count()} processors, Linux {kernel}")
tell("Python", platform.python_version)
import rowstream
tell("rowstream", lambda: rowstream.__version__)
import torch
tell("torch", lambda: f"{torch.__version__}, CUDA {torch.version.cuda}")
import cuda.bindings
tell("cuda-bindings", lambda: cuda.bindings.__version__)
from rowstream.device import driver, sync
tell("device path", lambda: driver.available()[1])
for index in range(torch.cuda.device_count()):
    tell(f"cuda:{index}", lambda: driver.attributes(index))
    tell(f"waits on cuda:{index}", lambda: sync.probed(index))
"""


@dataclass
class Ran:
    """What a file's tests came to."""

    name: str
    seconds: float
    ended: str  # why it was not its own end, or nothing
    output: str
    outcomes: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def good(self) -> bool:
        return not self.ended and not self.outcomes["failed"]


def run(command: list[str], limit_s: float) -> tuple[float, str, str]:
    """Run a command: seconds, why it was ended or failed, and what it printed."""
    began = time.monotonic()
    # to a file: what a process leaves behind would hold a pipe open
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = child.wait(timeout=max(limit_s, 0.0))
            why = "" if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            why = f"ended after {limit_s:.0f} s"
        finally:
            # with the processes that it started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        return time.monotonic() - began, why, output.read()


def run_tests(path: Path, folder: Path, limit_s: float) -> Ran:
    """Run one file of tests."""
    report, config = folder / f"{path.stem}.xml", folder / "pytest.ini"
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", f"--junitxml={report}"]
    command += ["-c", str(config), f"--rootdir={path.parent}", str(path)]
    seconds, why, output = run(command, limit_s)
    # 1: tests failed; 5: there are none
    ran = Ran(path.name, seconds, "" if why.endswith((" 1", " 5")) else why, output)
    if not report.exists():  # the last line names the test
        ran.ended = ran.ended or "no report"
        words = re.findall(r"::\S+ .*?(PASSED|FAILED|ERROR|SKIPPED)", output)
        ran.outcomes.update("failed" if w in ("FAILED", "ERROR") else w.lower() for w in words)
        return ran
    for case in ElementTree.parse(report).iter("testcase"):
        told = {child.tag: child.get("message") or "" for child in case}
        if "failure" in told or "error" in told:
            ran.outcomes["failed"] += 1
            message = told.get("failure", told.get("error", ""))
            ran.failed.append(f"{case.get('name')}: {message}")
        elif "skipped" in told:
            ran.outcomes["skipped"] += 1
            ran.skipped[told["skipped"]] += 1
        else:
            ran.outcomes["passed"] += 1
    return ran


def run_files(files: list[Path], folder: Path, jobs: int, limit_s: float) -> list[Ran]:
    """Run all files, so many at a time; the outcomes in the order of the files."""
    (folder / "pytest.ini").write_text(PYTEST)
    until = time.monotonic() + ALL_S

    def one(path: Path) -> Ran:
        ran = run_tests(path, folder, min(limit_s, until - time.monotonic()))
        print(f"{ran.name}: {dict(ran.outcomes)} {ran.ended} {ran.seconds:.1f} s", flush=True)
        return ran

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, files))


def table(rows: list[list[str]]) -> str:
    """Return a table of Markdown; the first row is its head."""
    lines = ["| " + " | ".join(cell(text) for text in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def cell(text: str, at_most: int = 300) -> str:
    """Return text that stays within its cell."""
    return " ".join(text.split())[:at_most].replace("|", "\\|")


def tests_section(found: list[Ran], seconds: float) -> str:
    """Return the outcomes by file, then the reasons of what did not pass."""
    kinds = ("passed", "failed", "skipped")
    rows = [["file", *kinds, "seconds", ""]]
    for ran in found:
        counts = [str(ran.outcomes[kind]) for kind in kinds]
        rows.append([ran.name, *counts, f"{ran.seconds:.1f}", ran.ended])
    total = [str(sum(ran.outcomes[kind] for ran in found)) for kind in kinds]
    rows.append(["all", *total, f"{seconds:.1f}", ""])
    parts = ["## Tests\n", table(rows)]
    reasons: Counter[str] = sum((ran.skipped for ran in found), Counter())
    if reasons:
        parts.append("Skipped:\n")
        parts += [f"- {count} times: {cell(reason)}" for reason, count in reasons.most_common()]
        parts.append("")
    for ran in found:
        if not ran.good:
            parts.append(f"### {ran.name}\n")
            parts += [f"- {cell(line)}" for line in ran.failed]
            # the end has what faulthandler and pytest say of it
            parts.append(f"\n```\n{ran.output[-4000:].strip()}\n```\n")
    return "\n".join(parts)


def bench_section(folder: Path, limit_s: float) -> tuple[str, bool]:
    """Run the benchmarks; return their figures, and whether each came to its end."""
    parts, good = ["## Figures\n"], True
    for script, extra in BENCHMARKS.items():
        out = folder / script
        out.mkdir()
        command = [sys.executable, str(ROOT / "benchmarks" / script), *extra]
        command += ["--dir", str(folder / "tables"), "--out", str(out), "--machine", "here"]
        seconds, why, output = run(command, limit_s)
        parts.append(f"### benchmarks/{script}, {seconds:.0f} s\n")
        for path in out.glob("*.csv"):
            with path.open(newline="", encoding="utf-8") as lines:
                parts.append(table(list(csv.reader(lines))))
        if why:
            good = False
            parts.append(f"{why}\n\n```\n{output[-4000:].strip()}\n```\n")
    return "\n".join(parts), good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="tests (default: all of tests/gpu)")
    parser.add_argument("--bench", action="store_true", help="figures as well; takes longer")
    parser.add_argument("--jobs", type=int, default=JOBS, help="files at a time (default 4)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-report.md")
    parser.add_argument("--limit-s", type=float, default=FILE_S, help="seconds for each file")
    arguments = parser.parse_args()
    files = [path.resolve() for path in arguments.files] or sorted(TESTS.glob("gpu/test_*.py"))
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as name:
        folder = Path(name)
        _, why, said = run([sys.executable, "-c", MACHINE], MACHINE_S)
        began = time.monotonic()
        page = [f"# rowstream on a GPU, {time.strftime('%Y-%m-%d')}\n", said]
        if why:
            page.append(f"(the machine was asked: {why})\n")
        print(said, flush=True)
        found = run_files(files, folder, arguments.jobs, arguments.limit_s)
        page.append(tests_section(found, time.monotonic() - began))
        good = all(ran.good for ran in found) and any(ran.outcomes["passed"] for ran in found)
        if arguments.bench:
            text, ended_well = bench_section(folder, BENCH_S)
            page.append(text)
            good = good and ended_well
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("\n".join(page), encoding="utf-8")
    print(f"written to {arguments.out}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
