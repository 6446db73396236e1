"""Files that change, shrink or are replaced before, while and after a table is opened."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import raw_tables
from looks import PAUSE_S, between_looks
from raw_tables import KINDS, RawTable, gather
from rowstream import ReadError, _core
from small_tables import every_disk_kind, ids_of, written


@pytest.fixture
def raw(tmp_path: Path) -> RawTable:
    return written(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_changes_after_it_was_opened(kind: str, raw: RawTable) -> None:
    os.utime(raw.paths[0], ns=(1, 1))  # the clock of files may not tick between two writes
    table = raw.open(kind)
    ids = np.array([[0, 1]])
    want = raw.expected(ids)
    assert np.array_equal(gather(table, ids), want)
    with open(raw.paths[0], "r+b") as file:
        file.seek(3000)
        file.write(b"something else")
    time.sleep(PAUSE_S)
    if kind == "loaded":
        assert np.array_equal(gather(table, ids), want)
        return
    for _ in range(2):
        with pytest.raises(ReadError, match="file changed since it was opened") as caught:
            gather(table, ids)
        assert caught.value.errno == errno.ESTALE
        assert caught.value.filename == raw.paths[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_another_one_takes_the_name_of(kind: str, raw: RawTable) -> None:
    # as a download puts a new version in place: the open one stays what it was
    table = raw.open(kind)
    ids = ids_of(raw)
    want = raw.expected(ids)
    other = Path(raw.paths[0]).with_name("other")
    other.write_bytes(b"something else")
    other.replace(raw.paths[0])
    assert np.array_equal(gather(table, ids), want)
    time.sleep(PAUSE_S)
    assert np.array_equal(gather(table, ids), want)


@every_disk_kind
@between_looks
def test_a_truncated_file_is_an_error(kind: str, tmp_path: Path) -> None:
    raw = written(tmp_path)
    table = raw.open(kind)
    last = np.array([[raw.num_rows - 1]])
    gather(table, last)
    size = os.path.getsize(raw.paths[-1])
    os.truncate(raw.paths[-1], size - 3)
    with pytest.raises(ReadError, match="file ends early") as caught:
        gather(table, last)
    assert caught.value.filename == raw.paths[-1]
    assert caught.value.needed is not None
    assert caught.value.got == caught.value.needed - 3
    first = np.array([[0]])
    assert np.array_equal(gather(table, first), raw.expected(first))


def test_a_file_that_is_cut_while_it_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "table.bin"
    rows = (192 << 20) // 160
    planes = [(160, [(0, 0, 0, rows)])]

    def cut_after(delay_s: float) -> None:
        time.sleep(delay_s)
        os.truncate(path, 4096 + 7)

    for attempt in range(60):
        with path.open("wb") as file:
            file.truncate(rows * 160)
        # the load holds no lock of the interpreter's
        cutting = threading.Thread(target=cut_after, args=(0.0005 * (attempt + 1),))
        cutting.start()
        found: Exception | None = None
        try:
            _core.ResidentTable([str(path)], planes, mapped=False)
        except (ReadError, ValueError) as error:
            found = error
        cutting.join()
        # else it was cut before it was opened, or behind the last read
        if isinstance(found, ReadError) and found.errno != errno.ESTALE:
            assert found.errno == errno.EIO
            assert found.filename == str(path)
            assert "file ends early" in str(found)
            return
    pytest.fail("no cut came in the middle of a load")


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
