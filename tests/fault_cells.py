"""What each way to read a table makes of each fault: one cell of the matrix after the other, tried
for real on small tables, and the Markdown table of them.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import raw_tables
from looks import PAUSE_S
from raw_tables import DISK_KINDS, KINDS, RawTable, gather
from rowstream import ReadError, _core
from rowstream._core import Fault

# a time-out has to be awaited by every cell of a silent device, and not to hit a busy machine's
TIMEOUT_S = 2.0
# one by a bad sector, the others by a file cut short
LOST_ROW = 1234
LOST_ROWS = (LOST_ROW, 7230, 7231, 7232, 7233)

_COLUMNS = {"mapped": "mmap", "loaded": "pinned"}
_BEGIN, _END = "<!-- made by tools/fault_matrix.py -->", "<!-- end -->"

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    """A fault, in words and as the core takes it."""

    words: str
    faults: Callable[[RawTable], Sequence[Fault]] | None = None  # none: it is done to the files
    change: Callable[[RawTable], None] | None = None  # done after a first gather
    wait_s: float = 0.0
    ids: Ids | None = None
    after: Ids | None = None  # rows that are gathered next; the same ones by default
    zero_rows: bool = False


def _first(count: int, code: int) -> Callable[[RawTable], Sequence[Fault]]:
    return lambda raw: [Fault(0, count, result=-code)]


def _short(raw: RawTable) -> Sequence[Fault]:
    return [Fault(read, 1, result=100) for read in range(0, 20, 2)]


def _late(raw: RawTable) -> Sequence[Fault]:
    return [Fault(read, 1, delay_ms=1 + read % 7) for read in range(0, 300, 3)]


def _bad_sector(raw: RawTable) -> Sequence[Fault]:
    _, offset, first, _ = raw.planes[0][1][0]
    return [Fault(at=offset + (LOST_ROW - first) * raw.row_bytes + 80, result=-errno.EIO)]


def _truncate(raw: RawTable) -> None:
    os.truncate(raw.paths[-1], os.path.getsize(raw.paths[-1]) - 8192)


def _overwrite(raw: RawTable) -> None:
    time.sleep(0.02)  # the clock of files ticks less often than every write
    with open(raw.paths[0], "r+b") as file:
        file.seek(3000)
        file.write(b"something else")


_FEW = np.array([[5, 900, LOST_ROW, 7000]])
_LAST = np.array([[*LOST_ROWS[1:]]])
_OTHERS = np.array([[5, 900, 3000, 6999]])

CASES = (
    Case("a read comes short, ten times", _short),
    Case("reads come late and out of order", _late),
    Case("EIO once", _first(1, errno.EIO), ids=np.array([[0]])),
    Case("EIO twice", _first(2, errno.EIO), ids=np.array([[0]])),
    Case("EIO three times", _first(3, errno.EIO), ids=np.array([[0]])),
    Case("EAGAIN 40 times", _first(40, errno.EAGAIN)),
    Case("EAGAIN for ever", _first(10**9, errno.EAGAIN), ids=np.array([[0]])),
    Case("EINVAL once", lambda raw: [Fault(3, 1, result=-errno.EINVAL)]),
    Case("ENXIO once", lambda raw: [Fault(3, 1, result=-errno.ENXIO)]),
    Case("a bad sector", _bad_sector, ids=_FEW, after=_OTHERS),
    Case("a bad sector, `zero-rows`", _bad_sector, ids=_FEW, after=_OTHERS, zero_rows=True),
    Case("zero bytes once", lambda raw: [Fault(0, 1, result=0)], ids=np.array([[0]])),
    Case("a file is cut while it is open", change=_truncate, ids=_LAST, after=_OTHERS),
    Case(
        "a file is cut while it is open, `zero-rows`",
        change=_truncate,
        ids=_LAST,
        after=_OTHERS,
        zero_rows=True,
    ),
    Case("a file is written to while it is open", change=_overwrite, wait_s=PAUSE_S),
    Case("one read never ends", lambda raw: [Fault(20, 1, delay_ms=-1)]),
    Case("no read ever ends", lambda raw: [Fault(0, 10**9, delay_ms=-1)]),
)


def outcome(case: Case, kind: str, folder: Path) -> str:
    """Try one fault on one way to read, and say what came of it."""
    for _ in range(20):
        found = _try(case, kind, folder)
        if found is not None:
            return found
    raise AssertionError("the machine is too busy: a second passed between two gathers")


def _try(case: Case, kind: str, folder: Path) -> str | None:
    folder.mkdir(parents=True, exist_ok=True)
    raw = raw_tables.write(folder, np.random.default_rng(1), shard_rows=(3000, 3000, 1234))
    if case.faults is not None and kind not in DISK_KINDS:
        return "-"  # the kernel reads, or nobody does
    ids = np.random.default_rng(2).integers(0, raw.num_rows, (8, 16))
    ids = ids if case.ids is None else case.ids
    table = _open(raw, kind, case)
    try:
        if case.change is not None:
            began = time.monotonic()
            assert np.array_equal(gather(table, ids), raw.expected(ids))
            case.change(raw)
            time.sleep(case.wait_s)
        first = _gathered(table, raw, ids, case)
        # without a pause the files must not have been looked at again
        if case.change is not None and case.wait_s == 0 and time.monotonic() - began > 0.9:
            return None
        then = _gathered(table, raw, ids if case.after is None else case.after, case)
    finally:
        table.close()
    if then == "right" and first.startswith("right"):
        return first
    return f"{first}; {'then' if case.after is None else 'other rows'} {then}"


def _open(raw: RawTable, kind: str, case: Case) -> _core.DiskTable | _core.ResidentTable:
    if kind == "mapped":
        return _core.ResidentTable(raw.paths, raw.planes, mapped=True, zero_rows=case.zero_rows)
    if kind == "loaded":
        return raw.open(kind)
    options: dict[str, Any] = {"read_timeout_s": TIMEOUT_S, "zero_rows": case.zero_rows}
    return raw.open(kind, faults=case.faults(raw) if case.faults else [], **options)


def _gathered(
    table: _core.DiskTable | _core.ResidentTable, raw: RawTable, ids: Ids, case: Case
) -> str:
    """Say whether the rows are right, or which error came."""
    before = table.counters()
    try:
        rows = gather(table, ids)
    except ReadError as error:
        return errno.errorcode[error.errno or 0]
    counters = {name: count - before[name] for name, count in table.counters().items()}
    want = raw.expected(ids)
    if zeroed := counters["zeroed_rows"]:
        want[np.isin(ids, LOST_ROWS)] = 0
    if not np.array_equal(rows, want):
        return "WRONG BYTES"
    if zeroed:
        return f"right but for {zeroed} row{'' if zeroed == 1 else 's'} of zeroes"
    retries = counters["retries"]
    return f"right, {retries} retr{'y' if retries == 1 else 'ies'}" if retries else "right"


def matrix(folder: Path) -> list[list[str]]:
    """Try everything: for each case its words and the outcome for each of KINDS."""
    rows = []
    with ThreadPoolExecutor(len(KINDS)) as pool:
        for number, case in enumerate(CASES):
            places = [folder / f"{number}-{kind}" for kind in KINDS]
            rows.append([case.words, *pool.map(outcome, [case] * len(KINDS), KINDS, places)])
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return the matrix as a Markdown table."""
    heads = ["fault", *(_COLUMNS.get(kind, kind.replace("-", " ")) for kind in KINDS)]
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def replaced(text: str, table: str) -> str:
    """Return a document with the table between its two marks exchanged."""
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}\n{table}{_END}{after}"
