"""Reads that come late, out of order or never: one error in time, and right bytes ever after."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from raw_tables import RawTable, gather
from rowstream import ReadError, _core
from rowstream._core import Fault
from small_tables import every_disk_kind, ids_of, written


@pytest.fixture
def raw(tmp_path: Path) -> RawTable:
    return written(tmp_path)


@every_disk_kind
def test_reads_may_arrive_late_and_out_of_order(kind: str, raw: RawTable) -> None:
    faults = [Fault(n, 1, delay_ms=1 + n % 7) for n in range(0, 3000, 3)]
    table = raw.open(kind, faults=faults)
    ids = ids_of(raw)
    assert np.array_equal(gather(table, ids), raw.expected(ids))
    assert table.counters()["timeouts"] == 0


@every_disk_kind
def test_a_read_that_never_ends(kind: str, raw: RawTable) -> None:
    # the ring is left to the read that hangs; gathers go on with another one
    table = raw.open(kind, faults=[Fault(10, 1, delay_ms=-1)], read_timeout_s=1.2)
    ids = ids_of(raw)
    began = time.monotonic()
    with pytest.raises(ReadError, match=r"no answer for 1\.2 s") as caught:
        gather(table, ids)
    assert 1.2 <= time.monotonic() - began < 60
    assert caught.value.errno == errno.ETIMEDOUT
    assert caught.value.filename in raw.paths
    for _ in range(3):
        assert np.array_equal(gather(table, ids), raw.expected(ids))
    assert table.counters()["timeouts"] == 1
    began = time.monotonic()
    table.close()
    assert time.monotonic() - began < 60


@every_disk_kind
def test_a_device_that_never_answers(kind: str, raw: RawTable) -> None:
    table = raw.open(kind, faults=[Fault(0, 10**9, delay_ms=-1)], read_timeout_s=0.15)
    for _ in range(4):
        with pytest.raises(ReadError, match="no answer for"):
            gather(table, np.array([[0]]))
    before = table.counters()
    with pytest.raises(ReadError, match="4 earlier gathers still have reads waiting") as caught:
        gather(table, np.array([[0]]))
    assert caught.value.errno == errno.ETIMEDOUT
    # nothing was read, nothing was waited for
    assert table.counters() == before


def gather_at_last(
    table: _core.DiskTable | _core.ResidentTable, ids: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Gather, again where a busy disk needs longer than a time-out that is short for a test."""
    until = time.monotonic() + 60
    while True:
        try:
            return gather(table, ids)
        except ReadError as error:
            assert error.errno == errno.ETIMEDOUT  # noqa: PT017
            assert time.monotonic() < until


@every_disk_kind
def test_a_late_answer_does_not_reach_the_next_gather(kind: str, raw: RawTable) -> None:
    # given up at 0.2 s, it arrives at 0.6 s: into memory that nobody uses any more
    table = raw.open(kind, faults=[Fault(3, 5, delay_ms=600)], read_timeout_s=0.2)
    ids = ids_of(raw)
    with pytest.raises(ReadError, match="no answer"):
        gather(table, ids)
    until = time.monotonic() + 0.8
    while time.monotonic() < until:
        rows = gather_at_last(table, ids)
        assert np.array_equal(rows, raw.expected(ids))


@every_disk_kind
def test_zero_rows_for_reads_that_never_end(kind: str, raw: RawTable) -> None:
    table = raw.open(
        kind, faults=[Fault(2, 1, delay_ms=-1)], read_timeout_s=0.2, zero_rows=True, queue_depth=4
    )
    ids = np.arange(0, 6000, 60)[None]
    found = gather(table, ids)
    lost = (found == 0).all(axis=-1)
    # a busy disk may be silent for so long as well
    assert 1 <= lost.sum() <= 4 * table.counters()["timeouts"]
    want = raw.expected(ids)
    want[lost] = 0
    assert np.array_equal(found, want)
    assert table.counters()["zeroed_rows"] == lost.sum()
