"""What a failing read does: retried where that can help, one error where it cannot, right bytes
ever after.
"""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import raw_tables
from raw_tables import RawTable, gather
from rowstream import ReadError, UnavailableError, _core
from rowstream._core import Fault
from small_tables import every_disk_kind, ids_of, written


@pytest.fixture
def raw(tmp_path: Path) -> RawTable:
    return written(tmp_path)


@every_disk_kind
@pytest.mark.parametrize("result", [-errno.EINTR, -errno.EAGAIN])
def test_not_now_is_retried(kind: str, result: int, raw: RawTable) -> None:
    table = raw.open(kind, faults=[Fault(0, 40, result=result)])
    ids = ids_of(raw)
    assert np.array_equal(gather(table, ids), raw.expected(ids))
    assert table.counters()["retries"] >= 40


@every_disk_kind
def test_not_now_for_ever_is_an_error(kind: str, raw: RawTable) -> None:
    fault = Fault(0, 10**9, result=-errno.EAGAIN)
    table = raw.open(kind, faults=[fault], read_timeout_s=0.2)
    with pytest.raises(ReadError) as caught:
        gather(table, np.zeros((1, 1), np.int64))
    assert caught.value.errno == errno.EAGAIN


@every_disk_kind
@pytest.mark.parametrize("got", [1, 100, 159, 511, 512, 700])
def test_short_reads_go_on(kind: str, got: int, raw: RawTable) -> None:
    # every other read comes short once; with O_DIRECT the rest starts on a block again
    table = raw.open(kind, faults=[Fault(n, 1, result=got) for n in range(0, 400, 2)])
    ids = ids_of(raw)
    assert np.array_equal(gather(table, ids), raw.expected(ids))


@every_disk_kind
def test_end_of_file_is_an_error(kind: str, raw: RawTable) -> None:
    table = raw.open(kind, faults=[Fault(0, 1, result=0)])
    ids = ids_of(raw)
    with pytest.raises(ReadError, match="file ends early") as caught:
        gather(table, ids[:1, :1])
    assert caught.value.got == 0
    assert (caught.value.needed or 0) >= 160
    assert np.array_equal(gather(table, ids), raw.expected(ids))


@every_disk_kind
def test_every_read_of_a_gather_fails_once(kind: str, raw: RawTable) -> None:
    # an error that no retry can help
    ids = ids_of(raw, tokens=3)
    # how many rows are read at once depends on the depth
    dry = raw.open(kind, queue_depth=7)
    gather(dry, ids)
    for number in range(int(dry.counters()["reads"])):
        table = raw.open(kind, faults=[Fault(number, 1, result=-errno.ENXIO)], queue_depth=7)
        with pytest.raises(ReadError) as caught:
            gather(table, ids)
        assert caught.value.errno == errno.ENXIO
        assert caught.value.filename in raw.paths
        # the slots are free again and hold nothing of the failed gather
        assert np.array_equal(gather(table, ids), raw.expected(ids))


@every_disk_kind
@pytest.mark.parametrize("code", [errno.EIO, errno.ENODATA, errno.EILSEQ])
def test_a_medium_error_is_retried_twice(kind: str, code: int, raw: RawTable) -> None:
    # once the same way, once through the page cache
    first = np.array([[0]])
    for failures in (1, 2):
        table = raw.open(kind, faults=[Fault(0, failures, result=-code)])
        assert np.array_equal(gather(table, first), raw.expected(first))
        assert table.counters()["retries"] == failures
    table = raw.open(kind, faults=[Fault(0, 3, result=-code)])
    with pytest.raises(ReadError) as caught:
        gather(table, first)
    assert caught.value.errno == code
    assert table.counters()["read_errors"] == 1


def bad_sector(raw: RawTable, row: int) -> Fault:
    """A byte of a row that can never be read."""
    file, offset, first, _ = next(
        extent for extent in raw.planes[0][1] if extent[2] <= row < extent[2] + extent[3]
    )
    assert file == 0
    return Fault(at=offset + (row - first) * 160 + 80, result=-errno.EIO)


@every_disk_kind
def test_a_bad_sector_is_an_error_for_its_rows_alone(kind: str, raw: RawTable) -> None:
    table = raw.open(kind, faults=[bad_sector(raw, 1234)])
    for _ in range(2):
        with pytest.raises(ReadError) as caught:
            gather(table, np.array([[5, 1234, 6]]))
        assert caught.value.errno == errno.EIO
    elsewhere = np.array([[5, 6, 3000, 2999, 7000]])
    assert np.array_equal(gather(table, elsewhere), raw.expected(elsewhere))


@every_disk_kind
def test_zero_rows_where_they_were_asked_for(kind: str, raw: RawTable) -> None:
    table = raw.open(kind, faults=[bad_sector(raw, 1234)], zero_rows=True)
    ids = np.array([[5, 1234, 6], [1234, 2000, 2500]])
    want = raw.expected(ids)
    want[ids == 1234] = 0
    assert np.array_equal(gather(table, ids, [3]), want)
    counters = table.counters()
    assert (counters["read_errors"], counters["zeroed_rows"]) == (1, 2)


@every_disk_kind
def test_zero_rows_shared_by_a_span_and_by_copies(kind: str, raw: RawTable) -> None:
    # neighbors share the block that cannot be read; the copy of a lost group is lost as well
    table = raw.open(kind, faults=[bad_sector(raw, 1234)], zero_rows=True)
    ids = np.array([[1234, 9], [1234, 9], [77, 78]])
    want = raw.expected(ids)
    want[:2, 0] = 0
    assert np.array_equal(gather(table, ids, [2]), want)


@pytest.mark.parametrize("reader", ["uring", "pool", "inline"])
@pytest.mark.parametrize("result", [-errno.EINVAL, -errno.EOPNOTSUPP])
def test_a_refused_direct_read_turns_the_file_buffered(
    reader: str, result: int, raw: RawTable
) -> None:
    # the reads in flight beside the first refused one are refused as well
    table = raw.open(f"{reader}-direct", faults=[Fault(3, 20, result=result)])
    assert isinstance(table, _core.DiskTable)
    ids = ids_of(raw)
    assert np.array_equal(gather(table, ids), raw.expected(ids))
    refused = [file for file in table.files() if not file.direct]
    assert refused
    assert all("a direct read was refused" in file.note for file in refused)
    assert np.array_equal(gather(table, ids), raw.expected(ids))


@pytest.mark.parametrize("kind", ["uring-buffered", "pool-buffered", "inline-buffered"])
def test_a_refused_buffered_read_is_an_error(kind: str, raw: RawTable) -> None:
    table = raw.open(kind, faults=[Fault(3, 1, result=-errno.EINVAL)])
    with pytest.raises(ReadError) as caught:
        gather(table, ids_of(raw))
    assert caught.value.errno == errno.EINVAL


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

    def interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # and a busy machine may take longer to begin
        table.gather(ids, [1], out)

    try:
        with pytest.raises(Stop):
            interrupted()
        assert table.counters()["gathers"] == 0  # it did not come to its end
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
    with pytest.raises(ValueError, match="reader is one of auto, uring, pool, inline; got aio"):
        _core.DiskTable(raw.paths, raw.planes, reader="aio")
    for depth in (0, 5000):
        with pytest.raises(ValueError, match="queue_depth"):
            _core.DiskTable(raw.paths, raw.planes, queue_depth=depth)
    for timeout in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(ValueError, match="read_timeout_s"):
            _core.DiskTable(raw.paths, raw.planes, read_timeout_s=timeout)
