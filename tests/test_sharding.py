"""Ranks that share a table: each reads what it owns, and together they give the whole."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import checkpoints
from rowstream import RowStore
from rowstream.sharding import OwnedRows, Shard, owner

WORLDS = (1, 2, 3, 4, 8, 16, 20)
HEADS = 16
SIZES = [101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179]
ROWS = 2208  # 2206 of heads, padded to a multiple of 8
WIDTH = 96


@pytest.fixture
def table(tmp_path: Path) -> NDArray[np.uint8]:
    """A table of sixteen heads as the released model's, of two orders."""
    table = checkpoints.table_bytes(ROWS, WIDTH, int(time.time()))
    checkpoints.write_config(
        tmp_path, heads_per_ngram=8, ngram_vocab_size_base=101, ple_embed_dim=WIDTH * HEADS
    )
    offsets = [0, *np.cumsum(SIZES)[:-1].tolist()]
    buffers = [
        checkpoints.hash_buffers()[0],
        checkpoints.int64(f"{checkpoints.root()}.ngram_heads_offsets", offsets),
        checkpoints.int64(f"{checkpoints.root()}.ngram_heads_vocab_sizes", SIZES),
    ]
    arrays = [checkpoints.scale(), *checkpoints.shards(table, [ROWS // 4] * 4), *buffers]
    checkpoints.write_file(tmp_path / "model.safetensors", arrays)
    return table


def ranks(folder: Path, world: int, by: str, **options: object) -> list[RowStore]:
    return [
        RowStore.open(folder, rank=rank, world=world, shard_by=by, **options)  # type: ignore[arg-type]
        for rank in range(world)
    ]


def whole(table: NDArray[np.uint8], ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    rows = table[np.where(ids < 0, 0, ids)]
    rows[ids < 0] = 0
    return rows


def owned_by(ids: NDArray[np.int64], rank: int, world: int, by: str) -> NDArray[np.bool_]:
    """Who owns what, worked out from the ids alone."""
    if by == "heads":
        return np.broadcast_to(np.arange(HEADS) % world == rank, ids.shape) & (ids >= 0)
    first = -(-ROWS // world) * rank
    return (ids >= first) & (ids < first - (-ROWS // world))


@pytest.mark.parametrize("by", ["heads", "rows"])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_the_sum_over_ranks_is_the_table(
    table: NDArray[np.uint8], tmp_path: Path, world: int, by: str, cache_bytes: int
) -> None:
    rng = np.random.default_rng()
    ids = rng.integers(-1, ROWS, (3, 20, HEADS))
    ids[rng.random((3, 20)) < 0.2] = -1
    total = np.zeros((*ids.shape, WIDTH), np.uint64)
    for rank, store in enumerate(ranks(tmp_path, world, by, cache_bytes=cache_bytes)):
        with store:
            out = np.full(total.shape, 0xEE, np.uint8)
            for turn in range(2):  # the second time from the cache
                out[...] = 0xEE
                assert store.gather(ids, out) is out
                mine = owned_by(ids, rank, world, by)
                assert np.array_equal(out[mine], table[ids[mine]])
                assert not out[~mine].any()
                if turn == 0:
                    first = store.stats()["reads"]
            if cache_bytes and len({*store.owned.lookup_groups}) == 1:
                assert store.stats()["reads"] == first
            total += out
    assert np.array_equal(total, whole(table, ids))


@pytest.mark.parametrize("by", ["heads", "rows"])
@pytest.mark.parametrize("world", [2, 4, 8, 16, 20])
def test_only_owned_rows_are_read(
    table: NDArray[np.uint8], tmp_path: Path, world: int, by: str
) -> None:
    # one row in the middle of each head: too far from each other to be read together
    ids = (np.cumsum(SIZES) - np.array(SIZES) // 2)[None]
    counted = 0
    for rank, store in enumerate(ranks(tmp_path, world, by, backend="disk")):
        with store:
            store.gather(ids)
            stats = store.stats()
            assert stats["reads"] == np.count_nonzero(owned_by(ids, rank, world, by))
            assert (stats["rank"], stats["world"]) == (rank, world)
            counted += stats["reads"]
    assert counted == HEADS


@pytest.mark.parametrize("by", ["heads", "rows"])
@pytest.mark.parametrize("world", [2, 3, 8, 20])
def test_tokens_read_ahead(table: NDArray[np.uint8], tmp_path: Path, world: int, by: str) -> None:
    tokens = np.random.default_rng().integers(0, 50, 60)
    tokens[tokens == 7] = 8
    runs = [(None, tokens)]
    with RowStore.open(tmp_path) as one:
        ids = one.row_ids(None, tokens)
    total = np.zeros((60, HEADS, WIDTH), np.uint64)
    for rank, store in enumerate(ranks(tmp_path, world, by, backend="disk")):
        with store, store.prefetch(runs) as ticket:
            end = time.monotonic() + 60
            while not ticket.progress().over:
                assert time.monotonic() < end
                time.sleep(0.001)
            rows = store.gather_tokens(runs)
            mine = owned_by(ids, rank, world, by)
            assert np.array_equal(rows[mine], table[ids[mine]])
            if len({*store.owned.lookup_groups}) == 1:
                assert store.stats()["reads"] == 0
                assert ticket.progress().wanted_rows == len(tokens) * sum(store.owned.lookup_groups)
            total += rows
    assert np.array_equal(total, whole(table, ids))


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (0,)])
def test_single_rows_have_no_head(
    table: NDArray[np.uint8], tmp_path: Path, shape: tuple[int, ...]
) -> None:
    ids = np.asarray(np.random.default_rng().integers(0, ROWS, shape))
    total = np.zeros((*shape, WIDTH), np.uint64)
    for store in ranks(tmp_path, 3, "rows"):
        total += store.gather(ids)
        store.close()
    assert np.array_equal(total, whole(table, ids))
    with (
        RowStore.open(tmp_path, world=3) as store,
        pytest.raises(ValueError, match="last axis of 16 heads, got shape"),
    ):
        store.gather(ids)


@pytest.mark.parametrize("by", ["heads", "rows"])
@pytest.mark.parametrize("bad", [-2, ROWS])
def test_every_rank_refuses_an_id_outside_the_table(
    table: NDArray[np.uint8], tmp_path: Path, by: str, bad: int
) -> None:
    ids = np.zeros((4, HEADS), np.int64)
    ids[2, 5] = bad
    for store in ranks(tmp_path, 20, by):
        with store, pytest.raises(IndexError, match=rf"row id {bad} at position 37 is outside"):
            store.gather(ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 2, "world": 2}, r"rank needs to be in \[0, 2\), got 2"),
        ({"rank": -1, "world": 2}, r"rank needs to be in \[0, 2\), got -1"),
        ({"world": 0}, "world needs 1 or more, got 0"),
        ({"world": 2, "shard_by": "columns"}, "shard_by needs one of heads, rows, got 'columns'"),
    ],
)
def test_what_cannot_be(
    table: NDArray[np.uint8], tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RowStore.open(tmp_path, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("world", range(1, 20))
def test_every_head_and_every_row_has_one_owner(world: int) -> None:
    shards = [Shard(rank, world) for rank in range(world)]
    heads = [head for shard in shards for head in shard.heads(HEADS)]
    assert sorted(heads) == list(range(HEADS))
    assert all(owner(head, world) == s.rank for s in shards for head in s.heads(HEADS))
    counts = [len(shard.heads(HEADS)) for shard in shards]
    assert max(counts) - min(counts) <= 1
    rows = [row for shard in shards for row in shard.rows(37)]
    assert rows == list(range(37))


def test_every_rank_has_heads_of_both_orders() -> None:
    for world in (2, 4, 8):
        for rank in range(world):
            owned = OwnedRows(Shard(rank, world), ROWS, (8, 8))
            assert owned.lookup_groups == (8 // world, 8 // world)
    assert OwnedRows(Shard(1, 3), ROWS, (8, 8)).lookup_groups == (3, 2)
    assert OwnedRows(Shard(9, 16), ROWS, (8, 8)).lookup_groups == (1,)
    assert OwnedRows(Shard(16, 20), ROWS, (8, 8)).lookup_groups == ()
