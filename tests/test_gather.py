"""The contract of every way to open a table: the same bytes for any layout and request."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import raw_tables
from raw_tables import KINDS, RawTable, gather

JOIN_BYTES = 4096
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_random_rows(kind: str, raw: RawTable, rng: np.random.Generator) -> None:
    table = raw.open(kind)
    ids = rng.integers(0, raw.num_rows, (300, 16))
    assert np.array_equal(gather(table, ids, [8, 8]), raw.expected(ids))


@every_kind
def test_first_last_and_shard_boundaries(kind: str, raw: RawTable) -> None:
    table = raw.open(kind)
    ids = np.array([[0, 1, 699, 700, 1399, 1400, 2099, 2100, raw.num_rows - 2, raw.num_rows - 1]])
    assert np.array_equal(gather(table, ids, [1] * 10), raw.expected(ids))


@every_kind
@pytest.mark.parametrize("row_bytes", [1, 7, 90, 511, 512, 513, 4096, 4097, 17920])
@pytest.mark.parametrize("lead", [0, 1, 648, 4095])
def test_any_row_size_at_any_offset(
    kind: str, row_bytes: int, lead: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    raw = raw_tables.write(
        tmp_path, rng, row_bytes=(row_bytes,), shard_rows=(41, 41, 13), lead=lead, tail=lead
    )
    ids = rng.permutation(raw.num_rows)[:, None]
    assert np.array_equal(gather(raw.open(kind), ids), raw.expected(ids))


@every_kind
def test_planes_are_joined(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    raw = raw_tables.write(tmp_path, rng, row_bytes=(80, 10, 4), gap=3)
    ids = rng.integers(0, raw.num_rows, (200, 4))
    assert np.array_equal(gather(raw.open(kind), ids, [2, 2]), raw.expected(ids))


@every_kind
def test_no_row_reads_as_zeroes(kind: str, raw: RawTable, rng: np.random.Generator) -> None:
    ids = rng.integers(0, raw.num_rows, (50, 16))
    ids[rng.random(ids.shape) < 0.3] = -1
    ids[7] = ids[9] = -1
    table = raw.open(kind)
    assert np.array_equal(gather(table, ids, [8, 8]), raw.expected(ids))
    assert np.array_equal(gather(table, ids, [8, 8]), raw.expected(ids))


@every_kind
def test_duplicates(kind: str, raw: RawTable, rng: np.random.Generator) -> None:
    tokens = rng.integers(0, raw.num_rows, (20, 16))
    ids = tokens[rng.integers(0, 20, 500)]
    ids[:, 3] = ids[:, 4]  # the same row twice within a group
    table = raw.open(kind)
    assert np.array_equal(gather(table, ids, [8, 8]), raw.expected(ids))


@every_kind
def test_groups_that_agree_in_the_first_row_only(kind: str, tmp_path: Path) -> None:
    # a head of 97 rows: thousands of different n-grams share its rows
    rng = np.random.default_rng()
    raw = raw_tables.write(tmp_path, rng, shard_rows=(20_000,))
    ids = rng.integers(97, raw.num_rows, (10_000, 8))
    ids[:, 0] %= 97
    assert np.array_equal(gather(raw.open(kind), ids, [8]), raw.expected(ids))


@every_kind
def test_more_rows_than_one_piece(kind: str, raw: RawTable, rng: np.random.Generator) -> None:
    ids = rng.integers(0, raw.num_rows, (20_000, 15))
    assert np.array_equal(gather(raw.open(kind), ids, [7, 8]), raw.expected(ids))


@every_kind
def test_empty_gather(kind: str, raw: RawTable) -> None:
    assert gather(raw.open(kind), np.empty((0, 16), np.int64), [8, 8]).shape == (0, 16, 160)


@every_kind
@pytest.mark.parametrize("bad", [-2, 2411, 2**62, -(2**63)])
def test_ids_are_checked_before_any_read(kind: str, bad: int, raw: RawTable) -> None:
    table = raw.open(kind)
    ids = np.zeros((9, 4), np.int64)
    ids[8, 3] = bad
    out = np.full((9, 4, 160), 0xEE, np.uint8)
    with pytest.raises(IndexError, match=rf"row id {bad} at position 35 is outside \[0, 2411\)"):
        table.gather(ids, [4], out)
    assert (out == 0xEE).all()
    assert table.counters()["reads"] == 0


@every_kind
def test_arrays_are_never_converted(kind: str, raw: RawTable) -> None:
    # a converted output array is a temporary copy: the caller's would stay as it was
    table = raw.open(kind)
    ids = np.zeros((4, 2), np.int64)
    out = np.zeros((4, 2, 160), np.uint8)
    read_only = out.copy()
    read_only.flags.writeable = False
    for bad_out in (out.view(np.int8), out[:, ::-1], read_only, out.astype(np.int64)):
        with pytest.raises(TypeError):
            table.gather(ids, [2], bad_out)  # type: ignore[arg-type]
    for bad_ids in (ids.astype(np.int32), ids[::2], ids.astype(np.float64)):
        with pytest.raises(TypeError):
            table.gather(bad_ids, [2], out[: len(bad_ids)])  # type: ignore[arg-type]


@every_kind
def test_shapes_are_checked(kind: str, raw: RawTable) -> None:
    table = raw.open(kind)
    ids = np.zeros((4, 2), np.int64)
    for shape in ((3, 2, 160), (4, 1, 160), (4, 2, 159)):
        with pytest.raises(ValueError, match=r"out needs shape \[4, 2, 160\]"):
            table.gather(ids, [2], np.empty(shape, np.uint8))
    with pytest.raises(ValueError, match="groups add up to 3"):
        table.gather(ids, [2, 1], np.empty((4, 2, 160), np.uint8))
    with pytest.raises(ValueError, match="no heads"):
        table.gather(ids, [2, 0], np.empty((4, 2, 160), np.uint8))


@every_kind
def test_gather_rows_knows_the_groups(kind: str, raw: RawTable, rng: np.random.Generator) -> None:
    table = raw.open(kind, groups=[2, 3])
    for shape in ((), (0,), (7,), (5,), (4, 5), (5, 4), (2, 3, 5), (2, 0, 5)):
        ids = np.asarray(rng.integers(-1, raw.num_rows, shape))
        out = np.full((*shape, 160), 0xEE, np.uint8)
        assert table.gather_rows(ids, out)
        assert np.array_equal(out, raw.expected(ids))
    # a group is found again as a whole, a row that is no part of one by itself
    if kind in raw_tables.DISK_KINDS:
        before = table.counters()["duplicate_rows"]
        table.gather_rows(np.array([[1, 2, 3, 4, 5], [1, 2, 5, 4, 3]]), np.empty((2, 5, 160), "u1"))
        assert table.counters()["duplicate_rows"] - before == 2
        table.gather_rows(np.array([[1, 2, 3], [3, 2, 1]]), np.empty((2, 3, 160), "u1"))
        assert table.counters()["duplicate_rows"] - before == 5


@every_kind
def test_gather_rows_does_nothing_with_other_arrays(kind: str, raw: RawTable) -> None:
    table = raw.open(kind, groups=[2])
    ids = np.zeros((4, 2), np.int64)
    out = np.full((4, 2, 160), 0xEE, np.uint8)
    read_only = out.copy()
    read_only.flags.writeable = False
    for bad_ids in (ids.astype(np.int32), ids.astype("f8"), ids[:, ::-1], ids[:3], [[0, 0]] * 4, 0):
        assert not table.gather_rows(bad_ids, out)
    for bad_out in (out.view(np.int8), out[..., :9], out[:, ::-1], read_only, out[0], None):
        assert not table.gather_rows(ids, bad_out)
    assert not raw.open(kind).gather_rows(ids, out)
    assert (out == 0xEE).all()
    assert table.counters()["gathers"] == 0
    with pytest.raises(IndexError, match="row id -2 at position 7"):
        table.gather_rows(np.array([[0, 0]] * 3 + [[0, -2]]), out)
    with pytest.raises(ValueError, match="no heads"):
        raw.open(kind, groups=[2, 0])


@every_kind
def test_many_threads(kind: str, raw: RawTable) -> None:
    table = raw.open(kind)
    wrong = []

    def work(seed: int) -> None:
        mine = np.random.default_rng(seed)
        for _ in range(30):
            ids = mine.integers(0, raw.num_rows, (int(mine.integers(1, 60)), 16))
            if not np.array_equal(gather(table, ids, [8, 8]), raw.expected(ids)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert table.counters()["gathers"] == 240


@every_kind
def test_closed(kind: str, raw: RawTable) -> None:
    table = raw.open(kind)
    table.close()
    table.close()
    with pytest.raises(ValueError, match="closed"):
        gather(table, np.zeros((1, 1), np.int64))


@pytest.mark.parametrize("kind", raw_tables.DISK_KINDS)
def test_duplicate_groups_are_read_once(kind: str, raw: RawTable) -> None:
    table = raw.open(kind)
    ids = np.tile(np.arange(0, 160, 10)[None], (50, 1))
    gather(table, ids, [8, 8])
    counters = table.counters()
    assert counters["rows"] == 800
    assert counters["duplicate_rows"] == 784
    assert counters["reads"] <= 16


@pytest.mark.parametrize("kind", raw_tables.DISK_KINDS)
def test_a_large_gather_is_planned_as_a_whole(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    # rows of the same block at both ends of a gather: one read
    raw = raw_tables.write(tmp_path, rng, row_bytes=(40,), shard_rows=(150_000, 50_000))
    ids = np.concatenate([np.arange(0, raw.num_rows, 2), np.arange(1, raw.num_rows, 2)])[:, None]
    table = raw.open(kind)
    assert np.array_equal(gather(table, ids), raw.expected(ids))
    size = sum(Path(path).stat().st_size for path in raw.paths)
    assert table.counters()["read_bytes"] <= 1.02 * size
    # nothing of its plan is kept
    assert table.memory_bytes < 24 << 20


def slot_bytes(rows: int, row_bytes: int, block: int, depth: int) -> int:
    """The longest read: one row's, or several in an odd number of blocks of the bounce."""
    bounce = (1 << 20) if rows <= 1024 else (4 << 20)
    return max((row_bytes + block - 2) // block + 1, (bounce // depth // block - 1) | 1) * block


def spans_of(raw: RawTable, ids: set[int], block: int, limit: int) -> int:
    """How many reads a gather should take, by walking the blocks one by one."""
    wanted = []
    for row_bytes, extents in raw.planes:
        for file, offset, first, count in extents:
            for row in ids:
                if first <= row < first + count:
                    at = offset + (row - first) * row_bytes
                    wanted.append((file, at // block, (at + row_bytes - 1) // block))
    reads = 0
    file, start, end = -1, 0, -1
    for f, a, b in sorted(wanted):
        near = f == file and (a - end - 1) * block <= JOIN_BYTES
        if near and (max(b, end) - start + 1) * block <= limit:
            end = max(b, end)
        else:
            reads, file, start, end = reads + 1, f, a, b
    return reads


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_layout_any_request(data: st.DataObject, tmp_path: Path) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    per_shard = draw(st.integers(1, 60))
    raw = raw_tables.write(
        tmp_path,
        rng,
        row_bytes=draw(st.lists(st.integers(1, 700), min_size=1, max_size=3)),
        shard_rows=[*([per_shard] * draw(st.integers(0, 5))), draw(st.integers(1, per_shard))],
        shards_per_file=draw(st.integers(1, 3)),
        lead=draw(st.integers(0, 5000)),
        gap=draw(st.integers(0, 40)),
        tail=draw(st.integers(0, 600)),
    )
    groups = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    ids = rng.integers(-1, raw.num_rows, (draw(st.integers(0, 120)), sum(groups)))
    kind = draw(st.sampled_from(KINDS))
    options = {"queue_depth": draw(st.integers(1, 20))} if kind in raw_tables.DISK_KINDS else {}
    table = raw.open(kind, **options)
    assert np.array_equal(gather(table, ids, groups), raw.expected(ids))
    if kind.endswith("-direct") and len(raw.planes) == 1:
        block = table.files()[0].alignment
        limit = slot_bytes(ids.size, raw.row_bytes, block, options["queue_depth"])
        wanted = set(ids[ids >= 0].tolist())
        assert table.counters()["reads"] == spans_of(raw, wanted, block, limit)
