"""Memory that a GPU and the host share, reserved once and registered with the driver.

Owns the registration and the words of channels in the GPU's own memory. Both stay for the life of
the process where a captured graph may still point at them.
"""

from __future__ import annotations

import functools
import threading
import weakref

import torch

from rowstream import _core
from rowstream.device import driver

__all__ = ["PinnedArena", "States", "states"]

# arenas whose owner is gone; graphs may still use some of them
_orphans: list[_core.Arena] = []
_releasing = threading.Lock()


class PinnedArena:
    """Blocks for channels. It cannot grow: nothing can be pinned during a capture.

    Once it is collected, its memory is given back as soon as no graph uses it and another arena is
    made; at the end of the process by that alone, since a stream may still wait.
    """

    def __init__(self, num_bytes: int, cpus: list[int]) -> None:
        _release_orphans()
        self.core = _core.Arena(num_bytes, cpus)
        # equal on most machines, and never assumed to be
        self._shift = driver.pin(self.core.address, self.core.bytes) - self.core.address
        weakref.finalize(self, _orphans.append, self.core).atexit = False

    def on_device(self, address: int) -> int:
        """The device's address of an address in the arena."""
        return address + self._shift


def _release_orphans() -> None:
    with _releasing:
        for core in list(_orphans):
            if core.used_bytes == 0:
                driver.unpin(core.address)  # before it goes: what is registered must stay mapped
                _orphans.remove(core)


class States:
    """The words of channels in the memory of one GPU: int64[8] each, zeroed, never used twice.

    A graph that was destroyed leaves its epoch behind; zeroing that during another capture would
    become a part of that graph.
    """

    _CHUNK = 4096
    _SPARE = 512

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._chunks: list[torch.Tensor] = []
        self._left = 0
        self.refill()

    def refill(self) -> None:
        """Make more of them when few are left; never during a capture."""
        with self._lock:
            if self._left >= self._SPARE:
                return
            chunk = torch.zeros((self._CHUNK, 8), dtype=torch.int64, device=self._device)
            torch.cuda.current_stream(self._device).synchronize()
            self._chunks.append(chunk)
            self._left = self._CHUNK

    def take(self) -> torch.Tensor:
        """One channel's words, int64[8]."""
        with self._lock:
            if self._left == 0:
                raise RuntimeError(
                    f"{self._CHUNK} lookups were captured since the last eager one: "
                    "call warm_up() before the next capture"
                )
            self._left -= 1
            return self._chunks[-1][self._left]


@functools.cache
def states(device: torch.device) -> States:
    """The states of a device, for the life of the process."""
    return States(device)
