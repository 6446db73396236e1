"""A whole table that the GPU addresses: rows by one kernel, no channel and no thread.

Knows ids, outputs and graphs; where the bytes lie is places.py's.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from typing import Any

import torch

from rowstream.backends import Progress
from rowstream.device import driver
from rowstream.device.channel import Output
from rowstream.device.kernels import kernels
from rowstream.device.places import DeviceMemory, FileMappings, PinnedMemory, Place, row_of
from rowstream.store import RowStore

__all__ = ["ADDRESSED", "AddressedTable"]

ADDRESSED = ("pinned", "device", "file")
"""`pinned`: host memory that the GPU reads over PCIe. `device`: the GPU's own. `file`: the mapped
checkpoint, on machines whose GPU uses the host's page tables."""

# What captured graphs may still read when their table is closed. Never freed.
_KEPT: list[AddressedTable] = []

# What is to be freed: the place, its device, and what lookups read besides.
_Ended = tuple[Place, torch.device, tuple[torch.Tensor | None, ...]]
_ended: deque[_Ended] = deque()


class AddressedTable:
    """The rows of one store in memory that one GPU addresses. Any thread may look up.

    Once it is collected the memory is given back, as by `close`.
    """

    def __init__(
        self,
        store: RowStore,
        device: torch.device,
        kind: str,
        *,
        progress: Progress | None = None,
    ) -> None:
        """Load and register the table; never during a capture.

        `kind` is one of ADDRESSED. `progress` is called with bytes done and bytes in all. A pinned
        store's own memory is used, other stores are read once more. Of a shard by rows `device`
        holds the rank's rows only. Raises UnavailableError where this GPU cannot, ReadError.
        """
        if kind not in ADDRESSED:
            raise ValueError(f"kind needs one of {', '.join(ADDRESSED)}, got {kind!r}")
        if len(store.manifest.planes) != 1:
            raise ValueError(f"{kind} needs a table of one plane, got {len(store.manifest.planes)}")
        _free_ended()
        index = torch.cuda.current_device() if device.index is None else device.index
        self.kind = kind
        self.device = torch.device("cuda", index)
        self.heads = store.heads
        self._name = store.manifest.name
        self._row_bytes, self._num_rows = store.row_bytes, store.num_rows
        by_rows = store.shard.world > 1 and store.shard.by == "rows"
        self._owned_rows = store.owned.rows if by_rows else None
        with torch.cuda.device(self.device):
            driver.use_primary_context(index)
            self._kernels = kernels(index)
            began = time.monotonic()
            self._place: Place = self._find(store, progress)
            try:
                self._slot_of = self._slots(store)
                # the device's address is the host's: torch pins for unified addressing
                self._fault = torch.zeros(1, dtype=torch.int64, device="cpu").pin_memory()
            except BaseException:
                self._place.free()
                raise
        read = (self._slot_of, self._fault)
        self._end = weakref.finalize(self, _free, os.getpid(), self._place, self.device, read)
        # a stream may still wait when the process ends, and the driver frees it all
        self._end.atexit = False
        self._fill_s = time.monotonic() - began
        self._lookups = 0
        self._captured = 0
        self._closed = False
        self._lock = threading.Lock()

    def rows(
        self,
        stream: int,
        ids: torch.Tensor,
        tokens: int,
        live: torch.Tensor | None,
        out: torch.Tensor,
        output: Output,
    ) -> None:
        """Bring the rows of ids [tokens, heads] to out [tokens, heads, ...], in the stream's order.

        `stream` is torch's current one. Ids below 0, those of tokens from `live` (int32 [1]) on and
        the rows of other ranks give zeroes; an id past the table gives NaN, and the next `check`
        raises.
        """
        if self._closed:
            raise ValueError("table is closed")
        captured = torch.cuda.is_current_stream_capturing()
        self._place.check(captured=captured)
        if captured:
            self._keep()
        rows = self._owned(ids.reshape(tokens, self.heads)).contiguous()
        units = self._place.units(rows)
        found = units.ids.contiguous()
        self._kernels.rows(
            stream,
            self._place.base,
            found.data_ptr(),
            found.element_size(),
            0 if live is None else live.data_ptr(),
            tokens,
            self.heads * units.per_row,
            0 if self._slot_of is None else self._slot_of.data_ptr(),
            out.data_ptr(),
            self._row_bytes // units.per_row,
            units.bound,
            output.void_value,
            self._fault.data_ptr(),
            output.lut_address,
            output.value_bytes,
        )
        self._lookups += 1

    def check(self) -> None:
        """Raise IndexError, once, for an id past the table in a step that has ended."""
        word = int(self._fault[0])
        if word == 0:
            return
        self._fault[0] = 0
        raise IndexError(
            f"row id {row_of(word >> 8)} is outside [0, {self._num_rows}) in {self._name}"
        )

    def stats(self) -> dict[str, Any]:
        """Sizes and counts of the table."""
        return {
            "addressed": self.kind,
            "addressed_bytes": self._place.num_bytes,
            "fill_s": self._fill_s,
            "lookups": self._lookups,
            "captured_lookups": self._captured,
        }

    def close(self) -> None:
        """Free the memory, once the device has done with it; what a graph captured stays."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._captured:
                return
        self._end()

    def _find(self, store: RowStore, progress: Progress | None) -> Place:
        if self.kind == "pinned":
            return PinnedMemory(store, progress)
        if self.kind == "device":
            return DeviceMemory(store, self.device, progress)
        return FileMappings(store, self.device)

    def _slots(self, store: RowStore) -> torch.Tensor | None:
        """Which heads are the rank's, for each unit of a token; None: all."""
        owned = set(store.owned.heads)
        if len(owned) == self.heads:
            return None
        slots = [0 if head in owned else -1 for head in range(self.heads)]
        each = torch.tensor(slots, dtype=torch.int32, device="cpu")
        return each.repeat_interleave(self._place.per_row).to(self.device)

    def _owned(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of other ranks as -1; ids past the table stay what they are."""
        if self._owned_rows is None:
            return ids
        start, stop = self._owned_rows.start, self._owned_rows.stop
        ours = (ids >= start) & (ids < stop) | (ids >= self._num_rows)
        return torch.where(ours, ids, -1)

    def _keep(self) -> None:
        with self._lock:
            if self._captured == 0:
                _KEPT.append(self)
            self._captured += 1


def _free(
    process: int, place: Place, device: torch.device, read: tuple[torch.Tensor | None, ...]
) -> None:
    """Free a place once the device has done with it; in a forked child it is the parent's."""
    if os.getpid() == process:
        _ended.append((place, device, read))
        _free_ended()


def _free_ended() -> None:
    # A table can be collected while a graph is captured, which a synchronization would break: the
    # next one that is made or ends does it then.
    while _ended and not torch.cuda.is_current_stream_capturing():
        try:
            place, device, _ = _ended.popleft()
        except IndexError:  # another thread was faster
            return
        with torch.cuda.device(device):
            # this thread may not have used it before
            driver.use_primary_context(device.index)
            torch.cuda.synchronize(device)
            place.free()
