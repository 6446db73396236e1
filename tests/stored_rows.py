"""Rows of a synthetic checkpoint, read straight from its files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

ROW_BYTES = 160


def stored_shards(folder: Path) -> list[tuple[int, Path, int, int]]:
    """Return (shard, file, offset, rows) of a synthetic checkpoint from its headers alone."""
    found = []
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if ".ngram_embedding.shard_" in name:
                shard = int(name.split(".shard_")[1].split(".")[0])
                found.append(
                    (shard, path, 8 + length + entry["data_offsets"][0], entry["shape"][0])
                )
    return sorted(found)


def stored_row(folder: Path, row: int) -> bytes:
    for _, path, offset, rows in stored_shards(folder):
        if row < rows:
            with path.open("rb") as file:
                file.seek(offset + row * ROW_BYTES)
                return file.read(ROW_BYTES)
        row -= rows
    raise AssertionError("no such row")
