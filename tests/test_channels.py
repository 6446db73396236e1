"""Channels and the loop that answers them, with a thread of Python in the device's place."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import raw_tables
from children import unmeasured
from raw_tables import RawTable
from rowstream import _core
from rowstream.errors import ReadError, UnavailableError
from streams import CLOSED, IDS, MISUSE, READ, TIMEOUT, Stream, until

HEADS = 16
ROW_BYTES = 160
EIO = 5
OpenLoop = Callable[..., _core.Loop]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


@pytest.fixture
def raw(tmp_path: Path, rng: np.random.Generator) -> RawTable:
    return raw_tables.write(tmp_path, rng)


@pytest.fixture
def arena() -> _core.Arena:
    return _core.Arena(1 << 20)


@pytest.fixture
def open_loop(raw: RawTable) -> Iterator[OpenLoop]:
    loops: list[_core.Loop] = []

    def open_one(kind: str = "uring-direct", faults: Any = (), **options: Any) -> _core.Loop:
        table = raw.open(kind, faults=list(faults)) if faults else raw.open(kind)
        loops.append(_core.Loop(table, [8, 8], **{"read_timeout_s": 60, **options}))
        return loops[-1]

    yield open_one
    for loop in loops:
        loop.close()


def some_ids(raw: RawTable, rng: np.random.Generator, tokens: int) -> NDArray[np.int64]:
    ids = rng.integers(0, raw.num_rows, (tokens, HEADS))
    ids[rng.random(ids.shape) < 0.1] = -1
    return ids


def stream_of(loop: _core.Loop, arena: _core.Arena, tokens: int = 64) -> Stream:
    return Stream(loop.add(arena, tokens * HEADS, ROW_BYTES))


@pytest.mark.parametrize("kind", ["uring-direct", "pool-buffered", "mapped", "loaded"])
def test_steps_give_the_rows(
    kind: str, raw: RawTable, arena: _core.Arena, open_loop: OpenLoop, rng: np.random.Generator
) -> None:
    loop = open_loop(kind)
    stream = stream_of(loop, arena)
    for _ in range(100):
        ids = some_ids(raw, rng, int(rng.integers(1, 65)))
        rows = stream.step(ids)
        assert rows is not None
        assert np.array_equal(rows, raw.expected(ids))
    assert loop.counters()["rings"] == 100
    assert loop.counters()["voids"] == loop.faults == 0


def test_several_channels_at_once(
    raw: RawTable, arena: _core.Arena, open_loop: OpenLoop, rng: np.random.Generator
) -> None:
    loop = open_loop()
    streams = [stream_of(loop, arena, tokens=4) for _ in range(8)]
    for _ in range(30):
        asked = [some_ids(raw, rng, 4) for _ in streams]
        for stream, ids in zip(streams, asked, strict=True):
            stream.post(ids)
        for stream, ids in zip(streams, asked, strict=True):
            stream.wait()
            rows = stream.take(ids.size)
            assert rows is not None
            assert np.array_equal(rows.reshape(4, HEADS, -1), raw.expected(ids))


def test_a_read_error_makes_its_step_void_and_no_other(
    raw: RawTable, arena: _core.Arena, open_loop: OpenLoop, rng: np.random.Generator
) -> None:
    loop = open_loop(faults=[_core.Fault(16, 40, result=-EIO)])
    stream = stream_of(loop, arena)
    ids = rng.permutation(raw.num_rows)[: 3 * HEADS].reshape(3, 1, HEADS)
    assert stream.step(ids[0]) is not None
    assert stream.step(ids[1]) is None
    assert stream.last_fault == READ
    assert loop.faults == 1
    with pytest.raises(ReadError, match="Input/output error"):
        loop.raise_failure()
    loop.raise_failure()  # said once
    until(lambda: stream.step(ids[2]) is not None)


@pytest.mark.parametrize("bad", [-(2**62), 2311 + 100, 2**62])
def test_an_id_outside_the_table(
    bad: int, raw: RawTable, arena: _core.Arena, open_loop: OpenLoop, rng: np.random.Generator
) -> None:
    loop = open_loop()
    stream = stream_of(loop, arena)
    ids = some_ids(raw, rng, 2)
    wrong = ids.copy()
    wrong[1, 3] = bad
    assert stream.step(wrong) is None
    assert stream.last_fault == IDS
    with pytest.raises(IndexError, match=str(bad)):
        loop.raise_failure()
    rows = stream.step(ids)
    assert rows is not None
    assert np.array_equal(rows, raw.expected(ids))


def test_a_mailbox_that_makes_no_sense(
    raw: RawTable, arena: _core.Arena, open_loop: OpenLoop, rng: np.random.Generator
) -> None:
    stream = stream_of(open_loop(), arena, tokens=2)
    for rows in (2 * HEADS + 1, 2**32 - 1, HEADS - 1):
        stream.post(some_ids(raw, rng, 1))
        stream.wait()
        assert stream.take(HEADS) is not None
        stream.busy, stream.epoch = True, stream.epoch + 1
        stream.word(512, np.uint32)[0] = rows
        stream.word(0)[0] = stream.epoch
        stream.wait()
        assert stream.take(HEADS) is None
        assert stream.last_fault == IDS


def test_a_read_that_never_ends_is_void_in_time(
    raw: RawTable, arena: _core.Arena, open_loop: OpenLoop, rng: np.random.Generator
) -> None:
    loop = open_loop(faults=[_core.Fault(0, 1, delay_ms=4000)], read_timeout_s=0.3)
    stream = stream_of(loop, arena)
    ids = some_ids(raw, rng, 1)
    began = time.perf_counter()
    stream.post(ids)
    stream.wait()
    assert time.perf_counter() - began >= 0.3
    assert stream.take(HEADS) is None  # the rows of a read that was waited for would be right
    assert stream.last_fault == TIMEOUT
    with pytest.raises(ReadError, match=r"no answer for 0\.3 s"):
        loop.raise_failure()
    # the late answer of the first ring is nobody's; a later ring is answered right
    found: list[NDArray[np.uint8]] = []

    def answered() -> bool:
        rows = stream.step(ids)
        if rows is not None:
            found.append(rows)
        return rows is not None

    until(answered)
    assert np.array_equal(found[0], raw.expected(ids))
    assert loop.counters()["late"] >= 1


def test_two_streams_on_one_channel_get_no_rows_and_do_not_wait(
    raw: RawTable, arena: _core.Arena, open_loop: OpenLoop, rng: np.random.Generator
) -> None:
    loop = open_loop()
    stream = stream_of(loop, arena)
    stream.post(some_ids(raw, rng, 1))
    stream.post(some_ids(raw, rng, 1))
    stream.wait()
    assert stream.take(HEADS) is None
    stream.wait()
    assert stream.take(HEADS) is None
    assert stream.last_fault == MISUSE
    assert stream.channel.is_open
    for _ in range(3):
        assert stream.step(some_ids(raw, rng, 1)) is None
    stream.channel.reset(stream.epoch)
    ids = some_ids(raw, rng, 1)
    rows = stream.step(ids)
    assert rows is not None
    assert np.array_equal(rows, raw.expected(ids))


def test_a_stray_flag_costs_nothing(
    raw: RawTable, arena: _core.Arena, open_loop: OpenLoop, rng: np.random.Generator
) -> None:
    stream = stream_of(open_loop(faults=[_core.Fault(0, 1, delay_ms=100)]), arena)
    stream.word(128, np.uint32)[0] = 1
    for _ in range(20):  # each answer's flag is the next one's stray
        ids = some_ids(raw, rng, 1)
        rows = stream.step(ids)
        assert rows is not None
        assert np.array_equal(rows, raw.expected(ids))


def test_closed_every_wait_passes(
    raw: RawTable, arena: _core.Arena, open_loop: OpenLoop, rng: np.random.Generator
) -> None:
    loop = open_loop()
    stream = stream_of(loop, arena)
    assert stream.step(some_ids(raw, rng, 1)) is not None
    assert loop.close()
    for _ in range(5):
        began = time.perf_counter()
        assert stream.step(some_ids(raw, rng, 1)) is None
        assert time.perf_counter() - began < 30  # and not by the watchdog, after a minute
        assert stream.last_fault == CLOSED
    with pytest.raises(ValueError, match="table is closed"):
        loop.add(arena, 16, ROW_BYTES)


def test_closed_in_mid_read(
    raw: RawTable, arena: _core.Arena, open_loop: OpenLoop, rng: np.random.Generator
) -> None:
    loop = open_loop(faults=[_core.Fault(0, 1, delay_ms=4000)])
    stream = stream_of(loop, arena)
    stream.post(some_ids(raw, rng, 1))
    time.sleep(0.05)  # right as well where the read has not begun
    closing = threading.Thread(target=loop.close)
    closing.start()
    stream.wait()
    assert stream.take(HEADS) is None  # nobody waited for the read
    closing.join(30)
    assert not closing.is_alive()


def test_a_forgotten_loop_leaves_nobody_waiting(
    raw: RawTable, arena: _core.Arena, rng: np.random.Generator
) -> None:
    loop = _core.Loop(raw.open("uring-direct"), [8, 8], read_timeout_s=0.5)
    stream = stream_of(loop, arena)
    del loop
    gc.collect()
    assert stream.step(some_ids(raw, rng, 1)) is None


def test_blocks_come_back(raw: RawTable, open_loop: OpenLoop) -> None:
    loop = open_loop()
    needed = _core.Channel.bytes_for(HEADS, ROW_BYTES)
    arena = _core.Arena(3 * needed)
    held = [loop.add(arena, HEADS, ROW_BYTES) for _ in range(arena.bytes // needed)]
    with pytest.raises(
        UnavailableError,
        match=rf"channel for 16 rows needs {needed} bytes, arena has \d+ left; raise channel_bytes",
    ):
        loop.add(arena, HEADS, ROW_BYTES)
    for_graph = held[0].hold()
    del held
    gc.collect()
    until(lambda: loop.channels == 1)  # a graph's hold keeps its own
    assert arena.used_bytes == needed
    assert for_graph != 0


def test_void_steps_of_channels_that_are_gone_are_counted_once(
    raw: RawTable, arena: _core.Arena, open_loop: OpenLoop
) -> None:
    loop = open_loop()
    for gone in range(3):
        stream = stream_of(loop, arena, tokens=1)
        assert stream.step(np.full((1, HEADS), raw.num_rows)) is None
        assert loop.faults == gone + 1
        del stream
        for _ in range(150):
            assert loop.faults == gone + 1
            time.sleep(0.001)
        until(lambda: loop.channels == 0)


def test_a_block_can_be_taken_again_at_once(raw: RawTable, open_loop: OpenLoop) -> None:
    loop = open_loop()
    arena = _core.Arena(1 << 16)
    rows = arena.bytes * 3 // 4 // (ROW_BYTES + 8)  # there is room for one of these
    held: list[_core.Channel] = []
    for _ in range(30):
        held.clear()
        held.append(loop.add(arena, rows, ROW_BYTES))


def test_holds_are_counted(arena: _core.Arena, open_loop: OpenLoop) -> None:
    channel = open_loop().add(arena, HEADS, ROW_BYTES)
    assert channel.holds == 1
    channel.hold()
    assert channel.holds == 2
    channel.unhold()
    assert channel.holds == 1


def test_gated_channels_are_left_to_the_host(
    raw: RawTable, arena: _core.Arena, open_loop: OpenLoop, rng: np.random.Generator
) -> None:
    loop = open_loop(read_timeout_s=0.1)
    channel = loop.add(arena, HEADS, ROW_BYTES, gated=True)
    stream = Stream(channel)
    ids = some_ids(raw, rng, 1)
    stream.post(ids)
    time.sleep(0.3)  # longer than the watchdog waits
    assert stream.take(HEADS, patience_s=0) is None
    channel.staging[:HEADS] = raw.expected(ids)[0]
    channel.fill(2)
    stream.post(ids)
    rows = stream.take(HEADS)
    assert rows is not None
    assert np.array_equal(rows, raw.expected(ids)[0])
    assert loop.counters()["rings"] == 0


def threads_of_loops() -> dict[str, Path]:
    """The accounts of the threads of every loop of this process, by their ids."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it may end meanwhile
            if (task / "comm").read_text() == "rowstream-loop\n":
                found[task.name] = task
    return found


@pytest.fixture
def look_out(raw: RawTable, open_loop: OpenLoop) -> tuple[_core.Loop, Path]:
    """A loop, and the account of its thread that answers."""
    before = threads_of_loops()
    loop = open_loop("loaded", spin="never")
    made: dict[str, Path] = {}

    def named() -> bool:  # a thread names itself
        made.update(threads_of_loops())
        return bool(made.keys() - before.keys())

    until(named)
    (number,) = made.keys() - before.keys()
    return loop, made[number]


def sleeps(thread: Path) -> int:
    """How often a thread has gone to sleep."""
    lines = (thread / "status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("voluntary")))


def test_a_kick_has_the_loop_look_out(
    arena: _core.Arena,
    look_out: tuple[_core.Loop, Path],
    raw: RawTable,
    rng: np.random.Generator,
) -> None:
    loop, thread = look_out
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


def test_an_idle_loop_costs_next_to_nothing(
    raw: RawTable,
    arena: _core.Arena,
    look_out: tuple[_core.Loop, Path],
    rng: np.random.Generator,
) -> None:
    loop, thread = look_out
    stream = stream_of(loop, arena)
    assert stream.step(some_ids(raw, rng, 1)) is not None
    time.sleep(0.3)

    def cpu_s() -> float:  # of this one alone: what other threads do is not its cost
        return int((thread / "schedstat").read_text().split()[0]) / 1e9

    began, cpu = time.perf_counter(), cpu_s()
    time.sleep(2)
    assert (cpu_s() - cpu) / (time.perf_counter() - began) < 0.05


def test_wrong_options(raw: RawTable) -> None:
    table = raw.open("loaded")
    with pytest.raises(ValueError, match="io_spin needs one of auto, always, never, got 'often'"):
        _core.Loop(table, [8, 8], spin="often")
    with pytest.raises(ValueError, match="read_timeout_s is 0"):
        _core.Loop(table, [8, 8], read_timeout_s=0)
    with pytest.raises(ValueError, match="groups have no heads"):
        _core.Loop(table, [])


AT_EXIT = """
import sys, threading
import numpy as np
sys.path.insert(0, {tests!r})
from rowstream import _core
from streams import Stream
table = _core.DiskTable([{path!r}], [(160, [(0, 0, 0, 64)])], read_timeout_s=1.0,
                         faults=[_core.Fault(0, 1, delay_ms=600_000)])
loop = _core.Loop(table, [16], read_timeout_s=1.0)
stream = Stream(loop.add(_core.Arena(1 << 16), 16, 160))
stream.post(np.arange(16).reshape(1, 16))
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("raise ValueError('in the middle')", 1),
        ("stream.wait(); assert stream.take(16) is None", 0),
        (
            "import os\npid = os.fork()\nif pid == 0:\n    os._exit(7)\n"
            "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
            7,
        ),
    ],
)
def test_a_process_ends_while_a_read_does_not(end: str, code: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.bin"
    path.write_bytes(bytes(64 * 160))
    script = AT_EXIT.format(tests=str(Path(__file__).parent), path=str(path), end=end)
    # the time-out ends what waits for the read
    done = subprocess.run(
        [sys.executable, "-c", script],
        timeout=120,
        env=unmeasured(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr


def test_after_a_fork(raw: RawTable, arena: _core.Arena, open_loop: OpenLoop) -> None:
    loop = open_loop()
    import os

    pid = os.fork()
    if pid == 0:
        try:
            loop.add(arena, HEADS, ROW_BYTES)
        except UnavailableError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
