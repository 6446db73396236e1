"""Where the rows of an open table live, and why there: opens the native table that answers gathers.

Chooses, checks that the files are still the ones whose headers were read, and owns nothing
afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rowstream import _core
from rowstream.errors import ManifestError
from rowstream.manifest import FileIdentity, Manifest
from rowstream.placement import place

__all__ = [
    "BACKENDS",
    "DEFAULT_QUEUE_DEPTH",
    "ON_READ_ERROR",
    "READERS",
    "NativeTable",
    "OpenTable",
    "Progress",
    "ReadOptions",
    "open_loader",
    "open_table",
]

BACKENDS = ("auto", "disk", "mmap", "pinned")
READERS = ("auto", "uring", "pool", "inline")
ON_READ_ERROR = ("raise", "zero-rows")
Progress = Callable[[int, int], object]  # bytes done, bytes in all

DEFAULT_QUEUE_DEPTH = 128  # where no profile of the device says another


class NativeTable(Protocol):
    """What every backend offers; implemented in the core."""

    @property
    def memory_bytes(self) -> int: ...

    def gather(
        self, row_ids: NDArray[np.int64], groups: Sequence[int], out: NDArray[np.uint8], /
    ) -> None: ...

    def gather_rows(self, row_ids: object, out: object, /) -> bool: ...

    def files(self) -> Sequence[_core.FileState]: ...

    def counters(self) -> dict[str, int]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How rows are read. Raises ValueError for what cannot be."""

    reader: str = "auto"  # one of READERS
    queue_depth: int = DEFAULT_QUEUE_DEPTH  # reads kept in flight
    read_timeout_s: float = 10.0  # without any answer while reads are in flight
    on_read_error: str = "raise"  # one of ON_READ_ERROR; "zero-rows" is never chosen by itself
    cache_bytes: int = 0  # for rows read before, metadata included
    lookahead_bytes: int = 32 << 20  # for rows read before they are asked for; taken when used
    resident_budget_bytes: int | None = None  # of a mapped table's pages; None: no budget
    block: int = 0  # bytes of direct reads; 0: what the file system asks for, 512 at least

    def __post_init__(self) -> None:
        _check("reader", self.reader, READERS)
        _check("on_read_error", self.on_read_error, ON_READ_ERROR)
        for name in ("cache_bytes", "lookahead_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} needs 0 or more, got {getattr(self, name)}")
        budget = self.resident_budget_bytes
        if budget is not None and budget < 1:
            raise ValueError(f"resident_budget_bytes needs 1 or more, got {budget}")


@dataclass(frozen=True, slots=True)
class OpenTable:
    """An open native table, the backend that it is, and the reason for that."""

    native: NativeTable
    backend: str
    reason: str
    reader: str | None  # disk only
    queue_depth: int | None  # disk only


def open_table(
    manifest: Manifest,
    backend: str,
    options: ReadOptions,
    groups: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> OpenTable:
    """Open the files of a manifest with a backend of BACKENDS.

    `groups` are the rows that are looked up together, if not the manifest's. `progress` is called
    while a pinned table is read, at most ten times a second and once at the end.

    Raises UnavailableError where `reader="uring"` cannot run, ManifestError where a file was
    replaced since its header was read, ReadError where one cannot be opened.
    """
    _check("backend", backend, BACKENDS)
    why = "asked for"
    if backend == "auto" and options.reader != "auto":
        backend, why = "disk", "a reader was asked for"
    elif backend == "auto":
        backend, why = place(manifest)
    opened: OpenTable
    if backend in ("mmap", "pinned"):
        mapped = backend == "mmap"
        resident = _core.ResidentTable(
            *_native_source(manifest),
            mapped=mapped,
            zero_rows=options.on_read_error == "zero-rows",
            budget_bytes=options.resident_budget_bytes or 0,
            groups=manifest.groups,
            progress=progress,
        )
        opened = OpenTable(resident, backend, why, None, None)
    else:
        disk = _core.DiskTable(
            *_native_source(manifest, copies=True),
            reader=options.reader,
            queue_depth=options.queue_depth,
            block=options.block,
            read_timeout_s=options.read_timeout_s,
            zero_rows=options.on_read_error == "zero-rows",
            group_width=_group_width(manifest.groups if groups is None else groups),
            cache_bytes=options.cache_bytes,
            lookahead_bytes=options.lookahead_bytes,
            groups=manifest.groups,
        )
        notes = sorted({file.note for file in disk.files() if file.note})
        if any(plane.copies for plane in manifest.planes):
            notes.append("of copies, the one whose drive is less busy")
        reason = "; ".join([why, f"{disk.reader}: {disk.reader_note}", *notes])
        opened = OpenTable(disk, "disk", reason, disk.reader, disk.queue_depth)
    try:
        _check_identity(manifest, opened.native.files())
    except ManifestError:
        opened.native.close()
        raise
    return opened


def open_loader(manifest: Manifest) -> _core.Loader:
    """Open the files of a manifest to read runs of rows in bulk; raises as `open_table`."""
    loader = _core.Loader(*_native_source(manifest))
    _check_identity(manifest, loader.files())
    return loader


def _native_source(
    manifest: Manifest, copies: bool = False
) -> tuple[list[str], list[tuple[int, list[tuple[int, int, int, int]]]]]:
    """Return paths and planes as the core takes them, copies after what they are copies of."""
    files = (*manifest.files, *manifest.copies) if copies else manifest.files
    planes = []
    for plane in manifest.planes:
        extents = (*plane.extents, *plane.copies) if copies else plane.extents
        extents = tuple(sorted(extents, key=lambda extent: extent.first_row))
        places = [(e.file, e.offset, e.first_row, e.num_rows) for e in extents]
        planes.append((plane.row_bytes, places))
    return [os.fspath(file.path) for file in files], planes


def _group_width(groups: Sequence[int]) -> int:
    """Return the rows of an n-gram, or 0 where groups differ and nothing is kept by n-gram."""
    widths = set(groups)
    return widths.pop() if len(widths) == 1 else 0


def _check_identity(manifest: Manifest, states: Sequence[_core.FileState]) -> None:
    files = manifest.files
    if len(states) > len(files):  # what reads no copies has not opened them
        files += manifest.copies
    for file, entry in zip(files, states, strict=True):
        found = FileIdentity(*entry.identity)
        if found != file.identity:
            raise ManifestError.mismatch(
                "identity", file.identity, found, file=os.path.basename(file.path)
            )


def _check(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} needs one of {', '.join(choices)}, got {value!r}")
