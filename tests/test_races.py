"""Stores and tables shared, closed, collected and abandoned while gathers run."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import checkpoints
from raw_tables import RawTable, gather
from rowstream import RowStore, _core
from small_tables import SLOW, every_disk_kind, every_kind, ids_of, written
from workers import Worker

every_backend = pytest.mark.parametrize("backend", ["disk", "mmap", "pinned"])


@pytest.fixture
def raw(tmp_path: Path) -> RawTable:
    return written(tmp_path)


def held() -> tuple[int, int, int]:
    """Descriptors, threads and mappings of this process."""
    with open("/proc/self/maps") as maps:
        count = sum(1 for _ in maps)
    return len(os.listdir("/proc/self/fd")), len(threads()), count


def threads() -> list[str]:
    """The names of this process's threads.

    Without the kernel's own, which wait for a busy disk in io_uring's name and go seconds later.
    """
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it may end meanwhile
            names.append((task / "comm").read_text())
    return [name for name in names if not name.startswith("iou-")]


def assert_no_more(after: tuple[int, int, int], before: tuple[int, int, int]) -> None:
    """Less is no leak: what an earlier test has left to a thread may go at any time."""
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    # the allocator may cut a region of its own
    assert after[2] <= before[2] + 8


# --- opened, shared and closed under load


@every_kind
def test_tables_opened_and_closed_while_others_gather(kind: str, raw: RawTable) -> None:
    until = time.monotonic() + 0.5

    def work() -> None:
        while time.monotonic() < until:
            table = raw.open(kind)
            ids = ids_of(raw, 50)
            assert np.array_equal(gather(table, ids), raw.expected(ids))
            table.close()

    for worker in [Worker(work) for _ in range(4)]:
        worker.done()


@every_kind
def test_one_table_closed_under_the_load_of_many_threads(kind: str, raw: RawTable) -> None:
    for _ in range(4):
        table = raw.open(kind)
        started = threading.Barrier(5)

        def work(
            table: _core.DiskTable | _core.ResidentTable = table,
            started: threading.Barrier = started,
        ) -> None:
            ids = ids_of(raw, 20)
            want = raw.expected(ids)
            started.wait()
            try:
                while True:
                    assert np.array_equal(gather(table, ids), want)
            except ValueError as error:
                assert "closed" in str(error)  # noqa: PT017

        workers = [Worker(work) for _ in range(4)]
        started.wait()
        time.sleep(0.01)
        table.close()
        table.close()
        for worker in workers:
            worker.done()


@every_backend
def test_stores_opened_500_times_leave_nothing_behind(backend: str, tmp_path: Path) -> None:
    table = checkpoints.write_tiny(tmp_path)

    def once() -> None:
        with RowStore.open(tmp_path, backend=backend) as store:
            assert np.array_equal(store.gather([5, 63]), table[[5, 63]])

    for _ in range(20):
        once()
    gc.collect()
    before = held()
    for _ in range(500):
        once()
    gc.collect()
    assert_no_more(held(), before)


@every_disk_kind
def test_tables_that_nobody_closed_leave_nothing_behind(kind: str, raw: RawTable) -> None:
    for _ in range(5):
        gather(raw.open(kind), ids_of(raw, 2))
    gc.collect()
    before = held()
    for _ in range(50):
        gather(raw.open(kind), ids_of(raw, 2))
    assert_no_more(held(), before)


def test_many_stores_at_once(tmp_path: Path) -> None:
    table = checkpoints.write_tiny(tmp_path)
    stores = [RowStore.open(tmp_path, queue_depth=8) for _ in range(60)]
    rng = np.random.default_rng()

    def work(mine: list[RowStore]) -> None:
        for store in mine:
            ids = rng.integers(0, 64, 40)
            assert np.array_equal(store.gather(ids), table[ids])

    for worker in [Worker(lambda part=stores[n::3]: work(part)) for n in range(3)]:  # type: ignore[misc]
        worker.done()
    for store in stores:
        store.close()


def test_rings_beyond_the_limit_of_descriptors_are_an_error_and_no_leak(tmp_path: Path) -> None:
    checkpoints.write_tiny(tmp_path)
    gc.collect()
    before = held()[0]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    stores: list[RowStore] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 20, hard))
        with pytest.raises(OSError, match="open files"):
            stores += (RowStore.open(tmp_path, queue_depth=8) for _ in range(100))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert stores
    for store in stores:
        store.close()
    gc.collect()
    assert held()[0] <= before


# --- the last reference goes


@every_disk_kind
def test_a_table_dropped_in_mid_gather_lives_to_its_end(kind: str, raw: RawTable) -> None:
    tables = [raw.open(kind, faults=SLOW)]
    there = weakref.ref(tables[0]) if hasattr(tables[0], "__weakref__") else None
    ids = ids_of(raw)
    before = held()
    found: list[NDArray[np.uint8]] = []
    worker = Worker(lambda: found.append(gather(tables.pop(), ids)))
    while tables:
        time.sleep(0)
    gc.collect()
    worker.done()
    assert np.array_equal(found[0], raw.expected(ids))
    if there is not None:
        assert there() is None
    assert held()[0] < before[0]


def test_a_store_dropped_in_mid_gather(tmp_path: Path) -> None:
    table = checkpoints.write_tiny(tmp_path)
    stores = [RowStore.open(tmp_path)]
    there = weakref.ref(stores[0])
    ids = np.random.default_rng().integers(0, 64, (500_000, 4))
    found: list[NDArray[np.uint8]] = []
    worker = Worker(lambda: found.append(stores.pop().gather(ids)))
    while stores:
        time.sleep(0)
    gc.collect()
    worker.done()
    assert np.array_equal(found[0], table[ids])
    assert there() is None
