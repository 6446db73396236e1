"""A checkpoint folder as a loader wants it, when files that hold nothing but a table are not there.

Loaders open every file that the index names, before they know what they need of it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rowstream.checkpoint import json_object, open_regular
from rowstream.errors import ManifestError
from rowstream.families import FAMILIES
from rowstream.formats.index import INDEX_NAME
from rowstream.formats.safetensors import read_header

__all__ = ["loadable"]


@contextmanager
def loadable(folder: Path) -> Iterator[Path]:
    """Yield the folder, or a temporary one of links whose index leaves out the absent files.

    Raises ManifestError where an absent or broken file holds more than parts of a table.
    """
    if not (folder / INDEX_NAME).is_file():
        yield folder
        return
    with open_regular(folder / INDEX_NAME) as file:
        index = json_object(file.read(), file=INDEX_NAME)
    names = index.get("weight_map")
    if type(names) is not dict or not all(type(file) is str for file in names.values()):
        raise ManifestError.mismatch("weight_map", "names of files", names, file=INDEX_NAME)
    absent = {name: error for name in set(names.values()) if (error := _broken(folder / name))}
    if not absent:
        yield folder
        return
    for tensor, name in names.items():
        if name in absent and all(family.role(tensor) is None for family in FAMILIES):
            raise ManifestError(
                f"{absent[name]}; it holds {tensor}, which is no part of a table",
                file=name,
                tensor=tensor,
            ) from absent[name]
    with tempfile.TemporaryDirectory(prefix="rowstream-") as made:
        for entry in folder.iterdir():
            if entry.name != INDEX_NAME and entry.name not in absent:
                os.symlink(entry.absolute(), os.path.join(made, entry.name))
        index["weight_map"] = {t: name for t, name in names.items() if name not in absent}
        Path(made, INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")
        yield Path(made)


def _broken(path: Path) -> ManifestError | None:
    try:
        read_header(path)
    except ManifestError as error:
        return error
    return None
