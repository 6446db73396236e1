"""How often a loop looks out: after a kick, for the first ring after idle, and idle."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from loops import HEADS, OpenLoop, some_ids, stream_of
from raw_tables import RawTable
from rowstream import _core
from streams import until

LookOut = Callable[[str], tuple[_core.Loop, Path]]


def threads_of_loops() -> dict[str, Path]:
    """The accounts of the threads of every loop of this process, by their ids."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it may end meanwhile
            if (task / "comm").read_text() == "rowstream-loop\n":
                found[task.name] = task
    return found


@pytest.fixture
def look_out(raw: RawTable, open_loop: OpenLoop) -> LookOut:
    """Opens a loop that may spin or not; returns it and the account of its thread that answers."""

    def opened(spin: str) -> tuple[_core.Loop, Path]:
        before = threads_of_loops()
        loop = open_loop("loaded", spin=spin)
        made: dict[str, Path] = {}

        def named() -> bool:  # a thread names itself
            made.update(threads_of_loops())
            return bool(made.keys() - before.keys())

        until(named)
        (number,) = made.keys() - before.keys()
        return loop, made[number]

    return opened


def sleeps(thread: Path) -> int:
    """How often a thread has gone to sleep."""
    lines = (thread / "status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("voluntary")))


def test_a_kick_has_the_loop_look_out(
    arena: _core.Arena,
    look_out: LookOut,
    raw: RawTable,
    rng: np.random.Generator,
) -> None:
    loop, thread = look_out("never")
    stream = stream_of(loop, arena, tokens=1)
    assert stream.step(some_ids(raw, rng, 1)) is not None
    time.sleep(0.15)

    def looks(pause_s: float) -> tuple[int, float]:
        """How often the loop looks, and how often it would every 5 ms."""
        before, began = sleeps(thread), time.perf_counter()
        time.sleep(pause_s)
        return sleeps(thread) - before, (time.perf_counter() - began) / 0.005

    seen, usual = looks(0.5)
    assert usual / 20 < seen < usual * 1.3 + 2
    # every 50 us for 2 ms; a busy machine may take the processor away for those
    for _ in range(200):
        loop.kick()
        seen, usual = looks(0.01)
        if seen > usual * 1.3 + 10:
            return
    pytest.fail("a kick changes nothing")


def test_the_first_ring_after_idle_is_seen(
    raw: RawTable, arena: _core.Arena, open_loop: OpenLoop, rng: np.random.Generator
) -> None:
    loop = open_loop("loaded")
    stream = stream_of(loop, arena, tokens=1)
    ids = some_ids(raw, rng, 1)
    for kicked in (False, True, False, True):
        stream.step(ids)
        time.sleep(0.15)
        if kicked:
            loop.kick()
        stream.post(ids)
        assert stream.wait() < 30  # and not by the watchdog, after a minute
        assert stream.take(HEADS) is not None


@pytest.mark.parametrize(
    ("pauses_ms", "sleeps_between"),
    [((40, 40), True), ((2, 9), False), ((1, 4, 2, 6, 3), False)],
)
def test_a_loop_looks_without_pause_while_a_ring_may_come(
    raw: RawTable,
    arena: _core.Arena,
    look_out: LookOut,
    rng: np.random.Generator,
    pauses_ms: tuple[int, ...],
    sleeps_between: bool,
) -> None:
    loop, thread = look_out("always")
    stream = stream_of(loop, arena, tokens=1)
    ids = some_ids(raw, rng, 1)

    def ring(times: int) -> None:
        for turn in range(times):
            time.sleep(pauses_ms[turn % len(pauses_ms)] / 1e3)
            assert stream.step(ids) is not None

    # a busy machine may ring late, or not let the loop look
    for _ in range(20):
        ring(20)
        before = sleeps(thread)
        ring(20)
        if (sleeps(thread) - before > 20 * 20) == sleeps_between:
            return
    pytest.fail("it does not learn when rings come")


def test_an_idle_loop_costs_next_to_nothing(
    raw: RawTable,
    arena: _core.Arena,
    look_out: LookOut,
    rng: np.random.Generator,
) -> None:
    loop, thread = look_out("never")
    stream = stream_of(loop, arena)
    assert stream.step(some_ids(raw, rng, 1)) is not None
    time.sleep(0.3)

    def cpu_s() -> float:  # of this one alone: what other threads do is not its cost
        return int((thread / "schedstat").read_text().split()[0]) / 1e9

    began, cpu = time.perf_counter(), cpu_s()
    time.sleep(2)
    assert (cpu_s() - cpu) / (time.perf_counter() - began) < 0.05
