"""Tables whose shards lie elsewhere than the rest of their model, on another drive for example.

Finds tensors by name, wherever they are, and holds what is found against what the model says of
itself. Reads headers and constants, never rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rowstream.checkpoint import locate
from rowstream.errors import ManifestError, shown
from rowstream.families import FAMILIES, Family
from rowstream.formats.index import INDEX_NAME, indexed_tensors
from rowstream.formats.safetensors import SUFFIX, read_header
from rowstream.formats.tensor import Tensor

__all__ = ["Found", "collect"]


class Found:
    """The tensors of the tables of a model, those elsewhere before its own, with their copies."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.broken: ManifestError | None = None  # the first header that could not be read

    def error(self, error: ManifestError) -> ManifestError:
        """Add the broken header, which may be why something is missing."""
        if self.broken is None:
            return error
        return ManifestError(
            f"{error}; {self.broken}",
            file=error.file,
            tensor=error.tensor,
            needed=error.needed,
            found=error.found,
        )


def collect(path: str | os.PathLike[str], table_paths: Sequence[str | os.PathLike[str]]) -> Found:
    """Return the tensors of a model's tables: rows from `table_paths` first, then its own.

    The model may lack files that its index names; a table path may hold a part of the shards, or a
    whole copy of the model. What several table paths have are copies of each other, whatever else
    lies in their files; the model's own rows are none. Raises ManifestError where a table path has
    no rows, and where what the model or another path has of the table, in headers or the index, is
    not the same.
    """
    found = Found()
    own = _tensors(path, found)
    for place in table_paths:
        tensors = _tensors(place, found)
        if not any(_role(name) == "rows" for name in tensors):
            patterns = " or ".join(family.pattern for family in FAMILIES)
            raise found.error(
                ManifestError.mismatch(shown(os.fspath(place)), f"tensors like {patterns}", "none")
            )
        for name, tensor in tensors.items():
            other = found.tensors.setdefault(name, tensor)
            if other is not tensor:
                _check_same(tensor, other)
                if _role(name) == "rows":
                    found.tensors[name] = _with_copy(other, tensor)
    for name, tensor in own.items():
        elsewhere = found.tensors.setdefault(name, tensor)
        if elsewhere is not tensor:
            _check_same(elsewhere, tensor)
    _check_index(locate(path), found)
    return found


def _tensors(path: str | os.PathLike[str], found: Found) -> dict[str, Tensor]:
    """Return what belongs to tables in a file, or in all files of a folder."""
    if os.path.isfile(path):
        files, index = [Path(path)], {}
    else:
        folder = locate(path)
        files = sorted(folder.glob(f"*{SUFFIX}"))
        index = {n: f for family in FAMILIES for n, f in _indexed(folder, family).items()}
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            header = read_header(file)
        except ManifestError as error:
            found.broken = found.broken or error
            continue
        for tensor in header.tensors() if _mentions(header.text) else ():
            if not _mentions(tensor.name.encode()):
                continue
            other = tensors.setdefault(tensor.name, tensor)
            if other is tensor:
                continue
            # beside the files of the index another copy may lie, the index says which one counts
            if index.get(tensor.name) == file.name:
                tensors[tensor.name] = tensor
            elif index.get(tensor.name) != other.file.path.name:
                raise tensor.mismatch("", "one file", f"also {other.file.path.name}")
    return tensors


def _indexed(folder: Path, family: Family) -> dict[str, str]:
    return indexed_tensors(folder, family.marker)


def _mentions(text: bytes) -> bool:
    return any(family.marker in text for family in FAMILIES)


def _role(name: str) -> str | None:
    return next((role for family in FAMILIES if (role := family.role(name)) is not None), None)


def _check_same(tensor: Tensor, other: Tensor) -> None:
    """Refuse two tensors of one name that differ in what can be seen without reading rows."""
    where = f"in {other.file.path}"
    if tensor.dtype != other.dtype:
        raise tensor.mismatch("dtype", f"{other.dtype} as {where}", tensor.dtype)
    if tensor.shape != other.shape:
        raise tensor.mismatch("shape", f"{list(other.shape)} as {where}", list(tensor.shape))
    if _role(tensor.name) == "constant" and tensor.file != other.file:
        needed, got = other.read(), tensor.read()
        if needed != got:
            raise tensor.mismatch("value", f"{needed.hex()} as {where}", got.hex())


def _with_copy(tensor: Tensor, copy: Tensor) -> Tensor:
    for other in (tensor, *tensor.copies):
        same = other.file.identity.inode == copy.file.identity.inode
        if same and other.file.identity.device == copy.file.identity.device:
            raise copy.mismatch("", "a file of its own for each copy", f"also {other.file.path}")
    return replace(tensor, copies=(*tensor.copies, copy))


def _check_index(folder: Path, found: Found) -> None:
    """Refuse a model whose index names a part of a table that is nowhere."""
    for family in FAMILIES:
        for name, file in _indexed(folder, family).items():
            if family.role(name) is not None and name not in found.tensors:
                error = ManifestError.mismatch(
                    "",
                    f"to be in {file} or in a table path, as {INDEX_NAME} has it",
                    "nowhere",
                    tensor=name,
                )
                raise found.error(error)
