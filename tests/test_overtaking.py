"""A step's rows do not wait for a prompt's: not on the host, and not on the way to a GPU."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import raw_tables
from raw_tables import RawTable, gather
from rowstream import _core
from streams import Stream

HEADS, ROW_BYTES = 16, 160
SLOW_ROW, SLOW_S = 7777, 3.0


@pytest.fixture
def raw(tmp_path: Path) -> RawTable:
    return raw_tables.write(tmp_path, np.random.default_rng(), shard_rows=(20_000,))


def open_slow(raw: RawTable, kind: str) -> _core.DiskTable:
    """Whoever reads one certain row has to wait for it."""
    (_, offset, _, _) = raw.planes[0][1][0]
    fault = _core.Fault(at=offset + ROW_BYTES * SLOW_ROW + 5, delay_ms=int(SLOW_S * 1000))
    table = raw.open(kind, faults=[fault])
    assert isinstance(table, _core.DiskTable)
    return table


def ids_without(raw: RawTable, tokens: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    ids = np.random.default_rng().integers(0, raw.num_rows, (tokens, HEADS))
    ids[np.abs(ids - SLOW_ROW) < 100] = 0
    return ids


def slow_prompt(raw: RawTable) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    ids = ids_without(raw, 200)
    ids[150, 3] = SLOW_ROW
    return ids


@pytest.mark.parametrize("kind", ["uring-direct", "pool-buffered", "inline-direct"])
def test_short_gathers_do_not_wait_for_a_long_one(kind: str, raw: RawTable) -> None:
    table = open_slow(raw, kind)
    prompt = slow_prompt(raw)
    found = []
    worker = threading.Thread(target=lambda: found.append(gather(table, prompt)))
    worker.start()
    try:
        while table.counters()["reads"] == 0:
            time.sleep(0.001)
        for tokens in (1, 5, 64) * 5:
            ids = ids_without(raw, tokens)
            assert np.array_equal(gather(table, ids), raw.expected(ids))
            assert table.files()
        assert not found
    finally:
        worker.join()
    assert np.array_equal(found[0], raw.expected(prompt))


def test_two_long_gathers_wait_for_each_other(raw: RawTable) -> None:
    # the scratch is there once
    table = open_slow(raw, "uring-direct")
    prompts = [slow_prompt(raw), *(ids_without(raw, 200) for _ in range(3))]
    found: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = {}

    def work(number: int) -> None:
        found[number] = gather(table, prompts[number])

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for number, prompt in enumerate(prompts):
        assert np.array_equal(found[number], raw.expected(prompt))


def test_short_rings_do_not_wait_for_a_long_one(raw: RawTable) -> None:
    loop = _core.Loop(open_slow(raw, "uring-direct"), [8, 8], read_timeout_s=60)
    arena = _core.Arena(8 << 20)
    long, short = (Stream(loop.add(arena, tokens * HEADS, ROW_BYTES)) for tokens in (200, 64))
    prompt = slow_prompt(raw)
    long.post(prompt)
    for tokens in (1, 5, 64) * 5:
        ids = ids_without(raw, tokens)
        rows = short.step(ids)
        assert rows is not None
        assert np.array_equal(rows, raw.expected(ids))
    assert long.channel.answered == 0
    long.wait()
    rows = long.take(prompt.size)
    assert rows is not None
    assert np.array_equal(rows.reshape(*prompt.shape, -1), raw.expected(prompt))
    loop.close()


def test_padding_makes_no_step_long(raw: RawTable) -> None:
    table = open_slow(raw, "uring-direct")
    loop = _core.Loop(table, [8, 8], read_timeout_s=60)
    arena = _core.Arena(8 << 20)
    long, padded = (Stream(loop.add(arena, 200 * HEADS, ROW_BYTES)) for _ in range(2))
    prompt = slow_prompt(raw)
    long.post(prompt)
    before = table.counters()
    for live in (0, 1, 4, 64):
        ids = ids_without(raw, 200)
        ids[live:] = -1
        ids[: live // 2, 5] = -1
        rows = padded.step(ids)
        assert rows is not None
        assert np.array_equal(rows, raw.expected(ids))
        assert np.array_equal(gather(table, ids), raw.expected(ids))
    assert long.channel.answered == 0
    missing = 2 * sum(HEADS * (200 - live) + live // 2 for live in (0, 1, 4, 64))
    assert table.counters()["missing_rows"] - before["missing_rows"] == missing
    long.wait()
    loop.close()


def test_a_long_ring_is_answered_in_time_beside_short_gathers_without_end(tmp_path: Path) -> None:
    # of a device that takes 5 ms for a read, of rows too far apart to be read at once: not if one
    # at a time was read meanwhile
    rows, row_bytes = 70 * HEADS, 5000
    raw = raw_tables.write(
        tmp_path, np.random.default_rng(), row_bytes=[row_bytes], shard_rows=(2 * rows,)
    )
    faults = [_core.Fault(0, 2**62, delay_ms=5)]
    table = raw.open("uring-direct", faults=faults, queue_depth=64)
    assert isinstance(table, _core.DiskTable)
    loop = _core.Loop(table, [8, 8], read_timeout_s=4)
    stream = Stream(loop.add(_core.Arena(8 << 20), rows, row_bytes))
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            gather(table, np.random.default_rng().integers(0, raw.num_rows, (1, HEADS)))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    prompt = 2 * np.random.default_rng().permutation(rows).reshape(-1, HEADS)
    try:
        found = stream.step(prompt)
    finally:
        over.set()
        for worker in workers:
            worker.join()
    assert found is not None
    assert np.array_equal(found, raw.expected(prompt))
    loop.close()


def test_a_ring_that_was_voided_before_its_turn_holds_nobody_up(raw: RawTable) -> None:
    table = open_slow(raw, "uring-direct")
    loop = _core.Loop(table, [8, 8], read_timeout_s=0.5)
    arena = _core.Arena(8 << 20)
    first, second = (Stream(loop.add(arena, 200 * HEADS, ROW_BYTES)) for _ in range(2))
    prompt = slow_prompt(raw)
    first.post(prompt)
    time.sleep(0.1)
    # it waits for the first one's turn to end, until the watchdog voids it
    assert second.step(ids_without(raw, 100)) is None
    asked = ids_without(raw, 2)
    rows = second.step(asked)
    assert rows is not None
    assert np.array_equal(rows, raw.expected(asked))
    loop.close()


def test_closing_waits_for_no_gather_that_has_not_begun(raw: RawTable) -> None:
    table = raw.open("uring-direct", faults=[_core.Fault(0, 2**62, delay_ms=50)])
    ids = [ids_without(raw, tokens) for tokens in (1, 100)]
    ended = []

    def work(number: int) -> None:
        try:
            while True:
                gather(table, ids[number % 2])
        except ValueError:
            ended.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    while table.counters()["gathers"] < 8:
        time.sleep(0.01)
    gathers = table.counters()["gathers"]
    table.close()
    # one of each kind had begun; others may have while close was called
    assert table.counters()["gathers"] - gathers <= 6
    for worker in workers:
        worker.join()
    assert sorted(ended) == list(range(8))


def test_a_short_ring_behind_a_long_one_of_its_channel_that_was_given_up(raw: RawTable) -> None:
    # the thread that is late still fills the staging of the channel
    loop = _core.Loop(open_slow(raw, "uring-direct"), [8, 8], read_timeout_s=1)
    stream = Stream(loop.add(_core.Arena(8 << 20), 200 * HEADS, ROW_BYTES))
    prompt = slow_prompt(raw)
    assert stream.step(prompt) is None
    until = time.monotonic() + 60
    taken = 0
    while taken < 5 and time.monotonic() < until:
        ids = ids_without(raw, 2)
        rows = stream.step(ids)
        if rows is not None:
            taken += 1
            assert np.array_equal(rows, raw.expected(ids))
    assert taken == 5
    loop.close()
