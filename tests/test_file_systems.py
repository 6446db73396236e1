"""File systems of every kind: mounted for a moment where this machine lets us, skipped with the
reason where not. Rows are right, and `doctor` says where they lie.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from platforms import checkpoint, look, need_root, skip

pytestmark = pytest.mark.platform


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
