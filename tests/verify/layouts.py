"""Tiny checkpoints in every layout, whose every byte is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import checkpoints

Table = NDArray[np.uint8]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def write_layout(
    folder: Path,
    table: Table,
    *,
    counts: Sequence[int] = (16, 16, 16, 16),
    dtype: str = "F8_E4M3",
    style: str = "shard_{}",
    files: int = 1,
    scale_after: bool = False,
    **options: Any,
) -> None:
    """Write a tiny checkpoint of a table in one of many layouts."""
    folder.mkdir(exist_ok=True)
    checkpoints.write_config(folder)
    arrays = checkpoints.shards(table, counts, dtype=dtype, style=style)
    extra = checkpoints.hash_buffers()
    if dtype == "F8_E4M3":
        extra.append(checkpoints.scale())
    # by name: shard_10 before shard_2
    arrays.sort(key=lambda array: array.name)
    arrays = [*arrays, *extra] if scale_after else [*extra, *arrays]
    per_file = -(-len(arrays) // files)
    for number in range(files):
        part = arrays[number * per_file : (number + 1) * per_file]
        checkpoints.write_file(folder / f"model-{number}.safetensors", part, **options)


def table_of(dtype: str, *, seed: int = 0) -> Table:
    """A table of 64 rows of six values, all finite."""
    width = checkpoints.TINY_WIDTH * checkpoints.ITEM_BYTES[dtype]
    table: Table = checkpoints.table_bytes(64, width, seed) & np.uint8(0x3F)
    return table


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dots": {"style": "shards.{}"},
    "short last": {"counts": [21, 21, 21, 1]},
    "one shard": {"counts": [64]},
    "eleven shards by name": {"counts": [6] * 10 + [4], "files": 3, "scale_after": True},
    "odd offsets": {"padding": 3, "gap": 5, "separators": None, "metadata": {"format": "pt"}},
    "split": {"files": 4},
}
