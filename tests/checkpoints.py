"""Checkpoints written by hand for the tests, byte by byte: any data offset, any order, any split.

Shares nothing with the readers under test, and nothing with the safetensors library.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PREFIX = "model.language_model."
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ITEM_BYTES = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "I64": 8, "U8": 1}

# primes from 11 on, two heads for each of two orders: 60 rows, padded to 64, in layer 1;
# as PLE layer after that one, layer 5 has 120
TINY_CONFIG: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 8,
    "eos_token_id": 7,
    "ple_layer_ids": [2],
    "ple_embed_dim": 24,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 11,
    "make_ngram_vocab_size_divisible_by": 8,
}
TINY_ROWS = {1: 64, 5: 120}
TINY_WIDTH = 6
TINY_MULTIPLIERS = {
    1: [106616942423619041, 78689173079975253, 43784898443810683],
    5: [142617959292414393, 161146475605222235, 131103562926423341],
}
TINY_SIZES = {1: [11, 13, 17, 19], 5: [23, 29, 31, 37]}
TINY_OFFSETS = {1: [0, 11, 24, 41], 5: [0, 23, 52, 83]}
SCALE_BITS = 0x3951  # the BF16 scale of the released FP8 table
SCALE = 0.00019931793212890625


class Array(NamedTuple):
    """A tensor to write; without data its bytes are a hole in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None

    @property
    def num_bytes(self) -> int:
        size = ITEM_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


def root(layer: int = 1) -> str:
    return f"{PREFIX}layers.{layer}.ple.ple_embedding"


def int64(name: str, values: Sequence[int]) -> Array:
    return Array(name, "I64", (len(values),), np.array(values, "<i8").tobytes())


def hash_buffers(layer: int = 1) -> list[Array]:
    """The three constants of a tiny checkpoint, as the model stores them."""
    return [
        int64(f"{root(layer)}.layer_multipliers", TINY_MULTIPLIERS[layer]),
        int64(f"{root(layer)}.ngram_heads_offsets", TINY_OFFSETS[layer]),
        int64(f"{root(layer)}.ngram_heads_vocab_sizes", TINY_SIZES[layer]),
    ]


def scale(layer: int = 1) -> Array:
    """The scale of an FP8 table: BF16, shape [1]."""
    name = f"{root(layer)}.ngram_embedding.weight_scale"
    return Array(name, "BF16", (1,), struct.pack("<H", SCALE_BITS))


def table_bytes(num_rows: int, row_bytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (num_rows, row_bytes), np.uint8)


def shards(
    table: NDArray[np.uint8],
    counts: Sequence[int],
    *,
    dtype: str = "F8_E4M3",
    style: str = "shard_{}",
    layer: int = 1,
) -> list[Array]:
    """Cut a table into shards of so many rows."""
    width = table.shape[1] // ITEM_BYTES[dtype]
    arrays, row = [], 0
    for shard, count in enumerate(counts):
        name = f"{root(layer)}.ngram_embedding.{style.format(shard)}.weight"
        data = table[row : row + count].tobytes()
        arrays.append(Array(name, dtype, (count, width), data))
        row += count
    return arrays


def write_file(
    path: Path,
    arrays: Sequence[Array],
    *,
    listed: Sequence[int] | None = None,
    padding: int = 0,
    gap: int = 0,
    metadata: dict[str, str] | None = None,
    separators: tuple[str, str] | None = (",", ":"),
) -> dict[str, int]:
    """Write a .safetensors file and return where each tensor starts, in bytes from its start.

    Data lie in the order given, `gap` bytes before each; `listed` is their order in the header,
    which ends with `padding` spaces.
    """
    entries: dict[str, Any] = {}
    places, end = [], 0
    for array in arrays:
        begin = end + gap
        end = begin + array.num_bytes
        places.append(begin)
        entries[array.name] = {
            "dtype": array.dtype,
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    document: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    for position in listed if listed is not None else range(len(arrays)):
        document[arrays[position].name] = entries[arrays[position].name]
    base = write_header(path, json.dumps(document, separators=separators).encode() + b" " * padding)
    with path.open("r+b") as file:
        file.truncate(base + end)
        for array, begin in zip(arrays, places, strict=True):
            if array.data is not None:
                assert len(array.data) == array.num_bytes
                file.seek(base + begin)
                file.write(array.data)
    return {array.name: base + begin for array, begin in zip(arrays, places, strict=True)}


def write_header(path: Path, text: bytes, data: bytes = b"") -> int:
    """Write a file of a header and data, whatever they are, and return where the data start."""
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return 8 + len(text)


def write_index(folder: Path, files: dict[str, str]) -> None:
    """Write the index of a split checkpoint: tensor name to file name."""
    document = {"metadata": {"total_size": 0}, "weight_map": files}
    (folder / INDEX).write_text(json.dumps(document, indent=2))


def write_config(folder: Path, **changes: Any) -> None:
    """Write the tiny config with some fields changed; a field changed to Ellipsis is left out."""
    fields = {**TINY_CONFIG, **changes}
    document = {key: value for key, value in fields.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(document))


def write_tiny(folder: Path, *, seed: int = 0) -> NDArray[np.uint8]:
    """Write a sound FP8 checkpoint of one file and four shards, and return its table."""
    table = table_bytes(TINY_ROWS[1], TINY_WIDTH, seed)
    write_config(folder)
    arrays = [scale(), *shards(table, [16] * 4), *hash_buffers()]
    write_file(folder / FILE, arrays)
    return table
