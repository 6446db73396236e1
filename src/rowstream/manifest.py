"""The validated description of one table on disk: files, planes, extents, codec, hash constants.

A manifest holds no open file and no row. Formats and families build it; the store reads by it
without further checks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rowstream.errors import ManifestError
from rowstream.hashing import NgramConstants

__all__ = ["Extent", "FileIdentity", "Manifest", "Plane", "TableFile"]

_FILE_BYTES_MAX = 1 << 48  # the core packs a file and an offset into 64 bits


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells whether a file is still the one whose header was read."""

    device: int
    inode: int
    size: int  # bytes
    mtime_ns: int

    @classmethod
    def of(cls, file: str | os.PathLike[str] | int) -> FileIdentity:
        """Return the identity of a path (links followed) or of an open file descriptor."""
        status = os.stat(file)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file of the checkpoint, as it was when its header was read."""

    path: Path
    identity: FileIdentity


@dataclass(frozen=True, slots=True)
class Extent:
    """Contiguous rows of one plane in one file."""

    file: int  # index into Manifest.files, and past these into Manifest.copies
    offset: int  # bytes from the start of the file; any value, aligned to nothing
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of fixed-size records, one for each row: the codes, scales or biases of a table."""

    name: str
    row_bytes: int
    extents: tuple[Extent, ...]  # sorted by first_row, gapless from row 0
    copies: tuple[Extent, ...] = ()  # the rows of some of the extents once more, elsewhere


@dataclass(frozen=True, slots=True)
class Manifest:
    """One table: where each row lies, how its bytes become values, which rows a token needs.

    Raises ManifestError when the planes do not hold every row once or reach outside their files.
    """

    name: str  # "layers.1.ple"
    tensor: str  # common prefix of the tensors' names
    layer: int  # zero-based decoder layer
    family: str
    format: str
    root: Path  # checkpoint folder
    codec: str  # a key of rowstream.codecs.CODECS
    scale: float | None  # exact value of the stored scale; fp8 only
    num_rows: int  # padded total
    row_values: int
    heads: int  # rows for each token
    groups: tuple[int, ...]  # heads of each order
    planes: tuple[Plane, ...]
    files: tuple[TableFile, ...]
    hash: NgramConstants | None  # None without a config: rows can be gathered, tokens cannot
    copies: tuple[TableFile, ...] = ()  # files that hold nothing but copies

    def __post_init__(self) -> None:
        if sum(self.groups) != self.heads:
            raise self._error("heads", self.heads, sum(self.groups))
        if self.hash is not None and self.hash.heads != self.heads:
            raise self._error("hash constants for heads", self.heads, self.hash.heads)
        for plane in self.planes:
            self._check(plane)

    def _check(self, plane: Plane) -> None:
        row = 0
        for extent in plane.extents:
            if extent.first_row != row or extent.num_rows <= 0:
                raise self._error(f"{plane.name} extent at row", row, extent.first_row)
            self._check_place(plane, extent, self.files)
            row += extent.num_rows
        if row != self.num_rows:
            raise self._error(f"{plane.name} rows", self.num_rows, row)
        cuts = {extent.first_row: extent.num_rows for extent in plane.extents}
        for copy in plane.copies:
            if cuts.get(copy.first_row) != copy.num_rows:
                found = f"{copy.num_rows} from {copy.first_row}"
                raise self._error(f"{plane.name} copy", "the rows of an extent", found)
            self._check_place(plane, copy, (*self.files, *self.copies))

    def _check_place(self, plane: Plane, extent: Extent, files: Sequence[TableFile]) -> None:
        if not 0 <= extent.file < len(files):
            raise self._error(f"{plane.name} file", f"below {len(files)}", extent.file)
        file = files[extent.file]
        end = extent.offset + extent.num_rows * plane.row_bytes
        if extent.offset < 0 or end > file.identity.size:
            raise ManifestError(
                f"{file.path.name}: {self.tensor} needs {end - extent.offset} bytes "
                f"at {extent.offset}, file has {file.identity.size}",
                file=file.path.name,
                tensor=self.tensor,
                needed=end,
                found=file.identity.size,
            )
        if end > _FILE_BYTES_MAX:
            raise self._error(f"{plane.name} end", f"{_FILE_BYTES_MAX} at most", end)

    def _error(self, what: str, needed: object, found: object) -> ManifestError:
        return ManifestError.mismatch(what, needed, found, tensor=self.tensor)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all planes."""
        return sum(plane.row_bytes for plane in self.planes)

    @property
    def table_bytes(self) -> int:
        """Bytes of all rows over all planes."""
        return self.num_rows * self.row_bytes
