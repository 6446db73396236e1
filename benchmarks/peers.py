"""What gathers are measured against: the bare ring of raw_ring.cpp, compiled on demand, and fio.

Both only read; what they are given to read is decided elsewhere.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from benchmarks.native import compiled
from benchmarks.spans import Spans
from numpy.typing import NDArray

__all__ = ["COOP_TASKRUN", "FioMissing", "FioRun", "RawRing", "need_fio", "run_fio"]

COOP_TASKRUN = 1 << 8  # IORING_SETUP_COOP_TASKRUN, Linux 5.19


class FioMissing(RuntimeError):
    """There is no fio with an io_uring engine here; the text says why."""


def _library() -> ctypes.CDLL:
    loaded = compiled("raw_ring")
    lists = [ctypes.c_void_p] * 4
    loaded.raw_open.restype = ctypes.c_void_p
    loaded.raw_open.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 4]
    loaded.raw_replay.restype = loaded.raw_once.restype = ctypes.c_int64
    loaded.raw_replay.argtypes = [*lists, ctypes.c_uint64, ctypes.c_uint]
    loaded.raw_once.argtypes = [*lists, ctypes.c_uint64]
    loaded.raw_registered.argtypes = [ctypes.c_void_p]
    return loaded


class RawRing:
    """A bare io_uring loop over some files; open until the process ends."""

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        depth: int,
        slot_bytes: int,
        setup_flags: int = COOP_TASKRUN,
    ) -> None:
        """Open the files for direct reads of at most `slot_bytes`, `depth` at a time."""
        self._library = _library()
        names = (ctypes.c_char_p * len(paths))(*(os.fsencode(path) for path in paths))
        self.depth = depth
        self._handle = self._library.raw_open(names, len(paths), depth, slot_bytes, setup_flags)
        if not self._handle:
            code = ctypes.get_errno()
            raise OSError(code, f"raw ring: {os.strerror(code)}")

    @property
    def registered(self) -> str:
        """What the kernel let the ring register."""
        return ("nothing", "files", "buffers", "files and buffers")[
            self._library.raw_registered(self._handle)
        ]

    def replay_ns(self, spans: Spans, at_least: int | None = None) -> int:
        """Read all spans, `depth` in flight; a call waits for `at_least`, by default a quarter."""
        wait_for = max(1, self.depth // 4) if at_least is None else at_least
        return self._checked(self._library.raw_replay(self._handle, *_lists(spans), wait_for))

    def once_ns(self, spans: Spans) -> int:
        """Read all spans, `depth` at most, by one system call."""
        if len(spans) > self.depth:
            raise ValueError(f"{len(spans)} spans at once, depth is {self.depth}")
        return self._checked(self._library.raw_once(self._handle, *_lists(spans)))

    def _checked(self, result: int) -> int:
        if result < 0:
            raise OSError(-result, f"raw ring: {os.strerror(-result)}")
        return result


def _lists(spans: Spans) -> tuple[int, int, int, int]:
    return _address(spans.files), _address(spans.offsets), _address(spans.lengths), len(spans)


def _address(array: NDArray[np.uint32] | NDArray[np.uint64]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


def need_fio() -> str:
    """Return where fio is, or raise FioMissing with the reason."""
    found = shutil.which("fio")
    if found is None:
        raise FioMissing("fio is not installed")
    engines = subprocess.run([found, "--enghelp"], capture_output=True, text=True, check=False)
    if "io_uring" not in engines.stdout.split():
        raise FioMissing(f"{found} has no io_uring engine")
    return found


@dataclass(frozen=True, slots=True)
class FioRun:
    """What one run of fio did."""

    reads: int
    reads_per_s: float


def run_fio(
    paths: Sequence[str | os.PathLike[str]],
    *,
    depth: int,
    seconds: float = 2.0,
    block_bytes: int = 4096,
) -> FioRun:
    """Let fio do random direct reads over the files, all of them evenly, `depth` in flight.

    Files and buffers are registered and a quarter of the depth goes through each system call, as in
    the ring that it is compared with: out of the box fio makes one call for each read.
    """
    names = ":".join(os.fspath(path).replace(":", "\\:") for path in paths)
    batch = max(1, depth // 4)
    command = [
        need_fio(),
        "--name=random",
        f"--filename={names}",
        "--readonly",
        "--rw=randread",
        f"--bs={block_bytes}",
        "--direct=1",
        "--ioengine=io_uring",
        "--fixedbufs",
        "--registerfiles",
        f"--iodepth={depth}",
        f"--iodepth_batch_submit={batch}",
        f"--iodepth_batch_complete_min={batch}",
        f"--iodepth_batch_complete_max={depth}",
        "--file_service_type=random",
        "--norandommap",
        "--randrepeat=0",
        "--time_based",
        f"--runtime={int(seconds * 1000)}ms",
        "--output-format=json",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise RuntimeError(f"fio: {ran.stderr.strip() or ran.stdout.strip()}")
    # warnings may stand before the report
    read = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"][0]["read"]
    return FioRun(int(read["total_ios"]), float(read["iops"]))
