"""The device behind a path, on machines made of files and on this one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rowstream import block_device
from rowstream.block_device import device_of


class Machine:
    """A /proc and a /sys in a folder."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        (self.proc / "self").mkdir(parents=True)
        (self.sys / "dev/block").mkdir(parents=True)
        monkeypatch.setattr(block_device, "_PROC", self.proc)
        monkeypatch.setattr(block_device, "_SYS", self.sys)
        self.mounts: list[str] = []

    def mount(self, point: str | Path, kind: str, source: str) -> None:
        escaped = str(point).replace(" ", "\\040")
        self.mounts.append(
            f"36 25 0:99 / {escaped} rw,relatime shared:1 master:2 - {kind} {source} rw"
        )
        (self.proc / "self/mountinfo").write_text("\n".join(self.mounts) + "\n")

    def device(self, number: str, path: str, *, rotational: int = 0, partition: int = 0) -> Path:
        folder = self.sys / "devices" / path
        folder.mkdir(parents=True, exist_ok=True)
        if partition:
            (folder / "partition").write_text(f"{partition}\n")
        disk = folder.parent if partition else folder
        (disk / "queue").mkdir(exist_ok=True)
        (disk / "queue/rotational").write_text(f"{rotational}\n")
        (disk / "queue/iostats").write_text("1\n")
        (self.sys / "dev/block" / number).symlink_to(folder)
        return folder


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "machine", monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a folder" / "file"
    path.parent.mkdir()
    path.write_text("x")
    return path


def number_of(path: Path) -> str:
    device = os.stat(path).st_dev
    return f"{os.major(device)}:{os.minor(device)}"


@pytest.mark.parametrize(
    ("path", "rotational", "partition", "name", "kind"),
    [
        ("pci/nvme/nvme0/nvme0n1/nvme0n1p2", 0, 2, "nvme0n1p2", "nvme"),
        ("pci/ata1/sda/sda1", 1, 1, "sda1", "rotating"),
        ("pci/ata1/sda/sda1", 0, 1, "sda1", "ssd"),
        ("pci/virtio1/block/vda", 1, 0, "vda", "virtual"),
        ("pci/virtio2/host0/block/sda", 1, 0, "sda", "virtual"),
        ("mmc/mmcblk0/mmcblk0p1", 0, 1, "mmcblk0p1", "flash card"),
        ("virtual/block/loop3", 0, 0, "loop3", "loop"),
        ("virtual/block/zram0", 0, 0, "zram0", "memory"),
        ("virtual/block/nbd0", 0, 0, "nbd0", "network"),
    ],
)
def test_kinds_of_device(
    made: Machine, file: Path, path: str, rotational: int, partition: int, name: str, kind: str
) -> None:
    made.mount("/", "ext4", "/dev/root")
    folder = made.device(number_of(file), path, rotational=rotational, partition=partition)
    disk = folder.parent if partition else folder
    (disk / "device").mkdir()
    (disk / "device/model").write_text("Model 9   \n")
    found = device_of(file)
    assert (found.name, found.kind, found.rotational) == (name, kind, bool(rotational))
    assert (found.file_system, found.model) == ("ext4", "Model 9")


def test_a_volume_is_what_lies_below_it(made: Machine, file: Path) -> None:
    made.mount("/", "xfs", "/dev/mapper/vg-data")
    part = made.device("8:17", "pci/ata2/sdb/sdb1", rotational=1, partition=1)
    volume = made.device(number_of(file), "virtual/block/dm-0", rotational=1)
    (volume / "slaves").mkdir()
    (volume / "slaves/sdb1").symlink_to(part)
    assert (device_of(file).name, device_of(file).kind) == ("dm-0", "rotating")


@pytest.mark.parametrize(
    ("file_system", "kind"),
    [("nfs4", "network"), ("9p", "network"), ("tmpfs", "memory"), ("overlay", "unknown")],
)
def test_file_systems_without_a_device(
    made: Machine, file: Path, file_system: str, kind: str
) -> None:
    made.mount("/", "ext4", "/dev/root")
    made.mount(file.parent, "ext4", "hidden")
    made.mount(file.parent, file_system, "server:/export")  # over the one before
    made.mount(f"{file.parent}/fil", "btrfs", "no parent of the file")
    found = device_of(file)
    assert (found.file_system, found.mount_point) == (file_system, str(file.parent))
    assert (found.name, found.number, found.kind) == (None, None, kind)
    assert found.completed_reads() is None


def test_completed_reads_are_the_device_s_own(made: Machine, file: Path) -> None:
    made.mount("/", "ext4", "/dev/root")
    number = number_of(file)
    folder = made.device(number, "pci/nvme/nvme0/nvme0n1/nvme0n1p2", partition=2)
    major, minor = number.split(":")
    lines = ["   7 0 loop0 1 2 3 4", f" {major} {minor} nvme0n1p2 100 20 3 4 5 6 7 8 9 10 11"]
    (made.proc / "diskstats").write_text("\n".join(lines) + "\n")
    found = device_of(file)
    assert found.completed_reads() == 120
    (folder.parent / "queue/iostats").write_text("0\n")
    assert found.completed_reads() is None
    (folder.parent / "queue/iostats").write_text("1\n")
    (made.proc / "diskstats").unlink()
    assert found.completed_reads() is None


def test_a_file_system_with_a_number_of_its_own_says_what_it_is_mounted_from(
    made: Machine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # btrfs: no such device in /sys, but its source is one
    made.mount("/", "btrfs", "/dev/made")
    made.device("250:7", "pci/nvme/nvme7/nvme7n1")
    real = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if path != "/dev/made":
            return real(path, **options)
        fields = (kind | 0o600, 1, 1, 1, 0, 0, 0, 0, 0, 0)
        return os.stat_result(fields, {"st_rdev": os.makedev(250, 7)})

    monkeypatch.setattr(os, "stat", stat)
    kind = 0o060000  # a block device
    assert (device_of(file).name, device_of(file).number) == ("nvme7n1", "250:7")
    kind = 0o020000  # a character device
    assert device_of(file).number is None


def test_devices_that_are_not_counted_or_have_no_queue(made: Machine, file: Path) -> None:
    made.mount("/", "ext4", "/dev/root")
    folder = made.device(number_of(file), "pci/nvme/nvme0/nvme0n1")
    (made.proc / "diskstats").write_text("   7 0 loop0 1 2 3 4\n")
    found = device_of(file)
    assert (found.completed_reads(), found.most_requests()) == (None, None)
    (folder / "queue/nr_requests").write_text("1023\n")
    assert found.most_requests() == 1023
    assert dataclasses.replace(found, number=None).most_requests() is None


def test_links_that_lead_back_to_where_they_came_from(made: Machine, file: Path) -> None:
    made.mount("/", "ext4", "/dev/root")
    folder = made.device(number_of(file), "virtual/block/dm-0")
    (folder / "slaves").mkdir()
    (folder / "slaves/dm-0").symlink_to(folder)
    assert device_of(file).name == "dm-0"


def test_a_machine_that_shows_nothing(made: Machine, file: Path) -> None:
    found = device_of(file)
    assert (found.file_system, found.name, found.kind) == ("unknown", None, "unknown")
    with pytest.raises(FileNotFoundError):
        device_of(file.parent / "absent")


def test_this_machine_agrees_with_findmnt(tmp_path: Path) -> None:
    try:
        done = subprocess.run(
            ["findmnt", "-n", "-o", "FSTYPE,TARGET", "--target", str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no findmnt")
    if done.stdout.count("\n") != 1:
        pytest.skip("several mounts at one point")
    file_system, mount_point = done.stdout.strip().split(None, 1)
    found = device_of(tmp_path)
    assert (found.file_system, found.mount_point) == (file_system, mount_point)
