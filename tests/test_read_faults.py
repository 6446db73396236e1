"""What a failing read does: retried where that can help, one error where it cannot, right bytes ever after."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import raw_tables
from raw_tables import DISK_KINDS, RawTable, gather

from rowstream import ReadError, UnavailableError, _core

every_disk_kind = pytest.mark.parametrize("kind", DISK_KINDS)


@pytest.fixture
def raw(tmp_path: Path) -> RawTable:
    return raw_tables.write(tmp_path, np.random.default_rng(), shard_rows=(3000, 3000, 1234))


def ids_of(raw: RawTable, tokens: int = 200) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.random.default_rng().integers(0, raw.num_rows, (tokens, 16))


@every_disk_kind
@pytest.mark.parametrize("result", [-errno.EINTR, -errno.EAGAIN])
def test_not_now_is_retried(kind: str, result: int, raw: RawTable) -> None:
    table = raw.open(kind, faults=[(0, 40, result)])
    ids = ids_of(raw)
    assert np.array_equal(gather(table, ids), raw.expected(ids))
    assert table.counters()["retries"] >= 40


@every_disk_kind
def test_not_now_for_ever_is_an_error(kind: str, raw: RawTable) -> None:
    table = raw.open(kind, faults=[(0, 10**9, -errno.EAGAIN)])
    with pytest.raises(ReadError) as caught:
        gather(table, np.zeros((1, 1), np.int64))
    assert caught.value.errno == errno.EAGAIN


@every_disk_kind
@pytest.mark.parametrize("got", [1, 100, 159, 511, 512, 700])
def test_short_reads_go_on(kind: str, got: int, raw: RawTable) -> None:
    # every other read comes short once; with O_DIRECT the rest starts on a block again
    table = raw.open(kind, faults=[(n, 1, got) for n in range(0, 400, 2)])
    ids = ids_of(raw)
    assert np.array_equal(gather(table, ids), raw.expected(ids))


@every_disk_kind
def test_end_of_file_is_an_error(kind: str, raw: RawTable) -> None:
    table = raw.open(kind, faults=[(5, 1, 0)])
    with pytest.raises(ReadError, match="file ends early") as caught:
        gather(table, ids_of(raw))
    assert caught.value.got == 0
    assert (caught.value.needed or 0) >= 160
    ids = ids_of(raw)
    assert np.array_equal(gather(table, ids), raw.expected(ids))


@every_disk_kind
@pytest.mark.parametrize("result", [-errno.EIO, -errno.ENXIO])
def test_every_read_of_a_gather_fails_once(kind: str, result: int, raw: RawTable) -> None:
    ids = ids_of(raw, tokens=3)
    count = len(np.unique(ids))
    for number in range(0, count, 5):
        table = raw.open(kind, faults=[(number, 1, result)], queue_depth=7)
        with pytest.raises(ReadError) as caught:
            gather(table, ids)
        assert caught.value.errno == -result
        assert caught.value.filename in raw.paths
        # the slots are free again and hold nothing of the failed gather
        assert np.array_equal(gather(table, ids), raw.expected(ids))


@pytest.mark.parametrize("reader", ["uring", "pool"])
@pytest.mark.parametrize("result", [-errno.EINVAL, -errno.EOPNOTSUPP])
def test_a_refused_direct_read_turns_the_file_buffered(
    reader: str, result: int, raw: RawTable
) -> None:
    # the reads in flight beside the first refused one are refused as well
    table = raw.open(f"{reader}-direct", faults=[(3, 50, result)])
    assert isinstance(table, _core.DiskTable)
    ids = ids_of(raw)
    assert np.array_equal(gather(table, ids), raw.expected(ids))
    refused = [file for file in table.files() if not file["direct"]]
    assert refused
    assert all("a direct read was refused" in file["note"] for file in refused)
    assert np.array_equal(gather(table, ids), raw.expected(ids))


@pytest.mark.parametrize("kind", ["uring-buffered", "pool-buffered"])
def test_a_refused_buffered_read_is_an_error(kind: str, raw: RawTable) -> None:
    table = raw.open(kind, faults=[(3, 1, -errno.EINVAL)])
    with pytest.raises(ReadError) as caught:
        gather(table, ids_of(raw))
    assert caught.value.errno == errno.EINVAL


@every_disk_kind
def test_a_truncated_file_is_an_error(kind: str, raw: RawTable) -> None:
    table = raw.open(kind)
    last = np.array([[raw.num_rows - 1]])
    size = os.path.getsize(raw.paths[-1])
    os.truncate(raw.paths[-1], size - 3)
    with pytest.raises(ReadError, match="file ends early") as caught:
        gather(table, last)
    assert caught.value.filename == raw.paths[-1]
    assert caught.value.needed is not None
    assert caught.value.got == caught.value.needed - 3
    first = np.array([[0]])
    assert np.array_equal(gather(table, first), raw.expected(first))


def test_files_are_checked_at_open(raw: RawTable, tmp_path: Path) -> None:
    os.truncate(raw.paths[-1], os.path.getsize(raw.paths[-1]) - 1)
    for kind in raw_tables.KINDS:
        with pytest.raises(ValueError, match=r"table-1.bin: rows need \d+ bytes, file has \d+"):
            raw.open(kind)
    os.unlink(raw.paths[-1])
    for kind in raw_tables.KINDS:
        with pytest.raises(ReadError) as caught:
            raw.open(kind)
        assert caught.value.errno == errno.ENOENT
        assert isinstance(caught.value, OSError)


@every_disk_kind
def test_a_signal_ends_a_gather_between_rounds(kind: str, raw: RawTable) -> None:
    class Stop(Exception):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stop

    table = raw.open(kind)
    ids = np.random.default_rng().integers(0, raw.num_rows, (3_000_000, 1))
    out = np.empty((3_000_000, 1, 160), np.uint8)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        began = time.monotonic()
        with pytest.raises(Stop):
            table.gather(ids, [1], out)
        assert time.monotonic() - began < 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    few = ids[:1000]
    assert np.array_equal(gather(table, few), raw.expected(few))


@pytest.mark.parametrize("kind", raw_tables.KINDS)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told(kind: str, raw: RawTable) -> None:
    table = raw.open(kind)
    ids = ids_of(raw)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            gather(table, ids)
        except UnavailableError as error:
            status = 0 if "opened before fork" in str(error) else 2
        except BaseException:
            status = 3
        else:
            status = 4
        table.close()
        del table
        mine = raw.open(kind)  # a table of its own works
        if status == 0 and not np.array_equal(gather(mine, ids), raw.expected(ids)):
            status = 5
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(gather(table, ids), raw.expected(ids))


def test_an_explicit_reader_is_one_of_those_there_are(raw: RawTable) -> None:
    with pytest.raises(ValueError, match="reader is one of auto, uring, pool; got aio"):
        _core.DiskTable(raw.paths, raw.planes, reader="aio")
    for depth in (0, 5000):
        with pytest.raises(ValueError, match="queue_depth"):
            _core.DiskTable(raw.paths, raw.planes, queue_depth=depth)
