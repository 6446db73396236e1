"""Ways to break a sound checkpoint, each of which is provoked by looking at it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints import (
    FILE,
    Array,
    hash_buffers,
    root,
    scale,
    shards,
    table_bytes,
    write_config,
    write_file,
    write_header,
    write_tiny,
)
from provocations import Provoke
from rowstream import Manifest, tables

NAME = f"{root()}.ngram_embedding"
TABLE = table_bytes(64, 6)


def config(**changes: Any) -> Provoke:
    def provoke(folder: Path) -> object:
        write_tiny(folder)
        write_config(folder, **changes)
        return tables(folder)

    return provoke


def arrays(change: Callable[[list[Array]], Sequence[Array]], *, alone: bool = False) -> Provoke:
    """A checkpoint of one file with other tensors; `alone` without its config."""

    def provoke(folder: Path) -> object:
        if not alone:
            write_config(folder)
        sound = [scale(), *shards(TABLE, [16] * 4), *hash_buffers()]
        write_file(folder / FILE, change(sound))
        return tables(folder)

    return provoke


def header(document: Any, *, data: bytes = b"\0" * 388) -> Provoke:
    """A file of that header; a dictionary changes entries of a sound one."""

    def provoke(folder: Path) -> object:
        write_config(folder)
        text = document
        if not isinstance(document, bytes):
            sound: dict[str, Any] = {
                f"{NAME}.weight_scale": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
                f"{NAME}.shard_0.weight": {
                    "dtype": "F8_E4M3",
                    "shape": [64, 6],
                    "data_offsets": [4, 388],
                },
            }
            for name, change in document.items():
                key = name if name.startswith("__") else f"{NAME}.{name}"
                old = sound.get(key)
                sound[key] = {**old, **change} if isinstance(change, dict) and old else change
            text = json.dumps(sound).encode()
        write_header(folder / FILE, text, data)
        return tables(folder)

    return provoke


def junk(content: bytes) -> Provoke:
    def provoke(folder: Path) -> object:
        (folder / FILE).write_bytes(content)
        return tables(folder)

    return provoke


def tiny(act: Callable[[Path], object]) -> Provoke:
    """A sound checkpoint, something done to it, and a look at it."""

    def provoke(folder: Path) -> object:
        write_tiny(folder)
        act(folder)
        return tables(folder)

    return provoke


def manifest(change: Callable[[Manifest], dict[str, Any]]) -> Provoke:
    """A manifest changed by hand."""

    def provoke(folder: Path) -> object:
        write_tiny(folder)
        (sound,) = tables(folder)
        return replace(sound, **change(sound))

    return provoke


def extent(**changes: int) -> Provoke:
    """A manifest with another first extent."""

    def change(sound: Manifest) -> dict[str, Any]:
        (plane,) = sound.planes
        first = replace(plane.extents[0], **changes)
        return {"planes": (replace(plane, extents=(first, *plane.extents[1:])),)}

    return manifest(change)
