"""Rows read in bulk: into the memory of a pinned table, and window by window."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import raw_tables
from rowstream import _core
from rowstream.errors import ReadError, UnavailableError

Fault = _core.Fault
READERS = ("uring", "pool", "inline")
MIB = 1 << 20


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> raw_tables.RawTable:
    """Some 7 MB in three files, of which no block starts with a row."""
    return raw_tables.write(
        tmp_path_factory.mktemp("load"),
        np.random.default_rng(1),
        shard_rows=(9_001, 9_001, 9_001, 9_001, 8_503),
        gap=77,
    )


def poisoned(rows: int, row_bytes: int) -> NDArray[np.uint8]:
    return np.full((rows, row_bytes), 0xEE, np.uint8)


def loaded(raw: raw_tables.RawTable, **options: Any) -> NDArray[np.uint8]:
    out = poisoned(raw.num_rows, raw.row_bytes)
    _core.Loader(raw.paths, raw.planes, **options).load(0, out)
    return out


def of_memory(address: int, num_bytes: int) -> NDArray[np.uint8]:
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


# --- bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_reader_brings_the_same_bytes(
    reader: str, direct: bool, threads: int, raw: raw_tables.RawTable
) -> None:
    found = loaded(raw, reader=reader, direct=direct, threads=threads)
    assert np.array_equal(found, raw.rows[0])


@pytest.mark.parametrize("lead", [0, 4096, 4096 + 8, 4096 + 1])
@pytest.mark.parametrize("in_place", [True, False])
def test_rows_that_start_anywhere(lead: int, in_place: bool, tmp_path: Path) -> None:
    # aligned with memory, off by what a header leaves, and by what nothing can be read in place
    raw = raw_tables.write(
        tmp_path, np.random.default_rng(2), shard_rows=(30_000,), lead=lead, tail=5
    )
    assert np.array_equal(loaded(raw, in_place=in_place), raw.rows[0])


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_window_of_any_table(data: st.DataObject, tmp_path_factory: Any) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9000), min_size=1, max_size=4))
    raw = raw_tables.write(
        tmp_path_factory.mktemp("any"),
        np.random.default_rng(3),
        row_bytes=(data.draw(st.sampled_from([1, 7, 160, 512, 640])),),
        # all but the last shard of a table are as long as the first
        shard_rows=[max(sizes)] * (len(sizes) - 1) + [sizes[-1]],
        lead=data.draw(st.integers(0, 5000)),
        gap=data.draw(st.integers(0, 700)),
    )
    first = data.draw(st.integers(0, raw.num_rows))
    count = data.draw(st.integers(0, raw.num_rows - first))
    shift = data.draw(st.integers(0, 513))
    room = np.full(shift + count * raw.row_bytes + 64, 0xEE, np.uint8)
    out = room[shift : shift + count * raw.row_bytes].reshape(count, raw.row_bytes)
    _core.Loader(raw.paths, raw.planes).load(first, out)
    assert np.array_equal(out, raw.rows[0][first : first + count])
    assert (room[:shift] == 0xEE).all()
    assert (room[shift + out.size :] == 0xEE).all()


def test_planes_are_loaded_one_by_one(tmp_path: Path) -> None:
    raw = raw_tables.write(tmp_path, np.random.default_rng(4), row_bytes=(160, 8))
    loader = _core.Loader(raw.paths, raw.planes)
    for plane, rows in enumerate(raw.rows):
        out = poisoned(*rows.shape)
        loader.load(0, out, plane=plane)
        assert np.array_equal(out, rows)
    table = opened(raw)
    ids = np.arange(raw.num_rows)[:, None]
    assert np.array_equal(raw_tables.gather(table, ids), raw.expected(ids))
    with pytest.raises(ValueError, match="several planes"):
        _ = table.address


def test_what_cannot_be_loaded(raw: raw_tables.RawTable) -> None:
    loader = _core.Loader(raw.paths, raw.planes)
    with pytest.raises(IndexError, match=r"rows \[44000, 44508\) of a table of 44507"):
        loader.load(44_000, poisoned(508, 160))
    with pytest.raises(IndexError):
        loader.load(-1, poisoned(1, 160))
    with pytest.raises(ValueError, match="rows of 160 bytes, got 161"):
        loader.load(0, poisoned(1, 161))
    with pytest.raises(ValueError, match="reader is one of"):
        loaded(raw, reader="none")


def opened(raw: raw_tables.RawTable) -> _core.ResidentTable:
    return _core.ResidentTable(raw.paths, raw.planes, mapped=False)


# --- the memory of a table --------------------------------------------------------------------


def test_the_memory_of_a_table_is_its_rows_and_outlives_it(raw: raw_tables.RawTable) -> None:
    table = opened(raw)
    memory = table.memory()
    assert memory.address == table.address
    assert memory.address % (2 * MIB) == 0
    assert memory.bytes - raw.rows[0].size in range(4096)
    table.close()
    found = of_memory(memory.address, raw.rows[0].size).reshape(raw.rows[0].shape)
    assert np.array_equal(found, raw.rows[0])
    with pytest.raises(ValueError, match="closed"):
        _ = table.address


def test_a_mapped_table_has_no_memory_of_its_own(raw: raw_tables.RawTable) -> None:
    with pytest.raises(ValueError, match="mapped table"):
        _core.ResidentTable(raw.paths, raw.planes, mapped=True).memory()


def test_a_table_is_in_large_pages(raw: raw_tables.RawTable) -> None:
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not modes.exists() or "[never]" in modes.read_text():
        pytest.skip("the kernel gives no large pages")
    table = opened(raw)
    lines = Path("/proc/self/smaps").read_text().splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith(f"{table.address:x}-")]
    flags = next(line for line in lines[at:] if line.startswith("VmFlags"))
    assert "hg" in flags.split()
    assert "dc" in flags.split()  # not copied into children


# --- progress and signals ---------------------------------------------------------------------


def test_progress_grows_up_to_all_bytes(raw: raw_tables.RawTable) -> None:
    told: list[tuple[int, int]] = []
    slow = [Fault(0, 8, delay_ms=1000)]
    loader = _core.Loader(raw.paths, raw.planes, faults=slow)
    out = poisoned(raw.num_rows, 160)
    began = time.monotonic()
    loader.load(0, out, progress=lambda done, total: told.append((done, total)))
    took_s = time.monotonic() - began
    total = raw.rows[0].size
    assert [all_bytes for _, all_bytes in told] == [total] * len(told)
    done = [bytes_done for bytes_done, _ in told]
    assert done == sorted(done)
    assert done[-1] == total
    # every 100 ms, and once at the end
    assert 2 <= len(told) <= took_s / 0.1 + 1


def test_progress_that_raises_ends_the_load(raw: raw_tables.RawTable) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyError("enough")

    out = poisoned(raw.num_rows, 160)
    for _ in range(20):
        loader = _core.Loader(raw.paths, raw.planes, faults=[Fault(0, 4, delay_ms=300)])
        with pytest.raises(KeyError, match="enough"):
            loader.load(0, out, progress=stop)
        # a busy disk may need longer for what is in flight than a load waits for it
        with contextlib.suppress(RuntimeError):
            loader.load(0, out)
            break
    assert np.array_equal(out, raw.rows[0])


def test_a_signal_ends_the_load(raw: raw_tables.RawTable) -> None:
    def interrupt(number: int, frame: Any) -> None:
        raise InterruptedError("signal")

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        # a read that never ends, and is not given up: only the signal ends the load
        never = [Fault(0, 1, delay_ms=-1)]
        loader = _core.Loader(raw.paths, raw.planes, timeout_s=200, faults=never)
        sender = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        sender.start()
        with pytest.raises(InterruptedError):
            loader.load(0, poisoned(raw.num_rows, 160))
        sender.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


# --- what goes wrong --------------------------------------------------------------------------


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("got", [0, 512, 4096 + 700])
def test_short_reads_go_on(reader: str, got: int, raw: raw_tables.RawTable) -> None:
    if got == 0:
        with pytest.raises(ReadError, match="file ends early"):
            loaded(raw, reader=reader, faults=[Fault(3, 1, result=0)])
        return
    found = loaded(raw, reader=reader, faults=[Fault(1, 3, result=got)])
    assert np.array_equal(found, raw.rows[0])


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN, errno.EIO, errno.ENOMEM])
def test_errors_that_pass(code: int, raw: raw_tables.RawTable) -> None:
    found = loaded(raw, threads=1, faults=[Fault(2, 1, result=-code)])
    assert np.array_equal(found, raw.rows[0])


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_direct_reads_that_are_refused_after_all(code: int, raw: raw_tables.RawTable) -> None:
    found = loaded(raw, faults=[Fault(0, 3, result=-code)])
    assert np.array_equal(found, raw.rows[0])


@pytest.mark.parametrize("reader", READERS)
def test_a_bad_sector_is_an_error_with_its_place(reader: str, raw: raw_tables.RawTable) -> None:
    (_, offset, _, _) = raw.planes[0][1][2]  # the first shard of the second file
    loader = _core.Loader(
        raw.paths,
        raw.planes,
        reader=reader,
        faults=[Fault(at=offset + 5000, result=-errno.EIO)],
    )
    out = poisoned(raw.num_rows, 160)
    with pytest.raises(ReadError) as caught:
        loader.load(18_002, out[:1000])
    error = caught.value
    assert (error.errno, error.filename) == (errno.EIO, raw.paths[1])
    assert error.offset == offset
    assert error.needed == 160_000
    # rows of other blocks are not concerned
    loader.load(27_100, out[:8000])
    assert np.array_equal(out[:8000], raw.rows[0][27_100:35_100])


def test_reads_that_do_not_end(raw: raw_tables.RawTable) -> None:
    loader = _core.Loader(raw.paths, raw.planes, timeout_s=0.3, faults=[Fault(1, 1, delay_ms=-1)])
    with pytest.raises(ReadError, match=r"no answer for 0\.3 s") as caught:
        loader.load(0, poisoned(raw.num_rows, 160))
    assert caught.value.errno == errno.ETIMEDOUT
    with pytest.raises(RuntimeError, match="did not end"):
        loader.load(0, poisoned(raw.num_rows, 160))


def test_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    raw = raw_tables.write(tmp_path, np.random.default_rng(5))
    loader = _core.Loader(raw.paths, raw.planes)
    os.utime(raw.paths[0], ns=(1, 1))
    with pytest.raises(ReadError, match="file changed"):
        loader.load(0, poisoned(raw.num_rows, 160))


def test_after_a_fork(raw: raw_tables.RawTable) -> None:
    loader = _core.Loader(raw.paths, raw.planes)
    child = os.fork()
    if child == 0:
        try:
            loader.load(0, poisoned(raw.num_rows, 160))
        except UnavailableError:
            os._exit(7)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
