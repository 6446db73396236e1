"""Gathers while the interpreter ends, a signal comes or the process forks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from raw_tables import DISK_KINDS, KINDS, RawTable, gather
from rowstream import UnavailableError, _core
from rowstream._core import Fault
from small_tables import SLOW, every_disk_kind, every_kind, ids_of, written
from workers import Worker


@pytest.fixture
def raw(tmp_path: Path) -> RawTable:
    return written(tmp_path)


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
