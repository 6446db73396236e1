"""The pages of a mapped table: how many are resident, that a budget holds, that cold rows are read
together.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from looks import between_looks
from raw_tables import gather
from rowstream import ReadError, RowStore, _core

MIB = 1 << 20
SLACK = 64 * MIB
PAGE = 4096


def sparse(path: Path, pages: int) -> list[tuple[int, list[tuple[int, int, int, int]]]]:
    """A file of holes whose rows are pages."""
    with open(path, "wb") as file:
        file.truncate(pages * PAGE)
    return [(PAGE, [(0, 0, 0, pages)])]


def resident(path: Path) -> int:
    """The resident bytes of all mappings of a file, as the kernel has them."""
    total, ours = 0, False
    with open("/proc/self/smaps", encoding="utf-8") as smaps:
        for line in smaps:
            if line[0] in "0123456789abcdef":
                ours = line.rstrip().endswith(str(path))
            elif ours and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


def until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def test_resident_bytes_are_the_kernels(tmp_path: Path) -> None:
    path = tmp_path / "holes"
    planes = sparse(path, 4096)
    table = _core.ResidentTable([str(path)], planes, mapped=True)
    pages = table.mapped_pages()
    assert pages["mapped_bytes"] == 4096 * PAGE
    assert pages["resident_bytes"] == 0
    gather(table, np.arange(0, 1000, 2)[None])
    # neighbors that the page cache has may be mapped along
    assert 500 * PAGE <= table.mapped_pages()["resident_bytes"] == resident(path)
    table.close()
    assert table.mapped_pages()["mapped_bytes"] == 0
    loaded = _core.ResidentTable([str(path)], planes, mapped=False)
    assert not any(loaded.mapped_pages().values())


def test_a_budget_holds_during_gathers(tmp_path: Path) -> None:
    path = tmp_path / "holes"
    planes = sparse(path, 400 * MIB // PAGE)
    with open(path, "r+b") as file:  # a few pages that are not zeroes
        for page in range(0, 400 * MIB // PAGE, 5000):
            file.seek(page * PAGE)
            file.write(page.to_bytes(8, "little") * (PAGE // 8))
    free = _core.ResidentTable([str(path)], planes, mapped=True)
    budget = 8 * MIB
    table = _core.ResidentTable([str(path)], planes, mapped=True, budget_bytes=budget)
    over = threading.Event()
    most = [0]

    def watch() -> None:
        while not over.is_set():
            most[0] = max(most[0], table.mapped_pages()["resident_bytes"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        out = np.empty((1, 4096, PAGE), np.uint8)
        for first in range(0, 400 * MIB // PAGE, 4096):
            ids = np.arange(first, first + 4096)[None]
            table.gather(ids, [4096], out)
            want = np.where(ids % 5000 == 0, ids, 0)
            assert np.array_equal(out.view("<u8")[..., 0], want)
            assert np.array_equal(out.view("<u8")[..., -1], want)
    finally:
        over.set()
        watcher.join()
    assert most[0] <= budget + SLACK
    assert table.mapped_pages()["drops"] > 0
    # and at rest
    assert until(lambda: table.mapped_pages()["resident_bytes"] <= budget)
    # without a budget nothing is dropped
    for first in range(0, 40_000, 4096):
        free.gather(np.arange(first, first + 4096)[None], [4096], out)
    # less than was mapped: where memory is short, the kernel takes some back
    assert free.mapped_pages()["resident_bytes"] > budget + SLACK
    assert free.mapped_pages()["drops"] == 0


def test_pages_that_cannot_be_dropped_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "holes"
    table = _core.ResidentTable([str(path)], sparse(path, 512), mapped=True, budget_bytes=1)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        (begin, end) = next(
            (int(number, 16) for number in line.split()[0].split("-"))
            for line in maps
            if line.rstrip().endswith(str(path))
        )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)) != 0:
        pytest.skip(f"no locked memory: {os.strerror(ctypes.get_errno())}")
    if "VmLck:\t       0 kB" in Path("/proc/self/status").read_text(encoding="ascii"):
        pytest.skip("no locked memory: a sanitizer left the call out")
    assert until(lambda: table.mapped_pages()["advise_failures"] > 0)
    ids = np.arange(512)[None]
    assert not gather(table, ids).any()
    table.close()


def test_cold_rows_are_read_together(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    rows = np.random.default_rng().integers(0, 256, (40_000, 160), np.uint8)
    with open(path, "wb") as file:
        file.write(rows.tobytes())
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    table = _core.ResidentTable([str(path)], [(160, [(0, 0, 0, len(rows))])], mapped=True)
    before = resource.getrusage(resource.RUSAGE_THREAD)
    ids = np.random.default_rng().permutation(len(rows))[:2000, None]
    assert np.array_equal(gather(table, ids)[:, 0], rows[ids[:, 0]])
    after = resource.getrusage(resource.RUSAGE_THREAD)
    if after.ru_inblock == before.ru_inblock:
        pytest.skip("the file system reads from no device")
    # faults that had to wait for a read of their own
    assert after.ru_majflt - before.ru_majflt < 50
    assert table.mapped_pages()["advise_failures"] == 0


def test_the_store_says_it_all(synth_checkpoint: Path) -> None:
    with RowStore.open(synth_checkpoint, backend="mmap", resident_budget_bytes=1 << 30) as store:
        store.gather(np.arange(100))
        stats = store.stats()
        assert stats["mapped_bytes"] >= store.manifest.table_bytes
        assert 0 < stats["resident_bytes"] <= stats["mapped_bytes"]
        assert (stats["faults"], stats["drops"], stats["advise_failures"]) == (0, 0, 0)
    with RowStore.open(synth_checkpoint, backend="disk") as store:
        assert "mapped_bytes" not in store.stats()
    for budget in (0, -1):
        with pytest.raises(
            ValueError, match=f"resident_budget_bytes needs 1 or more, got {budget}"
        ):
            RowStore.open(synth_checkpoint, backend="mmap", resident_budget_bytes=budget)


@between_looks
def test_the_store_zeroes_rows_of_a_mapping(synth_checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(synth_checkpoint, copy)
    stores = {
        policy: RowStore.open(copy, backend="mmap", on_read_error=policy)
        for policy in ("raise", "zero-rows")
    }
    last = np.array([stores["raise"].num_rows - 1])
    for store in stores.values():
        store.gather(last)
    extent = stores["raise"].manifest.planes[0].extents[-1]
    os.truncate(stores["raise"].manifest.files[extent.file].path, PAGE)
    with pytest.raises(ReadError, match="file ends early"):
        stores["raise"].gather(last)
    assert not stores["zero-rows"].gather(last).any()
    assert stores["zero-rows"].stats()["zeroed_rows"] == 1
    for store in stores.values():
        store.close()
