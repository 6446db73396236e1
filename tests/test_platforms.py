"""Machines that refuse something, and file systems of every kind: tried for real where this machine
lets us, skipped with the reason where not. Rows are right, and `doctor` says what is the matter.

With ROWSTREAM_PLATFORMS=FILE each case adds a line of JSON to that file: tools/platform_table.py.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

import checkpoints
from children import unmeasured

pytestmark = pytest.mark.platform

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


# --- io_uring refused


@pytest.fixture
def plain() -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory(prefix="rowstream-platform-") as name:
        Path(name).chmod(0o755)
        with checkpoint(Path(name) / "model") as made:
            yield made


def test_nothing_refused(plain: tuple[Path, Path]) -> None:
    found = look("nothing refused", *plain, what="this machine as it is")
    assert found["reader"] in ("uring", "pool")


SETUP, ENTER, REGISTER = 425, 426, 427


@pytest.mark.parametrize(
    ("call", "number", "name"),
    [
        *((SETUP, number, name) for number, name in ((1, "EPERM"), (38, "ENOSYS"), (12, "ENOMEM"))),
        (ENTER, 1, "EPERM"),
    ],
)
def test_a_seccomp_filter_that_refuses_io_uring(
    call: int, number: int, name: str, plain: tuple[Path, Path]
) -> None:
    which = {SETUP: "io_uring_setup", ENTER: "io_uring_enter"}[call]
    case = f"seccomp: {which} gives {name}"
    restrict = f"refuse({call}, {number})"
    found = look(case, *plain, restrict, "a filter as container runtimes install it")
    assert found["reader"] == "pool"
    assert os.strerror(number) in found["reason"]
    assert f"({name})" in found["io_uring"]
    assert os.strerror(number) in found["auto chooses"]


def test_a_seccomp_filter_that_refuses_registering(plain: tuple[Path, Path]) -> None:
    found = look(
        "seccomp: io_uring_register gives ENOMEM",
        *plain,
        f"refuse({REGISTER}, 12)",
        "the ring stays, unregistered",
    )
    assert found["reader"] == "uring"
    assert "buffers not registered (Cannot allocate memory)" in found["reason"]
    assert found["io_uring"].startswith("allowed, buffers not registered, files not registered")


@pytest.mark.parametrize("limit_bytes", [0, 64 << 10])
def test_a_small_limit_of_locked_memory(limit_bytes: int, plain: tuple[Path, Path]) -> None:
    case = f"ulimit -l {limit_bytes >> 10}"
    need_root(case)
    found = look(case, *plain, f"drop_root({limit_bytes})", "an ordinary user")
    if found["reader"] == "pool":  # before Linux 5.12 the ring itself counts
        assert "Cannot allocate memory" in found["reason"]
        return
    assert found["reader"] == "uring"
    assert "buffers not registered (Cannot allocate memory)" in found["reason"]
    assert found["io_uring"].startswith("allowed, buffers not registered")
    assert "ulimit -l unlimited" in found["io_uring"]


def test_an_ordinary_user(plain: tuple[Path, Path]) -> None:
    need_root("an ordinary user")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    look("an ordinary user", *plain, f"drop_root({limit})", "the usual limit of locked memory")


def test_the_sysctl_that_refuses_io_uring(plain: tuple[Path, Path]) -> None:
    case = "sysctl kernel.io_uring_disabled=1"
    need_root(case)
    # of the whole machine, no namespace has its own: for a moment, and only where one said so
    if not os.environ.get("ROWSTREAM_CHANGE_SYSCTL"):
        skip(case, "changes the whole machine: only with ROWSTREAM_CHANGE_SYSCTL=1")
    sysctl = Path("/proc/sys/kernel/io_uring_disabled")
    if not os.access(sysctl, os.W_OK):
        skip(case, f"{sysctl} cannot be written")
    before = sysctl.read_text()
    try:
        try:
            sysctl.write_text("1")  # root may go on
        except OSError as error:
            skip(case, f"{sysctl}: {error.strerror}")
        found = look(case, *plain, f"drop_root({8 << 20})", "an ordinary user")
    finally:
        sysctl.write_text(before)
    assert found["reader"] == "pool"
    assert "Operation not permitted (EPERM)" in found["io_uring"]
    assert "sysctl kernel.io_uring_disabled=0" in found["io_uring"]


# --- file systems


def command(*argv: str | os.PathLike[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def unmount(point: Path) -> None:
    """Take a file system away, once the kernel has let go of it."""
    # a ring's files are released by a worker of the kernel, some time after the process has ended
    until = time.monotonic() + 20
    while True:
        try:
            command("umount", point)
            return
        except subprocess.CalledProcessError:
            if time.monotonic() > until:
                command("umount", "--lazy", point)
                return
        time.sleep(0.05)


class Mounts(ExitStack):
    """Loop devices and mounts that are gone when the test ends, whatever happened."""

    def __init__(self, case: str) -> None:
        super().__init__()
        need_root(case)
        self._case = case
        self.folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="rowstream-fs-")))
        self.folder.chmod(0o755)

    def _try(self, *argv: str | os.PathLike[str]) -> str:
        if shutil.which(argv[0]) is None:
            skip(self._case, f"no {argv[0]} here")
        try:
            return command(*argv)
        except subprocess.CalledProcessError as error:
            skip(self._case, f"{argv[0]}: {error.stderr.strip().splitlines()[-1]}")

    def loop(self, size_mib: int, sector_bytes: int = 512) -> str:
        image = self.folder / "image"
        image.touch()
        os.truncate(image, size_mib << 20)
        sector = ("--sector-size", str(sector_bytes))
        device = self._try("losetup", "--find", "--show", *sector, image)
        self.callback(command, "losetup", "--detach", device)
        return device

    def make(self, device: str, file_system: str) -> None:
        quiet = {"ext4": ["-q"], "xfs": ["-q", "-f"], "btrfs": ["-q", "-f"]}[file_system]
        self._try(f"mkfs.{file_system}", *quiet, device)

    def mount(self, source: str, name: str, *options: str) -> Path:
        point = self.folder / name
        point.mkdir(exist_ok=True)
        self._try("mount", *options, source, point)
        self.callback(unmount, point)
        with suppress(OSError):  # read-only
            point.chmod(0o755)
        return point


def on_loop(case: str, file_system: str, size_mib: int, sector_bytes: int = 512) -> dict[str, Any]:
    with Mounts(case) as mounts:
        device = mounts.loop(size_mib, sector_bytes)
        mounts.make(device, file_system)
        point = mounts.mount(device, "disk", "-t", file_system)
        with checkpoint(point / "model") as made:
            found = look(case, *made, what=f"an image on {device[:9]}")
    assert f"{file_system} at {point}" in found["device"]
    assert ", loop;" in found["device"]
    return found


@pytest.mark.parametrize(("file_system", "size_mib"), [("ext4", 64), ("xfs", 320), ("btrfs", 128)])
@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_file_systems_on_sectors_of_a_size(
    file_system: str, size_mib: int, sector_bytes: int
) -> None:
    case = f"{file_system} on sectors of {sector_bytes} bytes"
    found = on_loop(case, file_system, size_mib, sector_bytes)
    # btrfs does not say what it needs, and reads less than its own blocks through the page cache
    least = 4096 if file_system == "btrfs" else sector_bytes
    assert found["O_DIRECT"] == f"yes, reads aligned to {least} bytes"


def test_sectors_of_4096_bytes_without_a_word_from_statx() -> None:
    # what kernels before 6.1 say: nothing; the alignment is then found by trying
    case = "ext4 on sectors of 4096 bytes, statx silent"
    with Mounts(case) as mounts:
        device = mounts.loop(64, 4096)
        mounts.make(device, "ext4")
        point = mounts.mount(device, "disk", "-t", "ext4")
        with checkpoint(point / "model") as made:
            found = look(case, *made, "refuse(332, 38)", "statx refused by a filter")
    assert found["O_DIRECT"] == "yes, reads aligned to 4096 bytes"


def test_tmpfs() -> None:
    with Mounts("tmpfs") as mounts:
        point = mounts.mount("none", "memory", "-t", "tmpfs", "-o", "size=32m")
        with checkpoint(point / "model") as made:
            found = look("tmpfs", *made, what="everything in memory")
    assert found["reader"] == "inline"
    assert "the table is on tmpfs" in found["auto chooses"]
    assert ", memory;" in found["device"]
    assert found["verdict"] == "the file is in memory already, there is no disk to read"


@pytest.mark.parametrize("upper", ["ext4", "tmpfs"])
@pytest.mark.parametrize("where", ["lower", "upper"])
def test_overlay(upper: str, where: str) -> None:
    case = f"overlay, table in its {where} folder, upper on {upper}"
    with Mounts(case) as mounts, ExitStack() as kept:
        device = mounts.loop(64)
        mounts.make(device, "ext4")
        disk = mounts.mount(device, "disk", "-t", "ext4")
        top = disk
        if upper == "tmpfs":
            top = mounts.mount("none", "memory", "-t", "tmpfs", "-o", "size=32m")
        folders = {"lowerdir": disk / "lower", "upperdir": top / "upper", "workdir": top / "work"}
        for folder in folders.values():
            folder.mkdir()
        if where == "lower":
            _, raw = kept.enter_context(checkpoint(disk / "lower" / "model"))
        options = ",".join(f"{name}={folder}" for name, folder in folders.items())
        point = mounts.mount("none", "merged", "-t", "overlay", "-o", options)
        if where == "upper":
            _, raw = kept.enter_context(checkpoint(point / "model"))
        found = look(case, point / "model", raw, what="as containers have it")
    assert f"overlay at {point}" in found["device"]


def test_a_read_only_mount() -> None:
    case = "ext4, mounted read-only"
    with Mounts(case) as mounts:
        device = mounts.loop(64)
        mounts.make(device, "ext4")
        point = mounts.mount(device, "disk", "-t", "ext4")
        with checkpoint(point / "model") as (folder, raw):
            mounts._try("mount", "-o", "remount,ro", point)
            try:
                look(case, folder, raw, what="nothing can be written beside the table")
                argv = [sys.executable, "-m", "rowstream", "doctor", os.fspath(point)]
                path = os.pathsep.join(path for path in sys.path if path)
                done = subprocess.run(
                    argv,
                    capture_output=True,
                    text=True,
                    check=False,
                    env={**os.environ, "PYTHONPATH": path},
                )
                assert done.returncode == 1
                assert done.stderr.count("\n") == 1
                assert "read-only file system" in done.stderr.lower()
            finally:
                mounts._try("mount", "-o", "remount,rw", point)


def test_a_file_system_that_takes_no_direct_reads() -> None:
    # squashfs unpacks what it reads
    case = "squashfs"
    with Mounts(case) as mounts, checkpoint(mounts.folder / "model") as (folder, raw):
        image = mounts.folder / "image"
        mounts._try("mksquashfs", folder, image, "-quiet", "-no-progress")
        point = mounts.mount(os.fspath(image), "disk", "-t", "squashfs", "-o", "loop,ro")
        found = look(case, point, raw, what="compressed and read-only")
    assert found["O_DIRECT"].startswith("no: ")
    assert "page cache" in found["O_DIRECT"]
