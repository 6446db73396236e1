"""The tables of a checkpoint: finds the files that hold them, and has each family describe its own.

The index is believed only as to where to look first; what it leaves out is looked for in every
header.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rowstream.checkpoint import locate, read_config
from rowstream.errors import ManifestError, shown
from rowstream.families import FAMILIES
from rowstream.formats.index import INDEX_NAME, indexed_files
from rowstream.formats.safetensors import FORMAT, SUFFIX, Header, read_header
from rowstream.formats.tensor import Tensor
from rowstream.manifest import Manifest
from rowstream.table_paths import collect

__all__ = ["tables"]


def tables(
    path: str | os.PathLike[str], *, table_paths: Sequence[str | os.PathLike[str]] = ()
) -> list[Manifest]:
    """Return the manifest of every streamable table in a checkpoint, sorted by layer.

    `path` is a folder, a single .safetensors file, or an id in the local hub cache. Only headers,
    the scale and the hash constants are read. `table_paths` are folders or files on other drives:
    shards that they hold are taken from there, by the names of tensors; what the checkpoint has of
    the table itself must agree. A shard that several of them hold has copies. Raises ManifestError
    when there is no table, or one that is not sound.
    """
    folder = locate(path)
    if table_paths:
        return _from_table_paths(path, folder, table_paths)
    if os.path.isfile(path):
        found = _describe(_tensors(read_header(Path(path))), folder)
        if not found:
            raise _nothing(os.fspath(path), 1)
        return found
    return _from_index(folder) or _from_headers(folder)


def _from_table_paths(
    path: str | os.PathLike[str], folder: Path, table_paths: Sequence[str | os.PathLike[str]]
) -> list[Manifest]:
    found = collect(path, table_paths)
    try:
        return _describe(list(found.tensors.values()), folder)
    except ManifestError as error:
        raise found.error(error) from found.broken


def _from_index(folder: Path) -> list[Manifest]:
    """Return what the files named by the index hold, or nothing when that is not complete."""
    names = {name for family in FAMILIES for name in indexed_files(folder, family.marker)}
    tensors: list[Tensor] = []
    for name in sorted(names):
        if not os.path.lexists(folder / name):
            raise ManifestError.mismatch(
                "", f"to exist, named by {INDEX_NAME}", "nothing", file=name
            )
        tensors += _tensors(read_header(folder / name))
    try:
        return _describe(tensors, folder)
    except ManifestError:
        # a filtered index may leave out shards or the scale; the headers of all files hold at least
        # as much, so what is really wrong is found wrong again
        return []


def _from_headers(folder: Path) -> list[Manifest]:
    files = sorted(folder.glob(f"*{SUFFIX}"))
    tensors: list[Tensor] = []
    broken: ManifestError | None = None
    for file in files:
        try:
            header = read_header(file)
        except ManifestError as error:
            broken = broken or error  # matters only if the others do not make a table
            continue
        tensors += _tensors(header)
    try:
        found = _describe(tensors, folder)
        if not found:
            raise _nothing(os.fspath(folder), len(files))
    except ManifestError as error:
        if broken is None:
            raise
        raise ManifestError(
            f"{error}; {broken}",
            file=error.file,
            tensor=error.tensor,
            needed=error.needed,
            found=error.found,
        ) from broken
    return found


def _tensors(header: Header) -> list[Tensor]:
    """Return the tensors of a file that may hold a part of a table; other files are not parsed."""
    if any(header.mentions(family.marker) for family in FAMILIES):
        return header.tensors()
    return []


def _describe(tensors: list[Tensor], folder: Path) -> list[Manifest]:
    if not tensors:
        return []
    config = read_config(folder)
    found = [
        manifest
        for family in FAMILIES
        for manifest in family.manifests(tensors, config, folder, FORMAT)
    ]
    return sorted(found, key=lambda manifest: manifest.layer)


def _nothing(place: str, num_files: int) -> ManifestError:
    patterns = " or ".join(family.pattern for family in FAMILIES)
    files = f"{num_files} {SUFFIX} file{'' if num_files == 1 else 's'}"
    return ManifestError.mismatch(shown(place), f"tensors like {patterns}", f"none in {files}")
