"""The row cache: the same bytes with and without, an exact budget, and what it keeps."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import raw_tables
from raw_tables import RawTable, gather
from rowstream import _core

WIDTH = 8
Ids = NDArray[np.int64]


@pytest.fixture
def raw(tmp_path: Path) -> RawTable:
    return raw_tables.write(tmp_path, np.random.default_rng(), shard_rows=(20_000,))


def open_cached(raw: RawTable, cache_bytes: int, **options: object) -> _core.DiskTable:
    table = raw.open("uring-direct", group_width=WIDTH, cache_bytes=cache_bytes, **options)
    assert isinstance(table, _core.DiskTable)
    return table


def tokens(raw: RawTable, rng: np.random.Generator, count: int, distinct: int) -> Ids:
    """Rows of `count` tokens, two groups each, of which few are used often."""
    pool = np.random.default_rng(7).integers(0, raw.num_rows, (distinct, WIDTH))
    rank = np.minimum(rng.zipf(1.3, (count, 2)) - 1, distinct - 1)
    return np.ascontiguousarray(pool[rank].reshape(count, 2 * WIDTH))


def test_a_group_read_once_is_not_read_again(raw: RawTable) -> None:
    table = open_cached(raw, 1 << 20)
    ids = np.random.default_rng().integers(0, raw.num_rows, (40, 2 * WIDTH))
    gather(table, ids, [WIDTH, WIDTH])
    before = table.counters()
    assert np.array_equal(gather(table, ids, [WIDTH, WIDTH]), raw.expected(ids))
    after = table.counters()
    assert after["reads"] == before["reads"]
    assert after["cached_rows"] - before["cached_rows"] == ids.size
    kept = table.kept()
    assert (kept["cache_hits"], kept["cache_misses"], kept["cache_groups"]) == (80, 80, 80)


def test_groups_that_agree_in_the_first_row_only(raw: RawTable) -> None:
    # a head of 97 rows: the first id of a group is no key
    ids = np.random.default_rng().integers(97, raw.num_rows, (10_000, WIDTH))
    ids[:, 0] %= 97
    table = open_cached(raw, 8 << 20)
    for _ in range(2):
        assert np.array_equal(gather(table, ids, [WIDTH]), raw.expected(ids))
    assert table.kept()["cache_hits"] > 0


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    cache_bytes=st.integers(20_000, 3_000_000),
    seed=st.integers(0, 2**32),
    steps=st.lists(st.integers(0, 80), min_size=1, max_size=25),
)
def test_bytes_are_those_without_a_cache(
    cache_bytes: int, seed: int, steps: list[int], raw: RawTable
) -> None:
    rng = np.random.default_rng(seed)
    table = open_cached(raw, cache_bytes)
    for count in steps:
        ids = tokens(raw, rng, count, 300)
        ids[rng.random(ids.shape) < 0.02] = -1
        assert np.array_equal(gather(table, ids, [WIDTH, WIDTH]), raw.expected(ids))
    counters = table.counters()
    assert counters["rows"] == sum(steps) * 2 * WIDTH
    assert table.kept()["cache_bytes"] <= cache_bytes


@pytest.mark.parametrize("cache_bytes", [4_000, 50_000, 1 << 20, 3 << 20, 12_345_678, 64 << 20])
def test_the_budget_is_kept_metadata_included(cache_bytes: int, raw: RawTable) -> None:
    without = open_cached(raw, 0).memory_bytes
    if cache_bytes < 6_000:
        with pytest.raises(ValueError, match="a cache of 4000 bytes cannot hold groups of 1280"):
            open_cached(raw, cache_bytes)
        return
    table = open_cached(raw, cache_bytes)
    taken = table.kept()["cache_bytes"]
    assert taken <= cache_bytes
    assert table.memory_bytes == without + taken
    # and used: all but a page for each of at most sixteen shards, and the metadata
    rng = np.random.default_rng()
    ids = rng.integers(0, raw.num_rows, (2 * cache_bytes // 1280 + 50, WIDTH))
    gather(table, ids, [WIDTH])
    held = table.kept()["cache_groups"] * WIDTH * 160
    assert held >= 0.85 * (cache_bytes - 17 * 4096)


def test_a_long_prompt_does_not_flush_what_decoding_uses(raw: RawTable) -> None:
    rng = np.random.default_rng()
    table = open_cached(raw, 2 << 20)  # some 1,500 groups
    used = rng.integers(0, raw.num_rows, (400, WIDTH))
    for _ in range(4):
        gather(table, used, [WIDTH])
    for _ in range(20):
        gather(table, rng.integers(0, raw.num_rows, (1000, WIDTH)), [WIDTH])
    before = table.kept()["cache_hits"]
    gather(table, used, [WIDTH])
    assert table.kept()["cache_hits"] - before >= 0.9 * len(used)


def test_what_is_asked_for_again_comes_back_for_longer(raw: RawTable) -> None:
    # thrown out of the short queue, remembered, and put into the long one at the second time
    rng = np.random.default_rng()
    table = open_cached(raw, 1 << 20)  # some 750 groups
    ids = rng.integers(0, raw.num_rows, (50, WIDTH))
    gather(table, ids, [WIDTH])
    gather(table, rng.integers(0, raw.num_rows, (1000, WIDTH)), [WIDTH])
    gather(table, ids, [WIDTH])
    for _ in range(5):
        gather(table, rng.integers(0, raw.num_rows, (1000, WIDTH)), [WIDTH])
    before = table.kept()["cache_hits"]
    gather(table, ids, [WIDTH])
    assert table.kept()["cache_hits"] - before >= 25


def test_other_gathers_go_past_the_cache(raw: RawTable) -> None:
    table = open_cached(raw, 1 << 20)
    ids = np.random.default_rng().integers(0, raw.num_rows, (30, WIDTH))
    for groups in ([1] * WIDTH, [4, 4], [3, 5]):
        assert np.array_equal(gather(table, ids, groups), raw.expected(ids))
    assert table.kept()["cache_groups"] == 0


def test_rows_that_were_zeroed_are_not_kept(raw: RawTable) -> None:
    (_, offset, _, _) = raw.planes[0][1][0]
    fault = _core.Fault(first=0, count=1, result=-6)  # ENXIO, once
    table = open_cached(raw, 1 << 20, faults=[fault], zero_rows=True)
    ids = np.arange(WIDTH)[None] * 100
    assert not np.array_equal(gather(table, ids, [WIDTH]), raw.expected(ids))
    assert np.array_equal(gather(table, ids, [WIDTH]), raw.expected(ids))
    assert offset > 0


def test_many_threads_share_it(raw: RawTable) -> None:
    table = open_cached(raw, 300_000)
    wrong = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(60):
            ids = tokens(raw, rng, int(rng.integers(1, 40)), 400)
            if not np.array_equal(gather(table, ids, [WIDTH, WIDTH]), raw.expected(ids)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert table.kept()["cache_hits"] > 0
