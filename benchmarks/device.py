"""The block device under a folder: its name, and the kernel's count of the reads it has done.

A read that never reached the device (a hole, the page cache) measures something else.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

__all__ = ["Device"]

_DISKSTATS = Path("/proc/diskstats")


class Device:
    """The device that holds a path; counts include what other processes read from it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Find the device. Raises RuntimeError where reads are not counted (tmpfs, network)."""
        number = os.stat(path).st_dev
        self._number = (str(os.major(number)), str(os.minor(number)))
        found = self._fields()
        if found is None:
            raise RuntimeError(
                f"{os.fspath(path)}: device {':'.join(self._number)} is not in {_DISKSTATS}, "
                "so reads cannot be checked against it"
            )
        self.name = found[2]

    def reads(self) -> int:
        """Return the reads completed since boot."""
        fields = self._fields()
        assert fields is not None
        return int(fields[3])

    def check(self, before: int, issued: int) -> None:
        """Raise RuntimeError unless the device did nearly all the reads issued since `before`."""
        grown = self.reads() - before
        if grown < 0.95 * issued:
            raise RuntimeError(f"{self.name} did {grown} reads, {issued} were issued: no report")

    def machine(self) -> str:
        """Return a name for results: processors, kernel, device."""
        kernel = platform.release().split("-")[0]
        return f"{os.cpu_count()}cpu-linux{kernel}-{self.name}"

    def _fields(self) -> list[str] | None:
        for line in _DISKSTATS.read_text(encoding="ascii").splitlines():
            fields = line.split()
            if (fields[0], fields[1]) == self._number:
                return fields
        return None
