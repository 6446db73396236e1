"""Rows close to each other are read at once: how many reads that takes, and what a fault in one of
them costs, which is no row but its own.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

import raw_tables
from looks import between_looks
from raw_tables import DISK_KINDS, RawTable, gather
from rowstream import ReadError
from rowstream._core import Fault

every_disk_kind = pytest.mark.parametrize("kind", DISK_KINDS)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def written(folder: Path) -> RawTable:
    return raw_tables.write(folder, np.random.default_rng(), shard_rows=(3000, 3000, 1234))


@pytest.fixture
def raw(tmp_path: Path) -> RawTable:
    return written(tmp_path)


@every_disk_kind
def test_near_rows_are_read_at_once(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    # every 20th row of 160 bytes: more than a page apart is 4096 bytes and a row
    raw = raw_tables.write(tmp_path, rng, shard_rows=(40_000, 40_000, 3), shards_per_file=2)
    for step, joined in ((20, True), (60, False)):
        table = raw.open(kind)
        ids = rng.permutation(np.arange(0, raw.num_rows, step))[:, None]
        assert np.array_equal(gather(table, ids), raw.expected(ids))
        reads = table.counters()["reads"]
        assert reads < len(ids) / 5 if joined else reads == len(ids)


def near_rows(raw: RawTable) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Rows of a file, some 3 KiB from each other: read many at a time."""
    return np.arange(0, 1500, 20)[:, None]


def bad_row(raw: RawTable, row: int) -> Fault:
    """A byte of a row of the first shard that can never be read."""
    return Fault(at=raw.planes[0][1][0][1] + row * 160 + 80, result=-errno.EIO)


@every_disk_kind
@pytest.mark.parametrize("code", [errno.EIO, errno.ENODATA])
def test_a_bad_sector_that_no_row_needs(kind: str, code: int, raw: RawTable) -> None:
    # one of them lies between two rows that are read at once: three rows are
    offset = raw.planes[0][1][0][1]
    faults = [Fault(at=offset + row * 160 + 80, result=-code) for row in (390, 410)]
    table = raw.open(kind, faults=faults)
    ids = near_rows(raw)
    assert np.array_equal(gather(table, ids), raw.expected(ids))
    counters = table.counters()
    assert counters["retries"] > 0
    assert counters["read_errors"] == 0


@every_disk_kind
def test_a_bad_sector_costs_no_other_row(kind: str, raw: RawTable) -> None:
    ids = near_rows(raw)
    table = raw.open(kind, faults=[bad_row(raw, 400)])
    with pytest.raises(ReadError) as caught:
        gather(table, ids)
    assert caught.value.errno == errno.EIO
    assert caught.value.needed is not None
    assert caught.value.needed < 1024
    table = raw.open(kind, faults=[bad_row(raw, 400)], zero_rows=True)
    want = raw.expected(ids)
    want[400 // 20] = 0
    assert np.array_equal(gather(table, ids), want)
    counters = table.counters()
    assert (counters["read_errors"], counters["zeroed_rows"]) == (1, 1)


@every_disk_kind
@between_looks
def test_a_file_that_ends_between_rows_read_at_once(kind: str, tmp_path: Path) -> None:
    raw = written(tmp_path)
    # the rows before the end are there all the same
    ids = np.arange(raw.num_rows - 1200, raw.num_rows, 20)[:, None]
    table = raw.open(kind, zero_rows=True)
    want = raw.expected(ids)
    assert np.array_equal(gather(table, ids), want)
    file, offset, first, _ = raw.planes[0][1][-1]
    lost = 41
    os.truncate(raw.paths[file], offset + (int(ids[-lost, 0]) - first) * 160 + 159)
    want[-lost:] = 0
    assert np.array_equal(gather(table, ids), want)
    assert table.counters()["zeroed_rows"] == lost


@every_disk_kind
def test_what_a_read_is_taken_apart_into_waits_for_its_turn(kind: str, raw: RawTable) -> None:
    for count in (1, 2, 3):
        faults = [Fault(0, count, result=-errno.EIO)]
        table = raw.open(kind, faults=faults, queue_depth=1)
        ids = near_rows(raw)
        assert np.array_equal(gather(table, ids), raw.expected(ids))
        assert np.array_equal(gather(table, ids), raw.expected(ids))
