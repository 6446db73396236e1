"""Copies of rows in several files: the same bytes from any, reads on all, one for another.

Where it must be told which copy was read, the copies of a test hold different rows.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import raw_tables
from raw_tables import DISK_KINDS, RawTable, gather
from rowstream import ReadError, _core
from rowstream._core import Fault

Ids = NDArray[np.int64]
every_disk_kind = pytest.mark.parametrize("kind", DISK_KINDS)
SHARDS = (3000, 3000, 1234)


class Copies:
    """A table of raw bytes, and others of as many rows in other files as copies of it."""

    def __init__(self, first: RawTable, *others: RawTable, shared: int | None = None) -> None:
        self.parts = (first, *others)
        self.paths = [path for raw in self.parts for path in raw.paths]
        self.planes = []
        for number, (width, extents) in enumerate(first.planes):
            merged = list(extents)
            base = len(first.paths)
            for raw in others:
                copies = raw.planes[number][1][:shared]
                merged += [(base + file, *rest) for file, *rest in copies]  # type: ignore[misc]
                base += len(raw.paths)
            self.planes.append((width, sorted(merged, key=lambda extent: extent[2])))

    def open(self, kind: str, **options: Any) -> _core.DiskTable:
        reader, access = kind.split("-")
        return _core.DiskTable(
            self.paths, self.planes, reader=reader, direct=access == "direct", **options
        )

    def sources(self, ids: Ids, rows: NDArray[np.uint8]) -> NDArray[np.intp]:
        """Which of the copies each of the rows came from; every one must be of some copy."""
        equal = np.stack([(raw.expected(ids) == rows).all(axis=-1) for raw in self.parts])
        assert equal.any(axis=0).all()
        return np.asarray(equal.argmax(axis=0))


def raw_copy(folder: Path, seed: int, **layout: Any) -> RawTable:
    """A table of rows of its own for each seed."""
    folder.mkdir()
    return raw_tables.write(folder, np.random.default_rng(seed), shard_rows=SHARDS, **layout)


def same_rows(folder: Path, of: RawTable, lead: int, shards_per_file: int, gap: int) -> RawTable:
    """The rows of a table again, in another layout."""
    raw = raw_copy(
        folder,
        1,
        row_bytes=[width for width, _ in of.planes],
        lead=lead,
        shards_per_file=shards_per_file,
        gap=gap,
    )
    for number, (width, extents) in enumerate(raw.planes):
        for file, offset, first, count in extents:
            with Path(raw.paths[file]).open("r+b") as handle:
                handle.seek(offset)
                assert (
                    handle.write(of.rows[number][first : first + count].tobytes()) == count * width
                )
    return replace(raw, rows=of.rows)


def dense(raw: RawTable, rng: np.random.Generator) -> Ids:
    """Ids of which many share blocks or are joined, over the ends of shards too."""
    runs = [np.arange(start - 30, start + 30) for start in (3000, 6000)]
    spread = [np.arange(0, 1500, 7), rng.integers(0, raw.num_rows, 600)]
    ids = np.concatenate([*runs, *spread, [0, raw.num_rows - 1, -1]])
    return rng.permutation(ids)[:, None]


@pytest.mark.parametrize("kind", ["uring-direct", "pool-direct", "pool-buffered"])
@pytest.mark.parametrize(
    ("lead", "shards_per_file", "gap"),
    [(2239, 2, 0), (7, 2, 0), (513, 1, 1), (8191, 3, 4097)],
)
@pytest.mark.parametrize("row_bytes", [(160,), (160, 20), (5000,)])
def test_same_bytes_wherever_the_copy_lies(
    kind: str,
    lead: int,
    shards_per_file: int,
    gap: int,
    row_bytes: tuple[int, ...],
    tmp_path: Path,
) -> None:
    first = raw_copy(tmp_path / "a", 1, row_bytes=row_bytes)
    other = same_rows(tmp_path / "b", first, lead, shards_per_file, gap)
    ids = dense(first, np.random.default_rng())
    for copies in (Copies(first, other), Copies(other, first), Copies(first, other, shared=2)):
        for options in ({}, {"queue_depth": 1}, {"block": 4096, "queue_depth": 512}):
            table = copies.open(kind, **options)
            assert np.array_equal(gather(table, ids), first.expected(ids))


@every_disk_kind
def test_every_copy_is_read(kind: str, tmp_path: Path) -> None:
    copies = Copies(*(raw_copy(tmp_path / name, seed) for seed, name in enumerate("abc")))
    table = copies.open(kind)
    ids = np.random.default_rng().permutation(np.arange(0, 7000, 100))[:, None]
    share = np.bincount(copies.sources(ids, gather(table, ids)).ravel(), minlength=3)
    assert share.min() >= len(ids) // 6
    # one read at a time: in turn
    seen = [int(copies.sources(ids[:1], gather(table, ids[:1]))[0, 0]) for _ in range(9)]
    assert sorted(seen) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


SPREAD = np.arange(0, 7000, 100)[:, None]  # no two are joined


def shares_beside_slow_reads(kind: str, copies: Copies) -> list[int]:
    """How many of SPREAD come from each copy: sixteen from both in turn, of which the first's
    take long.
    """
    found: list[int] = []
    for delay_ms in (400, 4000, 40_000):  # longer than all others on a busy disk together
        slow = [Fault(number, 1, delay_ms=delay_ms) for number in range(0, 16, 2)]
        table = copies.open(kind, queue_depth=16, faults=slow)
        found = np.bincount(copies.sources(SPREAD, gather(table, SPREAD)).ravel()).tolist()
        assert table.counters()["reads"] == SPREAD.size
        if found[0] == 8:
            break
    return found


@every_disk_kind
def test_reads_go_where_fewer_are_in_flight(kind: str, tmp_path: Path) -> None:
    # in one file each: on one device, each file counts
    parts = (raw_copy(tmp_path / name, seed, shards_per_file=3) for seed, name in enumerate("ab"))
    assert shares_beside_slow_reads(kind, Copies(*parts)) == [8, SPREAD.size - 8]


@pytest.fixture
def other_drive(tmp_path: Path) -> Iterator[Path]:
    """A folder on another device than tmp_path, whose files have no blocks."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    folder = Path(tempfile.mkdtemp(prefix="rowstream-", dir=shm))
    yield folder
    shutil.rmtree(folder)


@every_disk_kind
def test_two_drives(kind: str, tmp_path: Path, other_drive: Path) -> None:
    # the files of a drive count together
    copies = Copies(raw_copy(tmp_path / "a", 1), raw_copy(other_drive / "b", 2))
    assert shares_beside_slow_reads(kind, copies) == [8, SPREAD.size - 8]
    # one drive has blocks, the other has none
    first = raw_copy(tmp_path / "c", 1)
    other = same_rows(other_drive / "d", first, 77, 1, 0)
    ids = dense(first, np.random.default_rng())
    for both in (Copies(first, other), Copies(other, first)):
        table = both.open(kind)
        assert np.array_equal(gather(table, ids), first.expected(ids))


@every_disk_kind
def test_reads_that_never_end_count_on_for_their_copy(kind: str, tmp_path: Path) -> None:
    copies = Copies(raw_copy(tmp_path / "a", 1), raw_copy(tmp_path / "b", 2))
    silent = [Fault(number, 1, delay_ms=-1) for number in range(0, 16, 2)]
    table = copies.open(kind, queue_depth=16, faults=silent, read_timeout_s=1.2)
    with pytest.raises(ReadError, match="no answer"):
        gather(table, SPREAD)
    # the eight of the first copy are in flight for ever: of seven more none goes there
    few = SPREAD[:7]
    assert (copies.sources(few, gather(table, few)) == 1).all()


@every_disk_kind
@pytest.mark.parametrize("number", [0, 1])
def test_a_bad_copy_is_no_error(kind: str, number: int, tmp_path: Path) -> None:
    # of different rows, and where both could be hit by a byte's offset in whatever file
    places = (raw_copy(tmp_path / "a", 1), raw_copy(tmp_path / "b", 2, lead=4_000_000))
    copies = Copies(*places)
    offset = places[number].planes[0][1][0][1]
    bad = [
        Fault(at=offset + row * 160 + 80, result=-code)
        for row, code in ((0, errno.EIO), (1000, errno.ENXIO), (1400, errno.ENODATA))
    ]
    bad.append(Fault(at=offset + 1200 * 160 + 80, result=0))
    lost = np.array([0, 1000, 1200, 1400])
    table = copies.open(kind, faults=bad)
    for ids in (lost[:, None], np.arange(0, 1500, 20)[:, None]):  # alone, and joined to others
        for _ in range(4):
            sources = copies.sources(ids, gather(table, ids))
            assert (sources[np.isin(ids, lost)] == 1 - number).all()
    counters = table.counters()
    assert counters["read_errors"] == counters["zeroed_rows"] == 0
    assert counters["retries"] > 0


@every_disk_kind
def test_a_drive_that_fails_at_once_is_not_asked_for_every_row(kind: str, tmp_path: Path) -> None:
    # all of the first copy is bad: its reads end before those of the other one
    first = raw_copy(tmp_path / "a", 1, shards_per_file=3)
    other = raw_copy(tmp_path / "b", 2, shards_per_file=3, lead=4_000_000)
    offset = first.planes[0][1][0][1]
    bad = [Fault(at=at, result=-errno.ENXIO) for at in range(offset + 80, offset + 7234 * 160, 160)]
    table = Copies(first, other).open(kind, faults=bad, queue_depth=4)
    ids = np.random.default_rng().permutation(first.num_rows)[:, None]
    for part in np.array_split(ids, 40):
        assert np.array_equal(gather(table, part), other.expected(part))
    counters = table.counters()
    assert counters["reads"] > 2000
    # once in a while it is asked again, by as many reads as there are until the first one fails
    assert 0 < counters["retries"] < counters["reads"] / 4


@every_disk_kind
def test_bad_everywhere_is_an_error(kind: str, tmp_path: Path) -> None:
    first = raw_copy(tmp_path / "a", 1)
    other = same_rows(tmp_path / "b", first, 2239, 2, 0)
    bad = Fault(at=first.planes[0][1][0][1] + 1000 * 160 + 80, result=-errno.EIO)
    table = Copies(first, other).open(kind, faults=[bad])
    with pytest.raises(ReadError) as caught:
        gather(table, np.array([[5, 1000]]))
    assert caught.value.errno == errno.EIO
    assert caught.value.filename in (first.paths[0], other.paths[0])
    # three tries on each
    assert table.counters()["retries"] == 5
    table = Copies(first, other).open(kind, faults=[bad], zero_rows=True)
    ids = np.array([[5, 1000], [3000, 6900]])
    want = first.expected(ids)
    want[ids == 1000] = 0
    assert np.array_equal(gather(table, ids), want)
    assert table.counters()["zeroed_rows"] == 1


@every_disk_kind
def test_short_reads_of_a_copy_go_on(kind: str, tmp_path: Path) -> None:
    first = raw_copy(tmp_path / "a", 1)
    other = same_rows(tmp_path / "b", first, 77, 3, 5)
    ids = dense(first, np.random.default_rng())
    for got in (1, 511, 700):
        faults = [Fault(number, 1, result=got) for number in range(0, 3000, 2)]
        table = Copies(first, other).open(kind, faults=faults)
        assert np.array_equal(gather(table, ids), first.expected(ids))


def test_cache_and_look_ahead(tmp_path: Path) -> None:
    first = raw_copy(tmp_path / "a", 1)
    other = same_rows(tmp_path / "b", first, 7, 1, 0)
    options = {"group_width": 8, "cache_bytes": 1 << 20, "lookahead_bytes": 1 << 20}
    bad = Fault(at=first.planes[0][1][0][1] + 1000 * 160 + 80, result=-errno.EIO)
    table = Copies(first, other).open("uring-direct", faults=[bad], **options)
    rng = np.random.default_rng()
    for _ in range(20):
        ids = rng.integers(0, first.num_rows, (20, 16))
        ids[0] = np.arange(992, 1008)  # neighbors, whose copies share other blocks
        number = table.prefetch(ids.reshape(-1))
        while not table.ticket(number)[2]:
            time.sleep(0)
        for _ in range(2):
            assert np.array_equal(gather(table, ids, [8, 8]), first.expected(ids))
    counters = table.counters()
    assert counters["ahead_rows"] > 0
    assert counters["cached_rows"] > 0
    assert counters["read_errors"] == 0
    assert table.kept()["lookahead_reads"] > 0


def test_a_copy_that_changes_while_it_is_open(tmp_path: Path) -> None:
    first = raw_copy(tmp_path / "a", 1)
    other = same_rows(tmp_path / "b", first, 7, 1, 0)
    table = Copies(first, other).open("pool-buffered")
    with Path(other.paths[2]).open("r+b") as file:
        file.truncate(5)
    with pytest.raises(ReadError, match="changed since it was opened") as caught:
        gather(table, np.array([[0]]))
    assert caught.value.filename == other.paths[2]


def test_copies_are_checked_in_the_core(tmp_path: Path) -> None:
    raw = raw_copy(tmp_path / "a", 1)
    ((width, extents),) = raw.planes
    file, offset, first, count = extents[-1]
    size = os.path.getsize(raw.paths[file])
    for wrong, match in (
        ((file, offset, first, count - 1), "needs to go on at row 7234"),
        ((file, size, first, count), "rows need"),
        ((9, offset, first, count), "extent names file 9"),
    ):
        with pytest.raises(ValueError, match=match):
            _core.DiskTable(raw.paths, [(width, [*extents, wrong])])
