"""Channels and the loop that answers them, with a thread of Python in the device's place."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from loops import HEADS, ROW_BYTES, OpenLoop, some_ids, stream_of
from raw_tables import RawTable
from rowstream import _core
from rowstream.errors import ReadError, UnavailableError
from streams import IDS, MISUSE, READ, TIMEOUT, Stream, until

EIO = 5


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


def test_wrong_options(raw: RawTable) -> None:
    table = raw.open("loaded")
    with pytest.raises(ValueError, match="io_spin needs one of auto, always, never, got 'often'"):
        _core.Loop(table, [8, 8], spin="often")
    with pytest.raises(ValueError, match="read_timeout_s is 0"):
        _core.Loop(table, [8, 8], read_timeout_s=0)
    with pytest.raises(ValueError, match="groups have no heads"):
        _core.Loop(table, [])
