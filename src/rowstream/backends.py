"""Where the rows of an open table live, and why there: opens the native table that answers gathers.

Chooses, checks that the files are still the ones whose headers were read, and owns nothing afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rowstream import _core
from rowstream.errors import ManifestError
from rowstream.manifest import FileIdentity, Manifest

__all__ = ["BACKENDS", "READERS", "NativeTable", "OpenTable", "open_table"]

BACKENDS = ("auto", "disk", "mmap", "pinned")
READERS = ("auto", "uring", "pool")


class NativeTable(Protocol):
    """What every backend offers; implemented in the core."""

    @property
    def memory_bytes(self) -> int: ...

    def gather(
        self, row_ids: NDArray[np.int64], groups: Sequence[int], out: NDArray[np.uint8], /
    ) -> None: ...

    def files(self) -> list[Any]: ...

    def counters(self) -> dict[Any, Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OpenTable:
    """An open native table, the backend that it is, and the reason for that."""

    native: NativeTable
    backend: str
    reason: str
    reader: str | None  # disk only
    queue_depth: int | None  # disk only


def open_table(manifest: Manifest, *, backend: str, reader: str, queue_depth: int) -> OpenTable:
    """Open the files of a manifest with a backend of BACKENDS and, for disk, a reader of READERS.

    Raises UnavailableError where `reader="uring"` cannot run, ManifestError where a file was replaced since
    its header was read, ReadError where one cannot be opened.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is one of {', '.join(BACKENDS)}; got {backend!r}")
    if reader not in READERS:
        raise ValueError(f"reader is one of {', '.join(READERS)}; got {reader!r}")
    paths = [os.fspath(file.path) for file in manifest.files]
    planes = [
        (plane.row_bytes, [(e.file, e.offset, e.first_row, e.num_rows) for e in plane.extents])
        for plane in manifest.planes
    ]
    opened: OpenTable
    if backend in ("mmap", "pinned"):
        mapped = backend == "mmap"
        resident = _core.ResidentTable(paths, planes, mapped=mapped)
        opened = OpenTable(resident, backend, "asked for", None, None)
    else:
        disk = _core.DiskTable(paths, planes, reader=reader, queue_depth=queue_depth)
        asked = "asked for" if backend == "disk" else "memory stays constant whatever the table's size"
        notes = sorted({file["note"] for file in disk.files() if file["note"]})
        reason = "; ".join([asked, f"{disk.reader}: {disk.reader_note}", *notes])
        opened = OpenTable(disk, "disk", reason, disk.reader, disk.queue_depth)
    _check_identity(manifest, opened.native)
    return opened


def _check_identity(manifest: Manifest, native: NativeTable) -> None:
    for file, entry in zip(manifest.files, native.files(), strict=True):
        found = FileIdentity(*entry["identity"])
        if found != file.identity:
            native.close()
            raise ManifestError.mismatch(
                "identity", file.identity, found, file=os.path.basename(file.path)
            )
