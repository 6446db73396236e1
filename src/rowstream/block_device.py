"""The block device and file system behind a path, as the kernel describes them.

Knows the device's own count of reads. Reads /proc and /sys only; measures nothing. What a
container hides stays None.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BlockDevice", "device_of"]

_PROC = Path("/proc")
_SYS = Path("/sys")

_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})
# a server or a host answers each read; 9p, virtiofs and drvfs share a host's folders
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "9p", "virtiofs", "drvfs", "glusterfs"}
    | {"lustre", "beegfs", "gpfs", "afs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse"}
    | {"fuse.rclone", "fuse.glusterfs", "fuse.ceph", "fuse.juicefs", "fuse.blobfuse2"}
    | {"fuse.mount-s3"}
)
_MOUNT_ESCAPE = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """What a file lies on; `name` and `number` are None where no block device can be seen."""

    file_system: str  # as the kernel names it: ext4, nfs4, tmpfs
    mount_point: str
    name: str | None  # nvme0n1p2
    number: str | None  # major:minor
    model: str | None
    kind: str  # nvme, ssd, rotating, virtual, memory, network, flash card, loop or unknown
    rotational: bool | None  # the kernel's flag; means nothing on a virtual disk

    def completed_reads(self) -> int | None:
        """Return the reads done since the machine started, or None if they are not counted.

        A read merged into a neighbor's counts.
        """
        if self.number is None or _text(_queue(self.number) / "iostats") == "0":
            return None
        try:
            lines = (_PROC / "diskstats").read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            words = line.split()
            if len(words) > 4 and ":".join(words[:2]) == self.number:
                return int(words[3]) + int(words[4])
        return None

    def most_requests(self) -> int | None:
        """Return how many requests the kernel queues for the device, or None if unknown."""
        if self.number is None:
            return None
        try:
            return int(_text(_queue(self.number) / "nr_requests") or "")
        except ValueError:
            return None


def device_of(path: str | os.PathLike[str]) -> BlockDevice:
    """Return what a path lies on, links followed. Raises OSError if there is no such path."""
    status = os.stat(path)
    mount_point, file_system, source = _mount(os.path.realpath(path))
    number = _number(status.st_dev, source)
    if number is None:
        kind = (
            "memory"
            if file_system in _MEMORY
            else "network"
            if file_system in _NETWORK
            else "unknown"
        )
        return BlockDevice(file_system, mount_point, None, None, None, kind, None)
    flag = _text(_queue(number) / "rotational")
    rotational = None if flag is None else flag == "1"
    disk = _disk(_SYS / "dev/block" / number)
    return BlockDevice(
        file_system,
        mount_point,
        os.path.basename(os.path.realpath(_SYS / "dev/block" / number)),
        number,
        _text(disk / "device/model"),
        _kind(disk, rotational),
        rotational,
    )


def _mount(path: str) -> tuple[str, str, str]:
    """Return mount point, file system and source of the mount that a real path lies in."""
    found = ("/", "unknown", "")
    try:
        lines = (_PROC / "self/mountinfo").read_bytes().splitlines()
    except OSError:
        return found
    for line in lines:
        # proc(5): ... mount point ... [optional fields] - type source options
        words = [_MOUNT_ESCAPE.sub(lambda m: bytes([int(m[1], 8)]), word) for word in line.split()]
        if b"-" not in words:
            continue
        dash = words.index(b"-")
        point = os.fsdecode(words[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # of two mounts at the same point the later one hides the earlier
        if inside and len(point) >= len(found[0]):
            found = (point, os.fsdecode(words[dash + 1]), os.fsdecode(words[dash + 2]))
    return found


def _number(device: int, source: str) -> str | None:
    number = f"{os.major(device)}:{os.minor(device)}"
    if (_SYS / "dev/block" / number).exists():
        return number
    # btrfs and its like have numbers of their own, and say where they are mounted from
    try:
        status = os.stat(source)
    except (OSError, ValueError):
        return None
    if not stat.S_ISBLK(status.st_mode):
        return None
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    return number if (_SYS / "dev/block" / number).exists() else None


def _queue(number: str) -> Path:
    device = Path(os.path.realpath(_SYS / "dev/block" / number))
    return (device.parent if (device / "partition").exists() else device) / "queue"


def _disk(device: Path) -> Path:
    """Return the whole disk, below partitions, volumes and arrays."""
    disk = Path(os.path.realpath(device))
    for _ in range(8):  # volumes on arrays on partitions; a bound, as these are links
        if (disk / "partition").exists():
            disk = disk.parent
        try:
            below = sorted((disk / "slaves").iterdir())
        except OSError:
            break
        if not below:
            break
        disk = Path(os.path.realpath(below[0]))
    return disk


def _kind(disk: Path, rotational: bool | None) -> str:
    name = disk.name
    if name.startswith("nvme"):
        return "nvme"
    if name.startswith(("vd", "xvd")) or "/virtio" in os.fspath(disk):
        return "virtual"
    if name.startswith("mmcblk"):
        return "flash card"
    if name.startswith(("loop", "nbd")):
        return "loop" if name.startswith("loop") else "network"
    if name.startswith(("ram", "zram", "pmem")):
        return "memory"
    if rotational is None:
        return "unknown"
    return "rotating" if rotational else "ssd"


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None
