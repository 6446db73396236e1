"""A page of a mapped table that cannot be read is an error of its gather, and of nothing else."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raw_tables
from looks import PAUSE_S, between_looks
from raw_tables import RawTable, gather
from rowstream import ReadError, _core

# rows of the first file that stay, and some that are lost when it is cut at KEPT
KEPT = 200 * 4096
GOOD = np.arange(0, 5000, 7)[None]
LOST = np.arange(5300, 5900, 7)[None]


def written(folder: Path) -> RawTable:
    return raw_tables.write(folder, np.random.default_rng(), shard_rows=(3000, 3000, 1234))


def open_mapped(raw: RawTable, **options: Any) -> _core.ResidentTable:
    """Open a table that has just looked at its files."""
    table = _core.ResidentTable(raw.paths, raw.planes, mapped=True, **options)
    assert np.array_equal(gather(table, GOOD), raw.expected(GOOD))
    return table


@between_looks
def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    raw = written(tmp_path)
    table = open_mapped(raw)
    os.truncate(raw.paths[0], KEPT)
    for _ in range(3):
        with pytest.raises(ReadError, match="file ends early") as caught:
            gather(table, LOST)
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == raw.paths[0]
        assert caught.value.offset == raw.planes[0][1][1][1] + (5300 - 3000) * 160
        assert (caught.value.needed, caught.value.got) == (160, 0)
        assert np.array_equal(gather(table, GOOD), raw.expected(GOOD))
    assert table.counters()["read_errors"] == 3
    assert table.mapped_pages()["faults"] == 3
    table.close()  # nobody holds its lock


def test_the_look_at_the_file_says_what_happened(tmp_path: Path) -> None:
    raw = written(tmp_path)
    table = open_mapped(raw)
    os.truncate(raw.paths[0], KEPT)
    time.sleep(PAUSE_S)
    for ids in (GOOD, LOST):
        with pytest.raises(ReadError, match="file changed since it was opened"):
            gather(table, ids)


@between_looks
def test_zero_rows_where_they_were_asked_for(tmp_path: Path) -> None:
    raw = written(tmp_path)
    table = open_mapped(raw, zero_rows=True)
    os.truncate(raw.paths[0], KEPT)
    ids = np.concatenate([GOOD, LOST, GOOD, LOST], axis=1)
    want = raw.expected(ids)
    want[np.isin(ids, LOST)] = 0
    assert np.array_equal(gather(table, ids), want)
    counters = table.counters()
    assert counters["zeroed_rows"] == counters["read_errors"] == 2 * LOST.size
    assert table.mapped_pages()["faults"] == 2 * LOST.size


@between_looks
def test_a_row_of_two_planes_is_zeroed_whole(tmp_path: Path) -> None:
    # the second plane lies in the part that is gone
    raw = raw_tables.write(
        tmp_path, np.random.default_rng(), row_bytes=(160, 80), shard_rows=(4000,)
    )
    table = _core.ResidentTable(raw.paths, raw.planes, mapped=True, zero_rows=True)
    ids = np.array([[0, 3999]])
    gather(table, ids)
    os.truncate(raw.paths[0], raw.planes[1][1][0][1] + 4096)
    want = raw.expected(ids)
    want[0, 1] = 0
    assert np.array_equal(gather(table, ids), want)


@between_looks
def test_other_threads_go_on(tmp_path: Path) -> None:
    raw = written(tmp_path)
    table = open_mapped(raw)
    os.truncate(raw.paths[0], KEPT)
    want = raw.expected(GOOD)
    wrong: list[str] = []
    failed = [0] * 8

    def work(number: int) -> None:
        for _ in range(100):
            try:
                if number % 2:
                    if not np.array_equal(gather(table, GOOD), want):
                        wrong.append("bytes")
                else:
                    gather(table, LOST)
                    wrong.append("no error")
            except ReadError as error:
                if number % 2:
                    wrong.append(str(error))
                failed[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert failed == [100, 0] * 4
    table.close()


@between_looks
def test_a_thread_that_blocks_signals(tmp_path: Path) -> None:
    raw = written(tmp_path)
    table = open_mapped(raw)
    os.truncate(raw.paths[0], KEPT)
    caught: list[int | None] = []
    masks = []

    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            gather(table, LOST)
        except ReadError as error:
            caught.append(error.errno)
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert caught == [errno.EIO]
    assert signal.SIGBUS in masks[0]  # the caller's mask is as it was


BEGIN = """
import faulthandler, mmap, os, signal, sys, threading, time
import numpy as np
from rowstream import ReadError, _core

path, other = sys.argv[1:]

def open_table():
    table = _core.ResidentTable([path], [(160, [(0, 0, 0, 10_000)])], mapped=True)
    table.gather(np.zeros((1, 1), np.int64), [1], np.empty((1, 1, 160), np.uint8))
    return table

def cut():
    os.truncate(path, 4096)

def fails(table, out=None):
    out = np.empty((1, 1, 160), np.uint8) if out is None else out
    try:
        table.gather(np.full((1, 1), 9_000, np.int64), [1], out)
    except ReadError as error:
        print("ReadError", error.errno, flush=True)

def touch_foreign():
    with open(other, "r+b") as file:
        view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    os.truncate(other, 0)
    print("touching", flush=True)
    view[5000]
    print("alive", flush=True)

def handler(number, frame):
    print("handler", number == signal.SIGBUS, flush=True)
"""


def run(tmp_path: Path, script: str) -> tuple[int, str, str]:
    files = [tmp_path / name for name in ("table", "other")]
    for file in files:
        file.write_bytes(bytes(1_600_000))
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script, *map(str, files)],
        capture_output=True,
        text=True,
        timeout=120,
        # a sanitizer's own handler would end the process with a report
        env={**os.environ, "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":handle_sigbus=0"},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


CAUGHT = f"ReadError {errno.EIO}\n"
SURVIVES = {
    "alone": ("table = open_table(); cut(); fails(table); fails(table)", CAUGHT * 2),
    "handler before": (
        "signal.signal(signal.SIGBUS, handler); table = open_table(); cut(); fails(table)",
        CAUGHT,
    ),
    "handler after, once the table has looked again": (
        "table = open_table(); signal.signal(signal.SIGBUS, handler); time.sleep(1.05)\n"
        "table.gather(np.zeros((1, 1), np.int64), [1], np.empty((1, 1, 160), np.uint8))\n"
        "cut(); fails(table)",
        CAUGHT,
    ),
    "ignored before": (
        "signal.signal(signal.SIGBUS, signal.SIG_IGN); table = open_table(); cut(); fails(table)",
        CAUGHT,
    ),
    "faulthandler before": (
        "faulthandler.enable(); table = open_table(); cut(); fails(table); fails(table)",
        CAUGHT * 2,
    ),
    "faulthandler after": (
        "table = open_table(); faulthandler.enable(); cut(); fails(table); fails(table)",
        CAUGHT * 2,
    ),
    "a signal sent to a handler from before": (
        "signal.signal(signal.SIGBUS, handler); table = open_table()\n"
        "os.kill(os.getpid(), signal.SIGBUS); time.sleep(0.01)",
        "handler True\n",
    ),
    "a signal sent, ignored from before": (
        "signal.signal(signal.SIGBUS, signal.SIG_IGN); table = open_table()\n"
        "os.kill(os.getpid(), signal.SIGBUS); print('alive')",
        "alive\n",
    ),
    "a forked child with a table of its own": (
        "first = open_table()\n"
        "if os.fork() == 0:\n"
        "    table = open_table(); cut(); fails(table); table.close(); os._exit(0)\n"
        "print('child', os.wait()[1])",
        CAUGHT + "child 0\n",
    ),
}
DIES = {
    "a page of somebody else": ("table = open_table(); touch_foreign()", ""),
    "a page of somebody else, after one of ours": (
        "table = open_table(); cut(); fails(table); touch_foreign()",
        "",
    ),
    "a page of somebody else, ignored": (
        "signal.signal(signal.SIGBUS, signal.SIG_IGN); table = open_table(); touch_foreign()",
        "",
    ),
    "a page of somebody else, in another thread": (
        "table = open_table(); thread = threading.Thread(target=touch_foreign)\n"
        "thread.start(); thread.join()",
        "",
    ),
    "a page of somebody else, with faulthandler": (
        "faulthandler.enable(); table = open_table(); touch_foreign()",
        "Bus error",
    ),
    "a page of somebody else, with faulthandler in front of us": (
        "table = open_table(); faulthandler.enable(); touch_foreign()",
        "Bus error",
    ),
    "the array that is filled": (
        "table = open_table()\n"
        "out = np.memmap(other, np.uint8, 'r+', shape=(1, 1, 160)); os.truncate(other, 0)\n"
        "print('touching', flush=True); fails(table, out); print('alive')",
        "",
    ),
    "a signal sent": (
        "table = open_table(); print('touching', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGBUS); time.sleep(1); print('alive')",
        "",
    ),
}


@pytest.mark.parametrize("name", SURVIVES)
@between_looks
def test_ours_is_caught_whoever_else_listens(name: str, tmp_path: Path) -> None:
    script, said = SURVIVES[name]
    code, out, err = run(tmp_path, script)
    assert (code, out) == (0, said), err


@pytest.mark.parametrize("name", DIES)
def test_what_is_not_ours_ends_the_process(name: str, tmp_path: Path) -> None:
    script, said = DIES[name]
    code, out, err = run(tmp_path, script)
    assert code == -signal.SIGBUS, err
    assert out.endswith("touching\n")
    assert said in err
