"""One tensor of a checkpoint as its header describes it: type, shape and place in a file.

The same for every format; the names of types are those of safetensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rowstream.checkpoint import open_regular
from rowstream.errors import ManifestError
from rowstream.manifest import FileIdentity, TableFile

__all__ = ["Tensor"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named array in a file; its place has been checked against the file's size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: TableFile
    offset: int  # bytes from the start of the file
    num_bytes: int
    copies: tuple[Tensor, ...] = ()  # the same array in other files

    @property
    def num_values(self) -> int:
        """Values in the array; 1 for a scalar."""
        return math.prod(self.shape)

    def read(self) -> bytes:
        """Read the whole array; for scales and constants, never for rows."""
        with open_regular(self.file.path, exactly=True) as file:
            if FileIdentity.of(file.fileno()) != self.file.identity:
                raise self.mismatch("file", "as its header was read", "changed since")
            file.seek(self.offset)
            data = file.read(self.num_bytes)
        if len(data) != self.num_bytes:
            raise self.mismatch("bytes", self.num_bytes, len(data))
        return data

    def mismatch(self, what: str, needed: object, found: object) -> ManifestError:
        """Build the error that names this tensor and its file."""
        return ManifestError.mismatch(
            what, needed, found, file=self.file.path.name, tensor=self.name
        )
