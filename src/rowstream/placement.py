"""What `backend="auto"` chooses for a table: from free memory, and from what of it is cached.

Reads nothing of the table; asks the kernel only which of some pages it has.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Iterator

import numpy as np

from rowstream.machine import memory
from rowstream.manifest import Manifest

__all__ = ["place"]

_GIB = 1 << 30
# of a smaller one nothing is gained by mapping it
_LARGE_BYTES = _GIB
_SPARE_BYTES = 16 * _GIB
_SAMPLE_BLOCKS = 512
_CACHED_SHARE = 0.8


def place(manifest: Manifest) -> tuple[str, str]:
    """Return "mmap" or "disk", and the reason with its arithmetic.

    A table that memory can hold beside what else the machine needs, or that the page cache has
    already, is fastest mapped; of any other, memory would only ever hold what was read last.
    """
    table = manifest.table_bytes
    if table < _LARGE_BYTES:
        return "disk", "memory stays constant, and a table under 1 GiB gains nothing by mapping"
    found = memory()
    available = min(found.available_bytes, found.limit_bytes or found.available_bytes)
    needed = f"{table / _GIB:.1f} GiB of table and {_SPARE_BYTES / _GIB:.0f} GiB to spare"
    have = f"{available / _GIB:.1f} GiB of available memory"
    if available > table + _SPARE_BYTES:
        return "mmap", f"{needed} fit into {have}"
    share = _cached_share(manifest)
    cached = (
        "which of its blocks are cached cannot be asked"
        if share is None
        else f"{share:.0%} of {_SAMPLE_BLOCKS} of its blocks are cached"
    )
    if share is not None and share >= _CACHED_SHARE:
        return "mmap", f"{needed} do not fit into {have}, but {cached}"
    return "disk", f"{needed} do not fit into {have}, and {cached}"


def _cached_share(manifest: Manifest) -> float | None:
    """The share of a random sample of the table's pages that the page cache has."""
    extents = [
        (os.fspath(manifest.files[extent.file].path), extent.offset, extent.num_rows * row_bytes)
        for plane in manifest.planes
        for row_bytes in (plane.row_bytes,)
        for extent in plane.extents
    ]
    picked = random.choices(extents, [num_bytes for *_, num_bytes in extents], k=_SAMPLE_BLOCKS)
    pages: dict[str, list[int]] = {}
    for path, offset, num_bytes in picked:
        at = (offset + random.randrange(num_bytes)) // mmap.PAGESIZE
        pages.setdefault(path, []).append(at)
    cached = 0
    for path, places in pages.items():
        try:
            # of files of others the kernel says that they are cached, whether they are or not
            if os.stat(path).st_uid != os.geteuid() and not os.access(path, os.W_OK):
                return None
            cached += sum(_cached(path, places))
        except (OSError, ValueError):
            return None
    return cached / _SAMPLE_BLOCKS


def _cached(path: str, pages: list[int]) -> Iterator[bool]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    found = ctypes.create_string_buffer(1)
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    start = np.frombuffer(mapped, np.uint8).ctypes.data
    for page in pages:
        if libc.mincore(start + page * mmap.PAGESIZE, 1, found) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
        yield bool(found.raw[0] & 1)
