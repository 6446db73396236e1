"""A second way to the rows of a table, for verify to compare with the first.

Shares no code with the formats, the families, the store and the core: it parses headers and orders
shards once more, in the plainest way. Reads are buffered.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import stat
import struct
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rowstream.errors import ManifestError

__all__ = ["SecondPath", "Shard"]

_BUFFERS: Final = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
_VALUE_BYTES: Final = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}
_SMALL_BYTES: Final = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8}  # of scales and constants
_SMALL_BYTES_MAX: Final = 1 << 16
# exponent bits: where all are set (for E4M3 the mantissa's too) the value is not finite
_NOT_FINITE: Final = {
    "F8_E4M3": ("u1", 0x7F),
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F800000),
}
_HEADER_BYTES_MAX: Final = 100_000_000  # the format's own limit
_INDEX: Final = "model.safetensors.index.json"
_PAGE: Final = 4096


@dataclass(frozen=True, slots=True)
class Shard:
    """Where a run of rows lies; `path` and `offset` in bytes, rows in the table's numbering."""

    path: Path
    offset: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SecondPath:
    """The table whose tensors' names start with `tensor`, open for buffered reads.

    `path` is the checkpoint's folder or the one file to look at. Raises ManifestError where no
    complete table is found, OSError where a file cannot be read.
    """

    def __init__(self, path: Path, tensor: str) -> None:
        entries = _find(path, tensor)
        shards = _ordered(entries, tensor)
        first = shards[0]
        self.dtype = first.dtype
        self.row_values = first.shape[1]
        self.row_bytes = self.row_values * _VALUE_BYTES[first.dtype]
        self.shards: list[Shard] = []
        for entry in shards:
            alike = (entry.dtype, entry.shape[1:]) == (self.dtype, (self.row_values,))
            if not alike or entry.num_bytes != entry.shape[0] * self.row_bytes:
                raise _error(entry.path, f"shards of {self.dtype} [rows, {self.row_values}]", entry)
            self.shards.append(Shard(entry.path, entry.offset, self.num_rows, entry.shape[0]))
        self._first_rows = [shard.first_row for shard in self.shards]
        self._open = ExitStack()
        try:
            self._files = {path: self._descriptor(path) for path in {s.path for s in self.shards}}
            self.scale = self._scale(entries, tensor)
            self.buffers = self._buffers(entries, tensor)
        except BaseException:
            self.close()
            raise

    @property
    def num_rows(self) -> int:
        """Rows of all shards."""
        return self.shards[-1].first_row + self.shards[-1].num_rows if self.shards else 0

    @property
    def num_files(self) -> int:
        """Files that hold rows."""
        return len(self._files)

    def rows(self, row_ids: ArrayLike) -> NDArray[np.uint8]:
        """Read rows one by one: uint8 [n, row_bytes]."""
        ids = np.asarray(row_ids, np.int64).ravel()
        out = np.empty((len(ids), self.row_bytes), np.uint8)
        for position, row in enumerate(ids.tolist()):
            shard = self.shards[bisect.bisect_right(self._first_rows, row) - 1]
            offset = shard.offset + (row - shard.first_row) * self.row_bytes
            self._read(shard.path, offset, out[position])
        return out

    def span(self, first_row: int, num_rows: int) -> NDArray[np.uint8]:
        """Read rows that follow each other, uint8 [num_rows, row_bytes], leaving no cached page."""
        out = np.empty((num_rows, self.row_bytes), np.uint8)
        done = 0
        while done < num_rows:
            row = first_row + done
            shard = self.shards[bisect.bisect_right(self._first_rows, row) - 1]
            count = min(num_rows - done, shard.first_row + shard.num_rows - row)
            offset = shard.offset + (row - shard.first_row) * self.row_bytes
            self._read(shard.path, offset, out[done : done + count])
            # from the page's start: the span before this one left its last page to it
            start = offset - offset % _PAGE
            end = offset + count * self.row_bytes
            os.posix_fadvise(self._files[shard.path], start, end - start, os.POSIX_FADV_DONTNEED)
            done += count
        return out

    def not_finite(self, rows: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Count the values of each row uint8 [n, row_bytes] that are NaN or infinite."""
        kind, bits = _NOT_FINITE[self.dtype]
        values = rows.view(kind)
        counts: NDArray[np.int64] = ((values & values.dtype.type(bits)) == bits).sum(axis=1)
        return counts

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def __enter__(self) -> SecondPath:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _descriptor(self, path: Path) -> int:
        descriptor = _open(path)
        self._open.callback(os.close, descriptor)
        return descriptor

    def _read(self, path: Path, offset: int, out: NDArray[np.uint8]) -> None:
        _read(self._files[path], path, offset, out)

    def _scale(self, entries: dict[str, _Entry], tensor: str) -> float | None:
        entry = entries.get(f"{tensor}.weight_scale")
        if entry is None:
            return None
        data = _bytes(entry)
        if entry.dtype == "BF16":
            data = b"\0\0" + data  # the upper half of a float32
        (value,) = struct.unpack("<e" if entry.dtype == "F16" else "<f", data)
        return float(value)

    def _buffers(self, entries: dict[str, _Entry], tensor: str) -> dict[str, tuple[int, ...]]:
        module = tensor.rpartition(".")[0]
        found = {name: entries.get(f"{module}.{name}") for name in _BUFFERS}
        return {
            name: struct.unpack(f"<{math.prod(entry.shape)}q", _bytes(entry))
            for name, entry in found.items()
            if entry is not None
        }


def _find(path: Path, tensor: str) -> dict[str, _Entry]:
    """Return the table's tensors, from the files that the index names or else from all."""
    if path.is_file():
        return _entries([path], tensor, strict=True)
    files = sorted(path.glob("*.safetensors"))
    try:
        places = json.loads((path / _INDEX).read_bytes())["weight_map"]
        module = tensor.rpartition(".")[0]
        named = {path / file for name, file in places.items() if name.startswith(f"{module}.")}
        found = _entries(sorted(named), tensor, strict=True)
        _ordered(found, tensor)
        return found
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return _entries(files, tensor, strict=False)


def _entries(files: Iterable[Path], tensor: str, *, strict: bool) -> dict[str, _Entry]:
    module = tensor.rpartition(".")[0]
    found: dict[str, _Entry] = {}
    for path in files:
        try:
            entries = _header(path, f"{module}.".encode())
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            if strict:
                raise
            continue  # a broken file beside a complete table
        for name, entry in entries.items():
            if not name.startswith(f"{module}."):
                continue
            if name in found:
                raise _error(path, f"{name} in one file", f"also in {found[name].path.name}")
            found[name] = entry
    return found


def _header(path: Path, marker: bytes) -> dict[str, _Entry]:
    descriptor = _open(path)
    try:
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if length > min(size - 8, _HEADER_BYTES_MAX):
            raise _error(path, f"a header of {size - 8} bytes at most", length)
        text = np.empty(length, np.uint8)
        _read(descriptor, path, 8, text)
    finally:
        os.close(descriptor)
    if marker not in (header := text.tobytes()):
        return {}
    fields = json.loads(header.decode())
    fields.pop("__metadata__", None)
    data = 8 + length
    end = data + max(field["data_offsets"][1] for field in fields.values())
    if end != size:
        raise _error(path, f"{end} bytes", size)
    return {
        name: _Entry(path, field["dtype"], tuple(field["shape"]), data + begin, stop - begin)
        for name, field in fields.items()
        for begin, stop in (field["data_offsets"],)
    }


def _ordered(entries: dict[str, _Entry], tensor: str) -> list[_Entry]:
    """Return the tensors that hold rows in the order of their numbers."""
    numbered: dict[int, _Entry] = {}
    for name, entry in entries.items():
        if not name.startswith(f"{tensor}.") or not name.endswith(".weight"):
            continue
        # ngram_embedding.weight, .shard_7.weight, .shards.7.weight
        part = name[len(tensor) : -len(".weight")]
        number = part.replace(".shards.", ".shard_").removeprefix(".shard_")
        if part and not number.isdigit():
            raise _error(entry.path, "shards with a number", number)
        place = int(number) if part else 0
        if place in numbered:
            raise _error(entry.path, f"one tensor for shard {place}", "two")
        numbered[place] = entry
    if sorted(numbered) != list(range(len(numbered))) or not numbered:
        raise ManifestError.mismatch("shards", "0, 1, 2, ...", sorted(numbered), tensor=tensor)
    shards = [numbered[number] for number in range(len(numbered))]
    if shards[0].dtype not in _VALUE_BYTES or len(shards[0].shape) != 2:
        raise _error(shards[0].path, "rows of a known type", shards[0].dtype)
    if shards[0].dtype == "F8_E4M3" and f"{tensor}.weight_scale" not in entries:
        raise ManifestError.mismatch("", "a scale", "none", tensor=tensor)
    return shards


def _open(path: Path) -> int:
    # not blocking: a named pipe would wait for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _error(path, "a regular file", "something else")
    return descriptor


def _bytes(entry: _Entry) -> bytes:
    num_bytes = math.prod(entry.shape) * _SMALL_BYTES.get(entry.dtype, 0)
    if entry.num_bytes != num_bytes or num_bytes > _SMALL_BYTES_MAX:
        raise _error(entry.path, "a scale or constants", entry)
    descriptor = _open(entry.path)
    try:
        data = np.empty(entry.num_bytes, np.uint8)
        _read(descriptor, entry.path, entry.offset, data)
        return data.tobytes()
    finally:
        os.close(descriptor)


def _read(descriptor: int, path: Path, offset: int, out: NDArray[np.uint8]) -> None:
    view = out.data.cast("B")
    while view:
        try:
            count = os.preadv(descriptor, [view], offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        if count == 0:
            raise _error(path, f"{len(view)} bytes at {offset}", "its end")
        view, offset = view[count:], offset + count


def _error(path: Path, needed: object, found: object) -> ManifestError:
    return ManifestError.mismatch("", needed, found, file=path.name)
