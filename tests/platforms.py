"""Cases of a platform: a checkpoint read and examined there in a process of its own.

With ROWSTREAM_PLATFORMS=FILE each case adds a line of JSON to that file: tools/platform_table.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

import checkpoints
from children import unmeasured

ROWS, ROW_BYTES = 20_000, 160
NOBODY = 65534

# Reads rows through a store and by hand, and says what doctor says. `restrict` runs when all is
# imported: a user without rights may not even read this interpreter.
CHILD = """
import contextlib, ctypes, io, json, os, resource, struct, sys
import numpy as np
from rowstream import RowStore
from rowstream.cli import main

def say(path):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert main(["doctor", path]) == 0
    return text.getvalue()

def refuse(number, errno):
    # load the system call's number; is it this one? refuse, or allow
    code = struct.pack("<HBBIHBBIHBBIHBBI", 0x20, 0, 0, 0, 0x15, 0, 1, number,
                       0x06, 0, 0, 0x00050000 | errno, 0x06, 0, 0, 0x7FFF0000)
    buffer = ctypes.create_string_buffer(code)
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
    program = Program(4, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program), 0, 0):
        print("this machine takes no seccomp filter")
        sys.exit(77)

def drop_root(locked_memory):
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (locked_memory, locked_memory))
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)

def cached_pages(name):
    with open(name, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        pages = (size + 4095) // 4096
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        numbers = [ctypes.c_int] * 3
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *numbers, ctypes.c_long]
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
        at = libc.mmap(None, size, 1, 1, file.fileno(), 0)
        there = ctypes.create_string_buffer(pages)
        assert libc.mincore(at, size, there) == 0
        return sum(page & 1 for page in there.raw)

path, raw = sys.argv[1:]
table = os.path.join(path, "model.safetensors")
if {warm}:
    say(path)
{restrict}
with open(table, "rb") as file:
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
ids = np.random.default_rng().integers(0, {rows}, 3000)
with RowStore.open(path) as store:
    before = cached_pages(table)
    got = store.gather(ids)
    again = store.gather(ids[::-1].copy())
    stats = store.stats()
    cached = cached_pages(table) - before
with open(raw, "rb") as file:
    want = np.frombuffer(file.read(), np.uint8).reshape({rows}, {row_bytes})[ids]
print(json.dumps({
    "right": bool((got == want).all() and (again == want[::-1]).all()),
    **{name: stats[name] for name in ("backend", "reader", "reason")},
    "cached_pages": cached,
    "doctor": say(path),
}))
"""


def record(case: str, **found: Any) -> None:
    if name := os.environ.get("ROWSTREAM_PLATFORMS"):
        with open(name, "a") as file:
            file.write(json.dumps({"case": case, **found}) + "\n")


def skip(case: str, reason: str) -> NoReturn:
    record(case, skipped=reason)
    pytest.skip(reason)


def doctor_field(text: str, label: str) -> str:
    """A field of doctor's text in one line."""
    lines, inside = [], False
    for line in text.splitlines():
        inside = line.startswith(label) or (inside and line.startswith(" "))
        if inside:
            lines.append(line.removeprefix(label).strip())
    return "; ".join(lines)


@contextmanager
def checkpoint(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Write a checkpoint and, elsewhere, the rows alone; both readable by anybody."""
    with tempfile.TemporaryDirectory(prefix="rowstream-rows-") as name:
        raw = Path(name) / "rows"
        rows = np.random.default_rng().bytes(ROWS * ROW_BYTES)
        raw.write_bytes(rows)
        array = checkpoints.Array(
            f"{checkpoints.root()}.ngram_embedding.weight", "BF16", (ROWS, ROW_BYTES // 2), rows
        )
        folder.mkdir(exist_ok=True)
        checkpoints.write_file(folder / "model.safetensors", [array])
        with open(folder / "model.safetensors", "rb") as file:
            os.fsync(file.fileno())
        for path in (Path(name), folder):
            path.chmod(0o755)
        yield folder, raw


def look(case: str, folder: Path, raw: Path, restrict: str = "", what: str = "") -> dict[str, Any]:
    """Read and examine a checkpoint in a process of its own, and keep what doctor said."""
    code = CHILD.replace("{restrict}", restrict).replace("{warm}", str(bool(restrict)))
    code = code.replace("{rows}", str(ROWS)).replace("{row_bytes}", str(ROW_BYTES))
    argv = [sys.executable, "-c", code, os.fspath(folder), os.fspath(raw)]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=120, env=unmeasured()
    )
    if done.returncode == 77:
        skip(case, done.stdout.strip())
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["right"]
    assert found["backend"] == "disk"
    # direct reads leave nothing in the page cache; 3,000 rows lie in most of 780 pages
    if "reads aligned" in doctor_field(found["doctor"], "O_DIRECT"):
        assert found["cached_pages"] < 20
    for label in ("io_uring", "O_DIRECT", "device", "auto chooses", "verdict"):
        found[label] = doctor_field(found["doctor"], label)
        assert found[label]
    kept = ("io_uring", "O_DIRECT", "device", "auto chooses")
    record(case, what=what, **{label: found[label] for label in kept})
    return found


def need_root(case: str) -> None:
    if os.geteuid() != 0:
        skip(case, "needs root")
