"""Reads that fail, and arguments of stores that are refused."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raw_tables
from checkpoints import write_tiny
from looks import PAUSE_S
from provocations import Provoke, met
from raw_tables import RawTable, gather
from rowstream import ReadError, RowStore, UnavailableError, _core, codecs
from rowstream._core import Fault
from rowstream.hashing import NgramConstants, ngram_row_ids

IDS = np.array([[0, 1]])


def raw_table(folder: Path) -> RawTable:
    return raw_tables.write(folder, np.random.default_rng(0), shard_rows=(3000, 300))


def failing(*faults: Fault, kind: str = "inline-buffered", **options: Any) -> Provoke:
    def provoke(folder: Path) -> object:
        table = raw_table(folder).open(kind, faults=faults, **options)
        try:
            return gather(table, IDS)
        finally:
            table.close()

    return provoke


def opened(act: Callable[[RawTable, Any], object], kind: str = "inline-buffered") -> Provoke:
    """An open table, and something done to it."""

    def provoke(folder: Path) -> object:
        raw = raw_table(folder)
        return act(raw, raw.open(kind))

    return provoke


def cut(folder: Path) -> object:
    for attempt in range(20):
        (folder / str(attempt)).mkdir()
        raw = raw_table(folder / str(attempt))
        table = raw.open("inline-buffered")
        last = np.array([[raw.num_rows - 1]])
        gather(table, last)
        os.truncate(raw.paths[-1], os.path.getsize(raw.paths[-1]) - 8192)
        try:
            return gather(table, last)
        except ReadError as error:
            if error.errno != errno.ESTALE:  # a busy machine let the next look come first
                raise
    return None


def written_to(raw: RawTable, table: Any) -> object:
    gather(table, IDS)
    os.utime(raw.paths[0], ns=(1, 1))
    time.sleep(PAUSE_S)
    return gather(table, IDS)


def silent(folder: Path) -> object:
    table = raw_table(folder).open(
        "inline-buffered", faults=[Fault(0, 99, delay_ms=-1)], read_timeout_s=0.02
    )
    for _ in range(4):
        with pytest.raises(ReadError, match="no answer"):
            gather(table, IDS)
    return gather(table, IDS)


def absent(folder: Path) -> object:
    raw = raw_table(folder)
    os.unlink(raw.paths[0])
    return raw.open("inline-buffered")


FILE = "<file>: needs <n> bytes at <offset>, got <n>"
met(f"{FILE}: file ends early (errno 5)", ReadError, failing(Fault(0, 2, result=0)), cut)
met(f"{FILE}: <reason> (errno <n>)", ReadError, failing(Fault(0, 9, result=-errno.EIO)))
met(
    f"{FILE}: no answer for <n> s (errno 110)",
    ReadError,
    failing(Fault(0, 1, delay_ms=-1), read_timeout_s=0.05),
)
met("<file>: <n> earlier gathers still have reads waiting (errno 110)", ReadError, silent)
met("<file>: file changed since it was opened (errno 116)", ReadError, opened(written_to))
met("<file>: <reason> (errno <n>)", ReadError, absent)


def closed(raw: RawTable, table: Any) -> object:
    table.close()
    return gather(table, IDS)


def in_a_child(raw: RawTable, table: Any) -> None:
    """Raise here what a forked child meets."""
    theirs, ours = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            gather(table, IDS)
        except Exception as error:
            os.write(ours, pickle.dumps(error))
        os._exit(0)
    os.close(ours)
    os.waitpid(child, 0)
    with os.fdopen(theirs, "rb") as answer:
        raise pickle.loads(answer.read())


def in_a_handler(folder: Path) -> None:
    table = raw_table(folder).open("inline-buffered", faults=[Fault(0, 9, delay_ms=300)])

    def handler(number: int, frame: object) -> None:
        gather(table, IDS)

    before = signal.signal(signal.SIGALRM, handler)
    # again and again: a busy machine may take longer to begin
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        gather(table, IDS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def limit(which: int, soft: int) -> Iterator[None]:
    before, hard = resource.getrlimit(which)
    resource.setrlimit(which, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (before, hard))


def without_ring(folder: Path) -> None:
    """A ring is a file: with all files open it is refused, whatever the kernel allows."""
    raw = raw_table(folder)
    lowest = os.dup(0)
    os.close(lowest)
    for room in range(60):
        # too few even for the table's own files
        with contextlib.suppress(ReadError), limit(resource.RLIMIT_NOFILE, lowest + room):
            raw.open("uring-buffered").close()


def without_memory(folder: Path) -> None:
    huge = folder / "huge"
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    planes = [(160, [(0, 0, 0, (1 << 40) // 160)])]
    with limit(resource.RLIMIT_AS, 1 << 38):
        _core.ResidentTable([os.fspath(huge)], planes, mapped=False)


met("table is closed", ValueError, opened(closed), opened(closed, "mapped"))
met("table was opened before fork", UnavailableError, opened(in_a_child))
met("table is in use by a gather of this very thread", RuntimeError, in_a_handler)
met(
    "reader uring: io_uring refused: <reason>; auto would choose pool",
    UnavailableError,
    without_ring,
)
met("rowstream table: <n> bytes: <reason>", OSError, without_memory)


def option(**options: Any) -> Provoke:
    def provoke(folder: Path) -> object:
        write_tiny(folder)
        return RowStore.open(folder, **options)

    return provoke


def store(act: Callable[[RowStore], object], *, config: bool = True) -> Provoke:
    def provoke(folder: Path) -> object:
        write_tiny(folder)
        if not config:
            (folder / "config.json").unlink()
        with RowStore.open(folder) as opened:
            return act(opened)

    return provoke


def rows(*shape: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.zeros(shape, np.uint8)


def prefetch(opened: RowStore) -> object:
    return opened.prefetch([(None, [1])])


def small_lookahead(folder: Path) -> object:
    write_tiny(folder)
    with RowStore.open(folder, lookahead_bytes=100) as opened:
        return prefetch(opened)


met(
    "<option> needs one of <choices>, got <value>",
    ValueError,
    option(backend="ram"),
    option(reader="aio"),
)
met("<option> needs 0 or more, got <n>", ValueError, option(cache_bytes=-1))
met("resident_budget_bytes needs 1 or more, got <n>", ValueError, option(resident_budget_bytes=0))
met("queue_depth is <n>, needs to be in [1, 4096]", ValueError, option(queue_depth=5000))
met("read_timeout_s is <s>, needs to be in (0, 86400]", ValueError, option(read_timeout_s=-1.0))
met("a cache of <n> bytes cannot hold groups of <n> bytes", ValueError, option(cache_bytes=1))
met("lookahead_bytes is <n>, needs room for <n> groups of <n> bytes", ValueError, small_lookahead)
met(
    "row id <id> at position <n> is outside [0, <rows>)",
    IndexError,
    store(lambda opened: opened.gather([0, 64])),
)
met(
    "token id <id> at position <n> is outside [0, <vocabulary>)",
    ValueError,
    store(lambda opened: opened.row_ids(None, [3, 50])),
)
met(
    "context id <id> at position <n> is outside [0, <vocabulary>)",
    ValueError,
    store(lambda opened: opened.row_ids([3, -1], [3])),
)
met("context has <n> ids, needs <n>", ValueError, store(lambda opened: opened.row_ids([3], [3])))
met(
    "<table>: tokens cannot be hashed: <folder> has no config.json",
    UnavailableError,
    store(lambda opened: opened.row_ids(None, [3]), config=False),
)
met(
    "<argument> need integers that fit int64, got <dtype>",
    TypeError,
    store(lambda opened: opened.gather([0.5])),
)
met("<argument> need one axis, got <n>", ValueError, store(lambda opened: opened.row_ids(None, 3)))
met(
    "rows need a last axis of <n> bytes, got <shape>",
    ValueError,
    store(lambda opened: opened.values(rows(3, 5))),
)
met(
    "out needs a uint8 array, got <dtype>",
    TypeError,
    store(lambda opened: opened.gather([0], np.zeros((1, 6)))),  # type: ignore[arg-type]
)
met(
    "out needs shape <shape>, got <shape>",
    ValueError,
    store(lambda opened: opened.gather([0], rows(2, 6))),
)
met(
    "out needs to be writable and C-contiguous",
    ValueError,
    store(lambda opened: opened.gather([0, 1], rows(2, 12)[:, ::2])),
)


def constants(**changes: Any) -> Provoke:
    def provoke(folder: Path) -> object:
        sound: dict[str, Any] = {
            "ngram_size": 2,
            "heads_per_ngram": 1,
            "vocab_size": 9,
            "eos": 1,
            "multipliers": (3, 5),
            "sizes": (7,),
            "offsets": (0,),
        }
        return NgramConstants(**{**sound, **changes})

    return provoke


def hashed(context: Any, tokens: Any) -> Provoke:
    def provoke(folder: Path) -> object:
        return ngram_row_ids(NgramConstants(2, 1, 9, 1, (3, 5), (7,), (0,)), context, tokens)

    return provoke


met(
    "hash constants need ngram_size >= 2 and heads_per_ngram >= 1, got <n> and <n>",
    ValueError,
    constants(ngram_size=1),
)
met("hash constants need <n> multipliers, got <n>", ValueError, constants(multipliers=(3,)))
met("hash constants need <n> sizes and offsets, got <n> and <n>", ValueError, constants(sizes=()))
met("context needs <n> ids, got <n>", ValueError, hashed([1, 2], [3]))
met("<argument> need one dimension, got <n>", ValueError, hashed(None, [[1]]))
met("<argument> need integers, got <dtype>", TypeError, hashed(None, [0.5]))
met("<argument>[<n>] needs an id in [0, <vocabulary>), got <id>", ValueError, hashed(None, [9]))
met(
    "codec needs one of <codecs>, got <codec>",
    ValueError,
    lambda folder: codecs.decode("q4", rows(2)),
)
met(
    "rows need uint8, got <dtype>",
    TypeError,
    lambda folder: codecs.decode("bf16", np.zeros(2)),  # type: ignore[arg-type]
)
met(
    "rows need a last axis of <n>-byte values, got <shape>",
    ValueError,
    lambda folder: codecs.decode("bf16", rows(3)),
)
met(
    "<codec> needs <a or no> scale, got <scale>",
    ValueError,
    lambda folder: codecs.decode("bf16", rows(2), 1.0),
)
