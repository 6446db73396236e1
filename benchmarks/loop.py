"""Measures what the thread that answers lookups costs a processor: python benchmarks/loop.py.

Needs no GPU: a thread of Python rings in a device's place. An idle process; the first ring after a
pause, with a kick and without; rings of several rhythms; and, as root, what a quota of one
processor leaves to an engine that works 3 ms of every 5.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from benchmarks.measure import Measure, after, at_most, finish, judged, options

from rowstream import _core
from streams import Stream

_HEADS = 16
_NAN = float("nan")
_GROUPS = Path("/sys/fs/cgroup/cpu")


# seconds from each of so many rings to the next
_RHYTHMS: dict[str, Callable[[int], np.ndarray[Any, Any]]] = {
    "every 5 ms": lambda rings: np.full(rings, 0.005),
    "every 5 ms +- 30 %": lambda rings: np.random.default_rng().uniform(0.0035, 0.0065, rings),
    "after 1 and 4 ms in turn": lambda rings: np.resize((0.001, 0.004), rings),
}


@contextlib.contextmanager
def ringing(spin: str = "auto") -> Iterator[tuple[_core.Loop, Stream, np.ndarray[Any, Any]]]:
    """Open a small table in memory, its loop, and a stream that rings it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.bin"
        path.write_bytes(os.urandom(4096 * 160))
        table = _core.ResidentTable([str(path)], [(160, [(0, 0, 0, 4096)])], mapped=False)
        loop = _core.Loop(table, [8, 8], spin=spin)
        stream = Stream(loop.add(_core.Arena(1 << 20), _HEADS, 160))
        yield loop, stream, np.arange(_HEADS).reshape(1, _HEADS)
        loop.close()


def idle(seconds: float) -> list[Measure]:
    """Processor time of a process that waits for nothing but rings."""
    with ringing() as (_, stream, ids):
        stream.step(ids)
        time.sleep(0.3)
        began, cpu = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        share = (time.process_time() - cpu) / (time.perf_counter() - began) * 100
    line = Measure(f"idle for {seconds:g} s", 0, 0, share, 0, 0, _NAN, "% of a core")
    return [judged(line, at_most(1.0, "% of a core"))]


def first_ring(turns: int) -> list[Measure]:
    """From the ring to its answer, after a pause of 0.2 s."""
    found = []
    with ringing() as (loop, stream, ids):
        for name, kicked, bound in (("without", False, 6.0), ("with", True, 0.3)):
            times = []
            for _ in range(turns):
                time.sleep(0.2)
                if kicked:
                    loop.kick()
                stream.post(ids)
                times.append(stream.wait() * 1e3)
                stream.take(_HEADS)
            line = Measure(
                f"first ring after idle, {name} a kick, p50",
                _HEADS, 0, float(np.median(times)), 0, 0, _NAN, "ms",
            )  # fmt: skip
            found.append(judged(line, at_most(bound, "ms")))
    return found


def rhythms(turns: int) -> list[Measure]:
    """From the ring to its answer by a thread that may look without pause, and its cost."""
    found = []
    for name, pauses_s in _RHYTHMS.items():
        times = []
        with ringing("always") as (_, stream, ids):
            began, mine, all_threads = time.perf_counter(), time.thread_time(), time.process_time()
            for _ in after(pauses_s(turns)):
                stream.post(ids)
                times.append(stream.wait(spin=True) * 1e6)
                stream.take(_HEADS)
            cpu = time.process_time() - all_threads - (time.thread_time() - mine)
            share = cpu / (time.perf_counter() - began) * 100
        for part in (50, 95, 99):
            took = float(np.percentile(times[20:], part))  # the first ones teach
            line = Measure(f"rings {name}, p{part}", _HEADS, 0, took, 0, 0, _NAN, "us")
            found.append(judged(line, None))
        cost = Measure(f"rings {name}: the loop", _HEADS, 0, share, 0, 0, _NAN, "% of a core")
        found.append(judged(cost, None))
    return found


def _engine(spin: str | None, seconds: float, times: Any) -> None:
    """Work 3 ms of every 5 in a group that may use one processor; spin None: no rowstream."""
    (_GROUPS / "rowstream-bench" / "cgroup.procs").write_text(str(os.getpid()))
    with ringing() as (_, stream, ids):
        rings = spin is not None
        until = time.perf_counter() + seconds
        at = time.perf_counter()
        while at < until:
            if rings:
                stream.post(ids)
            while time.perf_counter() < at + 0.003:
                pass
            if rings:
                stream.wait()
                stream.take(_HEADS)
            times.append(time.perf_counter() - at)
            at = max(at + 0.005, time.perf_counter())
            time.sleep(max(0.0, at - time.perf_counter()))


def quota(rounds: int) -> list[Measure]:
    """A step's p99 with rings in every step, over that without."""
    group = _GROUPS / "rowstream-bench"
    try:
        group.mkdir(exist_ok=True)
        (group / "cpu.cfs_quota_us").write_text("100000")
    except OSError as error:
        print(f"no quota: {error}")
        return []
    p99: dict[str | None, list[float]] = {"auto": [], None: [], "again": []}
    try:
        with multiprocessing.Manager() as manager:
            for _ in range(rounds):
                for spin in p99:
                    times = manager.list()
                    mode = None if spin == "again" else spin
                    process = multiprocessing.Process(target=_engine, args=(mode, 4.0, times))
                    process.start()
                    process.join()
                    p99[spin].append(float(np.percentile(list(times), 99)) * 1e3)
    finally:
        group.rmdir()
    ours, one, other = (float(np.median(p99[spin])) for spin in ("auto", None, "again"))
    peer = (one + other) / 2
    line = Measure(
        "3 ms of 5 under a quota of one processor, p99", _HEADS, 0, ours, peer, ours / peer,
        other / one, "ms",
    )  # fmt: skip
    return [judged(line, at_most(1.5))]


def main() -> None:
    parser = options(__doc__, rounds=5)
    parser.add_argument("--idle-s", type=float, default=60.0)
    arguments = parser.parse_args()
    found = idle(arguments.idle_s) + first_ring(25) + rhythms(2000) + quota(arguments.rounds)
    finish("loop", found, arguments, f"{os.cpu_count()}cpu")


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
