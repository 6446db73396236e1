"""Where a table lies that a GPU addresses by itself: host memory, its own, or the files mapped.

Each place has the device's address of its rows and how ids become places there. What a lookup puts
into a stream is addressed.py's.
"""

from __future__ import annotations

import errno
import math
import mmap
import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rowstream import _core
from rowstream.backends import Progress, ReadOptions, open_loader, open_table
from rowstream.device import driver
from rowstream.errors import ReadError, UnavailableError
from rowstream.manifest import FileIdentity, Manifest
from rowstream.store import RowStore

__all__ = ["DeviceMemory", "FileMappings", "PinnedMemory", "Place", "Units", "row_of"]

_WINDOW_BYTES = 64 << 20
_PAGE_BYTES = mmap.PAGESIZE
_TELL_EVERY_S = 0.1
_CHECK_EVERY_S = 1.0
_ADDRESSES = 1 << 64
# added to an id past the table: larger than any id of a unit, and 8 bits to spare
_PAST = 1 << 52


class Units(NamedTuple):
    """Ids as a place counts: each row is `per_row` units, found by ids of their own."""

    ids: torch.Tensor
    per_row: int
    bound: int  # no unit has this id or a larger one


class Place(Protocol):
    """A table that a GPU addresses."""

    @property
    def base(self) -> int:
        """The device's address of unit 0."""
        ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def per_row(self) -> int:
        """Units of a row."""
        ...

    def units(self, ids: torch.Tensor) -> Units:
        """Ids of units [..., per_row] for those of rows; -1 stays, what is past stays past."""
        ...

    def check(self, *, captured: bool) -> None:
        """Raise ReadError where the bytes are no longer those of the table."""
        ...

    def free(self) -> None:
        """Nothing on the device uses it any more."""
        ...


def row_of(unit: int) -> int:
    """The row id that a unit past the table stands for."""
    return unit - _PAST if unit >= _PAST else unit


class _Whole:
    """Rows one after the other, found by their ids."""

    base: int
    num_bytes: int
    per_row = 1

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def units(self, ids: torch.Tensor) -> Units:
        return Units(ids, 1, self._num_rows)

    def check(self, *, captured: bool) -> None:
        """Loaded bytes are ours."""


# --- host memory ------------------------------------------------------------------------------


class _Registered:
    def __init__(self, memory: _core.TableMemory) -> None:
        driver.pin(memory.address, memory.bytes)
        self.memory = memory
        self.users = 0


# One registration of the same memory, however many devices address it. Strong: memory that is
# registered must not be unmapped.
_registered: dict[int, _Registered] = {}
_registering = threading.Lock()
# Addresses that a user less has. A table can be collected anywhere, also in the thread that has the
# lock: whoever has it counts them.
_given_up: deque[int] = deque()


def _unregister() -> None:
    while _given_up and _registering.acquire(blocking=False):
        try:
            while _given_up:
                address = _given_up.popleft()
                entry = _registered[address]
                entry.users -= 1
                if entry.users == 0:
                    driver.unpin(address)
                    del _registered[address]
        finally:
            _registering.release()


class PinnedMemory(_Whole):
    """A pinned table's own memory, registered with the driver."""

    def __init__(self, store: RowStore, progress: Progress | None) -> None:
        super().__init__(store.num_rows)
        native = store.native
        if store.backend != "pinned":
            native = open_table(store.manifest, "pinned", ReadOptions(), None, progress).native
        assert isinstance(native, _core.ResidentTable)
        memory = native.memory()
        if native is not store.native:
            native.close()  # the memory stays
        self.num_bytes = memory.bytes
        self._address = memory.address
        with _registering:
            if self._address not in _registered:
                _registered[self._address] = _Registered(memory)
            _registered[self._address].users += 1
        _unregister()
        found = driver.bindings().cuMemHostGetDevicePointer(self._address, 0)
        self.base = int(driver.check(found, "cuMemHostGetDevicePointer"))

    def free(self) -> None:
        _given_up.append(self._address)
        _unregister()


# --- the GPU's own memory ---------------------------------------------------------------------


class DeviceMemory(_Whole):
    """The rows that a rank may own, in the GPU's memory."""

    def __init__(self, store: RowStore, device: torch.device, progress: Progress | None) -> None:
        super().__init__(store.num_rows)
        rows = store.owned.rows
        self.num_bytes = len(rows) * store.row_bytes
        try:
            self._tensor = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(device)
            raise UnavailableError(
                f"{store.manifest.name}: device needs {self.num_bytes} bytes of GPU memory, "
                f"{free} of {total} are free; use disk or pinned"
            ) from error
        # of row 0, which may lie before it, and before address 0: the kernels' sums wrap as well
        self.base = (self._tensor.data_ptr() - rows.start * store.row_bytes) % _ADDRESSES
        if len(rows):
            _fill(self.base, store.manifest, rows, device, progress)

    def free(self) -> None:
        del self._tensor


def _fill(
    base: int, manifest: Manifest, rows: range, device: torch.device, progress: Progress | None
) -> None:
    """Copy rows to the device window by window: one is read while the one before is copied."""
    (plane,) = manifest.planes
    loader = open_loader(manifest)
    row_bytes = plane.row_bytes
    step = max(1, _WINDOW_BYTES // row_bytes)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # the memory was another tensor's, which may still be in use there
    stream.wait_stream(torch.cuda.current_stream(device))
    windows: list[_Window] = []
    told_at = time.monotonic()
    try:
        while len(windows) < 2:
            windows.append(_Window(min(step, len(rows)) * row_bytes))
        for number, first in enumerate(range(rows.start, rows.stop, step)):
            window = windows[number % 2]
            count = min(step, rows.stop - first)
            # a window that starts as its rows do on the disk is read straight into place
            into = window.rows(_offset(manifest, first) % _PAGE_BYTES, count, row_bytes)
            loader.load(first, into)
            address = window.on_device + (into.ctypes.data - window.address)
            target = (base + first * row_bytes) % _ADDRESSES
            driver.copy_async(stream.cuda_stream, target, address, into.nbytes)
            window.copied.record(stream)
            done = first + count - rows.start
            if progress and (done == len(rows) or time.monotonic() - told_at >= _TELL_EVERY_S):
                told_at = time.monotonic()
                progress(done * row_bytes, len(rows) * row_bytes)
    finally:
        stream.synchronize()
        for window in windows:
            driver.unpin(window.address)


def _offset(manifest: Manifest, row: int) -> int:
    extents = manifest.planes[0].extents
    extent = next(e for e in reversed(extents) if e.first_row <= row)
    return extent.offset + (row - extent.first_row) * manifest.planes[0].row_bytes


class _Window:
    """Registered memory for rows on their way to the device, at any place in a page."""

    def __init__(self, num_bytes: int) -> None:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._bytes = np.frombuffer(mmap.mmap(-1, num_bytes + _PAGE_BYTES, private), np.uint8)
        self.address = self._bytes.ctypes.data
        self.on_device = driver.pin(self.address, self._bytes.nbytes)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def rows(self, at: int, count: int, row_bytes: int) -> NDArray[np.uint8]:
        """uint8 [count, row_bytes], once the last copy has left it."""
        self.copied.synchronize()
        return self._bytes[at : at + count * row_bytes].reshape(count, row_bytes)


# --- the files --------------------------------------------------------------------------------


class Mapped(NamedTuple):
    """A file in memory: what keeps it there, and its address."""

    owner: object
    address: int


def map_file(path: Path) -> Mapped:
    """Map a file to be read by row, without read-ahead."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    return Mapped(mapped, np.frombuffer(mapped, np.uint8).ctypes.data)


class FileMappings:
    """The files mapped into memory, which the GPU reads over the host's page tables.

    A page that is gone when the GPU reads it, as of a file that was cut, ends the context: files
    are looked at before each capture, and once a second otherwise. Shards lie at any byte of
    theirs, so that rows are found in units of what all their addresses have in common.
    """

    def __init__(self, store: RowStore, device: torch.device) -> None:
        manifest = store.manifest
        found = driver.attributes(device.index)
        if not found.pageable_uses_host_page_tables:
            raise UnavailableError(
                f"{manifest.name}: file needs a GPU that uses the host's page tables, {found.name} "
                "does not; use disk or pinned"
            )
        (plane,) = manifest.planes
        self._files = manifest.files
        self._mapped = [map_file(file.path) for file in manifest.files]
        self._checked_at = -math.inf
        self.check(captured=True)  # what was mapped is what the manifest is of
        self.num_bytes = manifest.table_bytes
        self._num_rows = manifest.num_rows
        starts = [self._mapped[extent.file].address + extent.offset for extent in plane.extents]
        self.base = min(starts)
        unit = math.gcd(plane.row_bytes, *(start - self.base for start in starts))
        self.per_row = plane.row_bytes // unit
        firsts = [extent.first_row for extent in plane.extents]
        shifts = [
            (start - self.base) // unit - first * self.per_row
            for start, first in zip(starts, firsts, strict=True)
        ]
        self._plain = len(shifts) == 1
        self._bounds = torch.tensor(firsts[1:], dtype=torch.int64, device=device)
        self._shifts = torch.tensor(shifts, dtype=torch.int64, device=device)
        self._steps = torch.arange(self.per_row, dtype=torch.int64, device=device)

    def units(self, ids: torch.Tensor) -> Units:
        if self._plain:
            return Units(ids, 1, self._num_rows)
        rows = ids.to(torch.int64)
        inside = (rows >= 0) & (rows < self._num_rows)
        extents = torch.bucketize(rows, self._bounds, right=True)
        first = self._shifts[extents] + rows * self.per_row
        outside = torch.where(rows < 0, -1, rows.clamp(max=_PAST - 1) + _PAST)
        units = torch.where(
            inside.unsqueeze(-1), first.unsqueeze(-1) + self._steps, outside.unsqueeze(-1)
        )
        return Units(units, self.per_row, _PAST)

    def check(self, *, captured: bool) -> None:
        now = time.monotonic()
        if not captured and now - self._checked_at < _CHECK_EVERY_S:
            return
        for file in self._files:
            try:
                identity = FileIdentity.of(file.path)
            except OSError as error:
                raise ReadError(error.errno or errno.EIO, str(error.strerror), file.path) from error
            if identity != file.identity:
                raise ReadError(errno.ESTALE, "file changed since it was opened", file.path)
        self._checked_at = now

    def free(self) -> None:
        self._mapped.clear()
