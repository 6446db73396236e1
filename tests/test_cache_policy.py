"""The simulator of cache policies, and the store's cache beside it: equal counts."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections import Counter, OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import raw_tables
from rowstream import _core
from rowstream.hashing import ngram_row_ids

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.mirrored import groups_of_a_shard
from benchmarks.ngrams import PIECE_TOKENS, Trace, gather_ends, group_hashes, released_constants
from benchmarks.policy import POLICIES, ROWSTREAM, Outcome, Policy, Simulator
from benchmarks.text import Corpus

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator needs g++")

WIDTH = 8


def trace(seed: int, keys: int, length: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Keys of which few are asked for often, in gathers of up to 30."""
    rng = np.random.default_rng(seed)
    some = (rng.zipf(1.2, length) - 1) % keys
    ends = np.unique(np.append(rng.integers(0, length, length // 15), length))
    return some.astype(np.uint32), ends


def run(policy: Policy, entries: int, keys: NDArray[np.uint32], ends: NDArray[np.int64]) -> Outcome:
    return Simulator(policy, np.zeros(int(keys.max()) + 1, np.uint64), entries).run(keys, ends)


def gathers(keys: NDArray[np.uint32], ends: NDArray[np.int64]) -> list[list[int]]:
    parts = np.split(keys, ends[:-1])
    return [list(dict.fromkeys(part.tolist())) for part in parts]


def test_lru_is_that_of_an_ordered_dict() -> None:
    keys, ends = trace(1, 400, 6000)
    held: OrderedDict[int, None] = OrderedDict()
    missed = []
    for wanted in gathers(keys, ends):
        misses = [key for key in wanted if key not in held]
        for key in wanted:
            if key in held:
                held.move_to_end(key)
        for key in misses:
            held[key] = None
            if len(held) > 50:
                held.popitem(last=False)
        missed.append(len(misses))
    outcome = run(POLICIES["LRU"], 50, keys, ends)
    assert outcome.missed.tolist() == missed
    assert int(outcome.found.sum()) > 0


@pytest.mark.parametrize(("name", "promote"), [("S3-FIFO", 1), ("S3-FIFO, two uses", 2)])
def test_s3_fifo_is_that_of_three_deques(name: str, promote: int) -> None:
    keys, ends = trace(2, 700, 9000)
    entries, small_most = 60, 6
    small: deque[int] = deque()
    main: deque[int] = deque()
    ghosts: deque[int] = deque()
    uses: Counter[int] = Counter()

    def make_room() -> None:
        while len(small) + len(main) >= entries:
            if len(small) >= small_most:
                key = small.popleft()
                if uses.pop(key) >= promote:
                    uses[key] = 0
                    main.append(key)
                else:
                    ghosts.append(key)
                    if len(ghosts) > entries - small_most:
                        ghosts.popleft()
            else:
                key = main.popleft()
                if uses[key] == 0:
                    del uses[key]
                else:
                    uses[key] -= 1
                    main.append(key)

    missed = []
    for wanted in gathers(keys, ends):
        misses = [key for key in wanted if key not in uses]
        for key in wanted:
            if key in uses:
                uses[key] = min(uses[key] + 1, 3)
        for key in misses:
            known = key in ghosts
            if known:
                ghosts.remove(key)
            make_room()
            uses[key] = 0
            (main if known else small).append(key)
        missed.append(len(misses))
    assert run(POLICIES[name], entries, keys, ends).missed.tolist() == missed


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_keeps_what_fits(name: str) -> None:
    keys, ends = trace(3, 300, 5000)
    outcome = run(POLICIES[name], 400, keys, ends)
    assert int(outcome.missed.sum()) == len(set(keys.tolist()))
    small = run(POLICIES[name], 30, keys, ends)
    assert np.array_equal(small.missed + small.found, outcome.missed + outcome.found)
    assert int(small.missed.sum()) > int(outcome.missed.sum())


@pytest.mark.parametrize("cache_bytes", [100_000, 8 << 20])
def test_the_stores_cache_does_what_the_simulator_does(cache_bytes: int, tmp_path: Path) -> None:
    # one shard, and sixteen of them
    raw = raw_tables.write(tmp_path, np.random.default_rng(4), shard_rows=(20_000,))
    table = raw.open("uring-direct", group_width=WIDTH, cache_bytes=cache_bytes)
    assert isinstance(table, _core.DiskTable)
    held = 70 if cache_bytes < 1 << 20 else 6000
    pool = np.random.default_rng(5).integers(0, raw.num_rows, (4 * held, WIDTH))
    keys, ends = trace(6, len(pool), 40 * held)
    missed = []
    for part in np.split(keys, ends[:-1]):
        before = table.kept()["cache_misses"]
        raw_tables.gather(table, pool[part], [WIDTH])
        missed.append(table.kept()["cache_misses"] - before)
    kept = table.kept()
    shards = 16 if cache_bytes > 1 << 20 else 1
    entries = groups_of_a_shard(kept["cache_bytes"], 160, shards)
    assert kept["cache_groups"] <= entries * shards
    outcome = Simulator(ROWSTREAM, group_hashes(pool), entries, shards).run(keys, ends)
    assert outcome.missed.tolist() == missed
    assert kept["cache_hits"] == int(outcome.found.sum())
    assert sum(missed) > 1.5 * entries * shards  # much was evicted


def test_a_trace_numbers_groups_of_rows() -> None:
    rng = np.random.default_rng(7)
    starts = np.array([0, 40, 41, 300])
    tokens = rng.integers(0, 12, 300).astype(np.int32)
    constants = released_constants()
    made = Trace.of(Corpus(tokens, starts, ("a", "b", "c"), ""), constants)
    ids = np.concatenate(
        [ngram_row_ids(constants, None, tokens[a:b]) for a, b in itertools.pairwise(starts)]
    )
    for order in range(2):
        groups = ids[:, 8 * order : 8 * order + 8]
        assert np.array_equal(made.hashes[made.keys[:, order]], group_hashes(groups))
        # a key for each different group, and one group for each key
        keys = made.keys[:, order].tolist()
        pairs = {(key, *group) for key, group in zip(keys, groups.tolist(), strict=True)}
        assert len(pairs) == len(np.unique(groups, axis=0)) == len(set(keys))
    for first, last in ((0, 40), (10, 20), (41, 60), (42, 50), (40, 41)):
        assert np.array_equal(made.row_ids(first, last), ids[first:last])
    assert made.chunks(100) == [(0, 40), (40, 41), (41, 141), (141, 241), (241, 300)]


def test_gathers_end_where_pieces_do() -> None:
    assert gather_ends([3, PIECE_TOKENS, 2 * PIECE_TOKENS + 1]).tolist() == [
        2 * tokens
        for tokens in (
            3,
            3 + PIECE_TOKENS,
            3 + 2 * PIECE_TOKENS,
            3 + 3 * PIECE_TOKENS,
            4 + 3 * PIECE_TOKENS,
        )
    ]
