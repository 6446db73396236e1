"""A stream's part of a lookup played by Python, word for word as device/kernels.cu does it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rowstream import _core

OK, READ, TIMEOUT, IDS, CLOSED, MISUSE = range(6)
_DOOR, _FLAG, _HEADER, _FAULT, _FAULTS, _ROWS = 0, 128, 256, 384, 392, 512


class Stuck(AssertionError):
    """A wait that nobody ended."""


def until(true: Callable[[], bool], within_s: float = 60.0, *, spin: bool = False) -> float:
    """Wait for something; return the seconds that it took.

    Gives the processor away between two looks, which may take 50 us, unless it is to spin.
    """
    began = time.perf_counter()
    while not true():
        if time.perf_counter() - began > within_s:
            raise Stuck(f"nothing after {within_s} s")
        if not spin:
            time.sleep(0)
    return time.perf_counter() - began


class Stream:
    """Steps of one channel in stream order; holds what would be the channel's device memory."""

    def __init__(self, channel: _core.Channel) -> None:
        self.channel = channel
        self.epoch = 0
        self.busy = False
        memory = (ctypes.c_uint8 * 640).from_address(channel.address)
        self._words: NDArray[np.uint8] = np.ctypeslib.as_array(memory)

    def word(self, offset: int, dtype: type = np.uint64) -> NDArray[np.generic]:
        return self._words[offset : offset + np.dtype(dtype).itemsize].view(dtype)

    def post(self, ids: NDArray[np.int64]) -> None:
        was, self.busy = self.busy, True
        self.epoch += 1
        if was:
            self.word(_DOOR)[0] = 2**64 - 1
            return
        flat = ids.reshape(-1)
        self.channel.mailbox[: flat.size] = flat
        self.word(_ROWS, np.uint32)[0] = flat.size
        self.word(_DOOR)[0] = self.epoch

    def wait(self, within_s: float = 60.0, *, spin: bool = False) -> float:
        flag = self.word(_FLAG, np.uint32)
        took = until(lambda: bool(flag[0] >= 1), within_s, spin=spin)
        flag[0] = 0
        return took

    def take(self, rows: int, patience_s: float = 60.0) -> NDArray[np.uint8] | None:
        """Return the rows, or None for a void step.

        After a stray flag the wait is the header's: it may come for so long.
        """
        until_s = time.perf_counter() + patience_s
        header = int(self.word(_HEADER)[0])
        while header >> 8 != self.epoch and not 0 < header < 256:
            if time.perf_counter() >= until_s:
                break
            header = int(self.word(_HEADER)[0])
        self.busy = False
        if header == self.epoch << 8:
            return np.array(self.channel.staging[:rows])
        ours = header >> 8 in (0, self.epoch)
        status = header & 255 if ours and header & 255 else MISUSE
        self.word(_FAULT)[0] = self.epoch << 8 | status
        self.word(_FAULTS, np.uint32)[0] += 1
        return None

    def step(self, ids: NDArray[np.int64], within_s: float = 60.0) -> NDArray[np.uint8] | None:
        self.post(ids)
        self.wait(within_s)
        rows = self.take(ids.size)
        return None if rows is None else rows.reshape(*ids.shape, -1)

    @property
    def last_fault(self) -> int:
        """The status of the last void step."""
        return int(self.word(_FAULT)[0]) & 255
