"""Headers of .safetensors files: read whole, checked whole, then handed out as tensors.

Never reads data. Only the header says where a tensor starts: writers pad or not, and order data as
they like.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from rowstream.checkpoint import json_object, open_regular
from rowstream.errors import ManifestError, shown
from rowstream.formats.tensor import Tensor
from rowstream.manifest import FileIdentity, TableFile

__all__ = ["FORMAT", "SUFFIX", "Header", "read_header"]

FORMAT = "safetensors"
SUFFIX = ".safetensors"

_LENGTH = struct.Struct("<Q")
_HEADER_BYTES_MAX = 100_000_000  # the format's own limit
_POINTER = b"version https://git-lfs"
_INT64_MAX = 2**63 - 1

# types that pack several values into a byte are left out: only their offsets are checked
_VALUE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True, slots=True)
class Header:
    """The JSON text of one file's header, its length checked, its content not yet."""

    file: TableFile
    text: bytes

    def mentions(self, marker: bytes) -> bool:
        """Tell whether the text holds the marker; far cheaper than parsing."""
        return marker in self.text

    def tensors(self) -> list[Tensor]:
        """Parse and check the whole header, and return its tensors in the order of their data.

        Raises ManifestError on any entry that is malformed, overlaps another or leaves the file,
        and when the file is longer than its last tensor.
        """
        name = self.file.path.name
        base = _LENGTH.size + len(self.text)
        if not self.text.startswith(b"{"):
            raise ManifestError.mismatch("", "a header that starts with {", "none", file=name)
        entries = json_object(self.text, file=name, unique_keys=True)
        _check_metadata(entries.pop("__metadata__", {}), name)
        tensors = [_tensor(key, entry, self.file, base) for key, entry in entries.items()]
        tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
        end = base
        for tensor in tensors:
            if tensor.num_bytes and tensor.offset < end:
                raise tensor.mismatch("data", f"to start at {end} or later", tensor.offset)
            end = max(end, tensor.offset + tensor.num_bytes)
        if end != self.file.identity.size:
            raise ManifestError.mismatch("", f"{end} bytes", self.file.identity.size, file=name)
        return tensors


def read_header(path: Path) -> Header:
    """Read the header of a .safetensors file without parsing it.

    Raises ManifestError when its first bytes are not the length of a header that fits the file.
    """
    with open_regular(path, exactly=True) as file:
        identity = FileIdentity.of(file.fileno())
        start = file.read(_LENGTH.size)
        if _POINTER.startswith(start) and start + file.read(15) == _POINTER:
            raise ManifestError.mismatch("", "tensors", "a Git LFS pointer", file=path.name)
        if len(start) < _LENGTH.size:
            raise ManifestError.mismatch(
                "", f"at least {_LENGTH.size} bytes", len(start), file=path.name
            )
        (length,) = _LENGTH.unpack(start)
        room = identity.size - _LENGTH.size
        if not 2 <= length <= min(room, _HEADER_BYTES_MAX):
            raise ManifestError(
                f"{shown(path.name)}: header needs {length} bytes, "
                f"file has {room} after its length and the limit is {_HEADER_BYTES_MAX}",
                file=path.name,
                needed=length,
                found=room,
            )
        file.seek(_LENGTH.size)
        text = file.read(length)
    if len(text) != length:
        raise ManifestError.mismatch("header", f"{length} bytes", len(text), file=path.name)
    return Header(TableFile(path, identity), text)


def _check_metadata(metadata: Any, file: str) -> None:
    if type(metadata) is not dict or not all(type(text) is str for text in metadata.values()):
        raise ManifestError.mismatch("__metadata__", "an object of strings", metadata, file=file)


def _tensor(name: str, entry: Any, file: TableFile, base: int) -> Tensor:
    def mismatch(what: str, needed: object, found: object) -> ManifestError:
        return ManifestError.mismatch(what, needed, found, file=file.path.name, tensor=name)

    if type(entry) is not dict:
        raise mismatch("entry", "an object", entry)
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if type(dtype) is not str:
        raise mismatch("dtype", "a string", dtype)
    if not _are_sizes(shape):
        raise mismatch("shape", "a list of sizes", shape)
    if not _are_sizes(span) or len(span) != 2 or span[0] > span[1]:
        raise mismatch("data_offsets", "a begin and an end", span)
    begin, end = span
    size = file.identity.size
    if base + end > size:
        raise ManifestError(
            f"{shown(file.path.name)}: {shown(name)} needs {end - begin} bytes at {base + begin}, "
            f"file has {size}",
            file=file.path.name,
            tensor=name,
            needed=base + end,
            found=size,
        )
    if dtype in _VALUE_BYTES and _array_bytes(shape, _VALUE_BYTES[dtype]) != end - begin:
        needed = f"{shown(_array_bytes(shape, _VALUE_BYTES[dtype]))} bytes"
        raise mismatch(f"{dtype} {shown(shape)}", needed, end - begin)
    return Tensor(name, dtype, tuple(shape), file, base + begin, end - begin)


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    # type(), not isinstance: true and false are no sizes
    return type(values) is list and all(
        type(value) is int and 0 <= value <= _INT64_MAX for value in values
    )


def _array_bytes(shape: list[int], value_bytes: int) -> int:
    total = value_bytes
    for size in shape:
        total *= size
        if total > _INT64_MAX:  # a hostile shape would grow the product without end
            return _INT64_MAX
    return total
