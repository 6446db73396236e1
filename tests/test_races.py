"""Stores shared, closed, collected, forked, interrupted and abandoned while gathers run."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import checkpoints
import raw_tables
from raw_tables import DISK_KINDS, KINDS, RawTable, gather
from rowstream import RowStore, UnavailableError, _core
from rowstream._core import Fault

every_kind = pytest.mark.parametrize("kind", KINDS)
every_disk_kind = pytest.mark.parametrize("kind", DISK_KINDS)
every_backend = pytest.mark.parametrize("backend", ["disk", "mmap", "pinned"])

# a gather that is still there a second later, and then gives the right bytes
SLOW = [Fault(0, 1, delay_ms=1000)]


@pytest.fixture
def raw(tmp_path: Path) -> RawTable:
    return raw_tables.write(tmp_path, np.random.default_rng(), shard_rows=(3000, 3000, 1234))


def ids_of(raw: RawTable, tokens: int = 200) -> NDArray[np.int64]:
    return np.random.default_rng().integers(0, raw.num_rows, (tokens, 16))


class Worker(threading.Thread):
    """A thread whose exception is the test's."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def done(self) -> None:
        self.join(60)
        assert not self.is_alive(), "a thread hangs"
        if self._error is not None:
            raise self._error


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


# --- the interpreter ends, or a signal comes

PROLOGUE = """
import json, sys, threading, time
import numpy as np
import raw_tables
from rowstream._core import Fault

paths, planes, kind = json.loads(sys.argv[1])
table = raw_tables.RawTable(paths, planes, [])
faults = [Fault(0, 1, delay_ms=700)] if "-" in kind else None
opened = table.open(kind, faults=faults) if faults else table.open(kind)
ids = np.random.default_rng().integers(0, 7000, (200, 16))

def work(rounds=10**9):
    for _ in range(rounds):
        raw_tables.gather(opened, ids)
"""


def run_script(raw: RawTable, kind: str, script: str) -> subprocess.Popen[str]:
    """Start a process, and wait until it says that it is ready."""
    argument = json.dumps([raw.paths, raw.planes, kind])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    argv = [sys.executable, "-c", PROLOGUE + script, argument]
    child = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n", child.stderr.read() if child.stderr else ""
    return child


def ended(child: subprocess.Popen[str]) -> tuple[int, str]:
    """Return status and what was said on stderr; a child that hangs is killed, the test fails."""
    try:
        _, said = child.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        pytest.fail("the process hangs")
    return child.returncode, said


@every_kind
def test_the_interpreter_ends_while_daemon_threads_gather(kind: str, raw: RawTable) -> None:
    script = """
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
print("ready", flush=True)
"""
    # their work has no end
    assert ended(run_script(raw, kind, script)) == (0, "")


@every_kind
def test_the_interpreter_waits_for_a_gather_of_an_ordinary_thread(kind: str, raw: RawTable) -> None:
    script = """
threading.Thread(target=work, args=(1,)).start()
print("ready", flush=True)
"""
    assert ended(run_script(raw, kind, script)) == (0, "")


@pytest.mark.parametrize(
    ("kind", "number"),
    [*((kind, signal.SIGINT) for kind in KINDS), ("uring-direct", signal.SIGTERM)],
)
def test_a_signal_while_other_threads_gather(
    kind: str, number: signal.Signals, raw: RawTable
) -> None:
    script = """
threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
try:
    time.sleep(0.2)
    print("ready", flush=True)
    time.sleep(300)
except KeyboardInterrupt:
    sys.exit(5)
"""
    child = run_script(raw, kind, script)
    child.send_signal(number)
    status, said = ended(child)
    assert (status, said) == (5 if number == signal.SIGINT else -number, "")


@every_disk_kind
def test_a_handler_that_closes_the_table_it_interrupts_is_told(kind: str, raw: RawTable) -> None:
    # it runs inside the gather, and would wait for itself
    table = raw.open(kind, faults=SLOW)
    said: list[str] = []

    def close(number: int, frame: object) -> None:
        for call in (table.close, table.files, lambda: gather(table, ids_of(raw, 1))):
            try:
                call()
            except RuntimeError as error:
                said.append(str(error))

    def interrupt() -> None:
        while table.counters()["reads"] == 0:  # which a gather counts while it waits
            if over.wait(0.005):
                return
        os.kill(os.getpid(), signal.SIGALRM)

    over = threading.Event()
    before = signal.signal(signal.SIGALRM, close)
    worker = Worker(interrupt)
    try:
        ids = ids_of(raw)
        assert np.array_equal(gather(table, ids), raw.expected(ids))
    finally:
        over.set()
        worker.done()
        signal.signal(signal.SIGALRM, before)
    assert said == ["table is in use by a gather of this very thread"] * 3
    table.close()


# --- forks


@every_kind
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_other_threads_gather(kind: str, raw: RawTable) -> None:
    faults = {"faults": [Fault(0, 10**9, delay_ms=30)]} if kind in DISK_KINDS else {}
    table = raw.open(kind, **faults)
    over = threading.Event()

    def work() -> None:
        ids = ids_of(raw, 20)
        while not over.is_set():
            assert np.array_equal(gather(table, ids), raw.expected(ids))

    workers = [Worker(work) for _ in range(3)]
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                signal.alarm(120)  # a lock that a thread of the parent held would hang us
                os._exit(_status_of_forked(table, raw, kind))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        over.set()
        for worker in workers:
            worker.done()
    ids = ids_of(raw)
    assert np.array_equal(gather(table, ids), raw.expected(ids))


def _status_of_forked(
    table: _core.DiskTable | _core.ResidentTable, raw: RawTable, kind: str
) -> int:
    ids = ids_of(raw, 5)
    try:
        for number in range(2):
            try:
                gather(table, ids) if number == 0 else table.files()
            except UnavailableError as error:
                if "opened before fork" not in str(error):
                    return 2
            else:
                return 3
        table.counters()
        table.close()
        del table
        mine = raw.open(kind)
        return 0 if np.array_equal(gather(mine, ids), raw.expected(ids)) else 4
    except BaseException:
        return 5
