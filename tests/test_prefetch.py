"""Look-ahead: rows read ahead are found by their ids, and a wrong guess changes no byte."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import checkpoints
import raw_tables
from raw_tables import RawTable, gather
from rowstream import RowStore, _core

WIDTH = 8
GROUPS = [WIDTH, WIDTH]


@pytest.fixture
def raw(tmp_path: Path) -> RawTable:
    return raw_tables.write(tmp_path, np.random.default_rng(), shard_rows=(20_000,))


def open_ahead(raw: RawTable, lookahead_bytes: int = 8 << 20, **options: object) -> _core.DiskTable:
    table = raw.open("uring-direct", group_width=WIDTH, lookahead_bytes=lookahead_bytes, **options)
    assert isinstance(table, _core.DiskTable)
    return table


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.002)


def prompt(raw: RawTable, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.random.default_rng().integers(0, raw.num_rows, (count, 2 * WIDTH))


def test_what_was_read_ahead_is_not_read_again(raw: RawTable) -> None:
    table = open_ahead(raw)
    ids = prompt(raw, 500)
    ticket = table.prefetch(ids.reshape(-1))
    until(lambda: table.ticket(ticket)[2])
    assert table.ticket(ticket) == (ids.size, ids.size, True)
    assert np.array_equal(gather(table, ids, GROUPS), raw.expected(ids))
    counters = table.counters()
    assert (counters["reads"], counters["ahead_rows"]) == (0, ids.size)
    assert table.kept()["lookahead_reads"] > 0


def test_only_the_rest_is_read(raw: RawTable) -> None:
    table = open_ahead(raw)
    ids = prompt(raw, 100)
    ticket = table.prefetch(ids[:60].reshape(-1))
    until(lambda: table.ticket(ticket)[2])
    assert np.array_equal(gather(table, ids, GROUPS), raw.expected(ids))
    assert table.counters()["ahead_rows"] == 60 * 2 * WIDTH


def test_rows_are_taken_once_for_each_time_they_were_asked_for(raw: RawTable) -> None:
    table = open_ahead(raw)
    ids = prompt(raw, 50)
    for _ in range(2):
        ticket = table.prefetch(ids.reshape(-1))
        until(lambda ticket=ticket: table.ticket(ticket)[2])  # type: ignore[misc]
    for turn in (1, 2, 3):
        assert np.array_equal(gather(table, ids, GROUPS), raw.expected(ids))
        assert table.counters()["ahead_rows"] == min(turn, 2) * ids.size


def test_a_prompt_larger_than_the_pool_is_read_in_windows(raw: RawTable) -> None:
    table = open_ahead(raw, 1 << 20)  # room for some 700 groups
    ids = prompt(raw, 3000)
    ticket = table.prefetch(ids.reshape(-1))
    until(lambda: table.ticket(ticket)[1] >= 512 * WIDTH)
    time.sleep(0.1)
    assert table.ticket(ticket)[1] < 1024 * WIDTH  # full: it waits for its consumer
    for first in range(0, 3000, 100):
        part = ids[first : first + 100]
        end = (first + 100) * 2 * WIDTH
        until(lambda end=end: table.ticket(ticket)[1] >= end)  # type: ignore[misc]
        assert np.array_equal(gather(table, part, GROUPS), raw.expected(part))
    assert table.ticket(ticket) == (ids.size, ids.size, True)
    assert table.counters()["ahead_rows"] == ids.size


def test_dropped(raw: RawTable) -> None:
    table = open_ahead(raw, 1 << 20)
    ids = prompt(raw, 3000)
    ticket = table.prefetch(ids.reshape(-1))
    until(lambda: table.ticket(ticket)[1] >= 256 * WIDTH)
    table.drop(ticket)
    table.drop(ticket)
    assert table.ticket(ticket) == (0, 0, True)
    # the room is free for another one, at once
    other = prompt(raw, 200)
    second = table.prefetch(other.reshape(-1))
    until(lambda: table.ticket(second)[2])
    assert np.array_equal(gather(table, other, GROUPS), raw.expected(other))
    assert table.counters()["ahead_rows"] == other.size
    assert np.array_equal(gather(table, ids[:50], GROUPS), raw.expected(ids[:50]))


def test_what_nobody_takes_is_freed_after_ten_seconds(raw: RawTable) -> None:
    table = open_ahead(raw, 1 << 20)
    table.prefetch(prompt(raw, 3000).reshape(-1))
    other = prompt(raw, 100)
    second = table.prefetch(other.reshape(-1))
    until(lambda: table.ticket(second)[1] > 0)


def test_a_lookup_does_not_wait_for_the_look_ahead(raw: RawTable) -> None:
    # one row's read hangs in the look-ahead; gathers of other rows do not care
    (_, offset, _, _) = raw.planes[0][1][0]
    hang = _core.Fault(at=offset + 160 * 7777 + 5, delay_ms=-1)
    table = open_ahead(raw, faults=[hang], read_timeout_s=3)
    ids = prompt(raw, 50)
    ids[20, 3] = 7777
    ticket = table.prefetch(ids.reshape(-1))
    until(lambda: table.kept()["lookahead_reads"] > 0)
    for _ in range(20):
        later = prompt(raw, 5)
        later[np.abs(later - 7777) < 10] = 0
        assert np.array_equal(gather(table, later, GROUPS), raw.expected(later))
    assert not table.ticket(ticket)[2]  # it still waits
    until(lambda: table.ticket(ticket)[2])
    assert table.ticket(ticket)[1] == 0
    began = time.monotonic()
    table.close()
    assert time.monotonic() - began < 60


def test_a_gather_that_overtakes_leaves_nothing_to_read(raw: RawTable) -> None:
    # the first piece of the look-ahead, 128 tokens, waits for one row while all others are gathered
    (_, offset, _, _) = raw.planes[0][1][0]
    slow = _core.Fault(at=offset + 160 * 7777 + 5, delay_ms=3000)
    table = open_ahead(raw, 1 << 20, faults=[slow])
    ids = prompt(raw, 1000)
    ids[np.abs(ids - 7777) < 100] = 0
    ids[20, 3] = 7777
    ticket = table.prefetch(ids.reshape(-1))
    until(lambda: table.kept()["lookahead_reads"] > 0)
    for first in range(128, 1000, 50):
        part = ids[first : first + 50]
        assert np.array_equal(gather(table, part, GROUPS), raw.expected(part))
    assert table.ticket(ticket)[1] == 0
    until(lambda: table.ticket(ticket)[2])
    # what gathers have read in the meantime is passed over; a few are forgotten where hashes meet
    assert table.ticket(ticket) == (ids.size, ids.size, True)
    assert table.kept()["lookahead_reads"] < ids[:128].size + ids[128:].size / 8
    assert np.array_equal(gather(table, ids[:128], GROUPS), raw.expected(ids[:128]))
    assert table.counters()["ahead_rows"] == ids[:128].size


def test_errors_are_left_to_the_lookup(raw: RawTable) -> None:
    table = open_ahead(raw, faults=[_core.Fault(0, 1, result=-6)])
    ids = prompt(raw, 30)
    ticket = table.prefetch(ids.reshape(-1))
    until(lambda: table.ticket(ticket)[2])
    assert table.ticket(ticket)[1] == 0
    assert np.array_equal(gather(table, ids, GROUPS), raw.expected(ids))
    assert table.counters()["read_errors"] == 0


def test_cached_groups_are_not_read_ahead(raw: RawTable) -> None:
    table = open_ahead(raw, cache_bytes=4 << 20)
    ids = prompt(raw, 100)
    gather(table, ids, GROUPS)
    ticket = table.prefetch(ids.reshape(-1))
    until(lambda: table.ticket(ticket)[2])
    assert table.kept()["lookahead_reads"] == 0
    fresh = prompt(raw, 100)
    second = table.prefetch(fresh.reshape(-1))
    until(lambda: table.ticket(second)[2])
    gather(table, fresh, GROUPS)  # moves from the pool into the cache
    assert np.array_equal(gather(table, fresh, GROUPS), raw.expected(fresh))
    assert table.counters()["cached_rows"] == fresh.size


def test_ids_are_checked(raw: RawTable) -> None:
    table = open_ahead(raw)
    with pytest.raises(IndexError, match="row id 20000"):
        table.prefetch(np.full(WIDTH, 20_000))
    with pytest.raises(ValueError, match="not whole groups of 8"):
        table.prefetch(np.zeros(WIDTH + 1, np.int64))
    with pytest.raises(ValueError, match="lookahead_bytes is 1000, needs room for 256 groups"):
        open_ahead(raw, 1000).prefetch(np.zeros(WIDTH, np.int64))
    without = open_ahead(raw, 0)
    assert without.ticket(without.prefetch(np.zeros(WIDTH, np.int64))) == (0, 0, True)
    table.close()
    with pytest.raises(ValueError, match="closed"):
        table.prefetch(np.zeros(WIDTH, np.int64))


def test_memory_is_bounded_and_counted(raw: RawTable) -> None:
    table = open_ahead(raw, 4 << 20)
    before = table.memory_bytes
    table.prefetch(prompt(raw, 10).reshape(-1))
    added = table.memory_bytes - before
    assert (4 << 20) * 0.9 <= added <= (4 << 20) + (2 << 20)


@pytest.mark.parametrize("backend", ["disk", "mmap", "pinned"])
def test_store_prefetch(backend: str, tmp_path: Path) -> None:
    table = checkpoints.write_tiny(tmp_path)
    with RowStore.open(tmp_path, backend=backend) as store:
        runs = [(None, [1, 2, 3]), ([2, 3], [4, 5])]
        with store.prefetch(runs) as ticket:
            until(lambda: ticket.progress().over)
            rows = np.concatenate([store.row_ids(*run) for run in runs])
            assert np.array_equal(store.gather_tokens(runs), table[rows])
        assert ticket.progress() == (0, 0, True)
        assert store.prefetch([]).progress() == (0, 0, True)
        if backend == "disk":
            stats = store.stats()
            assert stats["ahead_rows"] + stats["duplicate_rows"] == rows.size
            assert stats["reads"] == 0
        with pytest.raises(ValueError, match="token id 50"):
            store.prefetch([(None, [50])])
