"""Which tensor goes into which file, at which byte: the file layouts of two published checkpoints.

`qwen` follows Qwen/Qwen3.8-Flash-Next (files as the safetensors library writes them: compact
header, padded to 8 bytes), `radixark` follows RadixArk/Qwen3.8-Flash-Next-NVFP4 (ten table files,
headers by `json.dumps`, unpadded). Plans only: holds no table bytes and opens no file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

LAYOUTS: Final = ("qwen", "radixark")
LANGUAGE_MODEL: Final = "model.language_model."
PLE: Final = LANGUAGE_MODEL + "layers.1.ple."
PLE_EMBEDDING: Final = PLE + "ple_embedding."
TABLE: Final = PLE_EMBEDDING + "ngram_embedding"
NUM_SHARDS: Final = 128

_ITEM_BYTES = {"F8_E4M3": 1, "BF16": 2, "I64": 8}
# the safetensors library writes the widest types first, then by name
_WIDTH_ORDER = {"I64": 0, "BF16": 1, "F8_E4M3": 2}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to write: either its bytes, or the byte of the table's stream where it starts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None
    table_offset: int | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One safetensors file: `header` with its length prefix, then `tensors` back to back."""

    name: str
    header: bytes
    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(t.num_bytes for t in self.tensors)

    @property
    def tensor_bytes(self) -> int:
        return sum(t.num_bytes for t in self.tensors)


def shard_tensors(num_rows: int, row_values: int, dtype: str) -> list[Tensor]:
    """Split a table of `num_rows` (a multiple of 128) into its 128 shards, in numeric order."""
    rows = num_rows // NUM_SHARDS
    if rows * NUM_SHARDS != num_rows:
        raise ValueError(f"num_rows needs a multiple of {NUM_SHARDS}, got {num_rows}")
    stored = "F8_E4M3" if dtype == "fp8" else "BF16"
    size = rows * row_values * _ITEM_BYTES[stored]
    return [
        Tensor(f"{TABLE}.shard_{i}.weight", stored, (rows, row_values), table_offset=i * size)
        for i in range(NUM_SHARDS)
    ]


def _entries(tensors: Iterable[Tensor]) -> dict[str, object]:
    entries: dict[str, object] = {}
    start = 0
    for t in tensors:
        end = start + t.num_bytes
        entries[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": (start, end)}
        start = end
    return entries


def _library_file(name: str, tensors: Iterable[Tensor]) -> FilePlan:
    """Plan a file as the safetensors library lays it out."""
    ordered = sorted(tensors, key=lambda t: (_WIDTH_ORDER[t.dtype], t.name))
    text = json.dumps(_entries(ordered), separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return FilePlan(name, struct.pack("<Q", len(text)) + text, tuple(ordered))


def _script_file(name: str, tensors: Iterable[Tensor]) -> FilePlan:
    """Plan a file as a plain script writes it: unpadded, so that data may start at an odd byte."""
    given = tuple(tensors)
    text = json.dumps(_entries(given)).encode()
    return FilePlan(name, struct.pack("<Q", len(text)) + text, given)


def _take(tensors: list[Tensor], wanted: Callable[[str], bool]) -> list[Tensor]:
    """Move the tensors whose name is wanted out of the list."""
    taken = [t for t in tensors if wanted(t.name)]
    tensors[:] = [t for t in tensors if not wanted(t.name)]
    return taken


def _has(part: str) -> Callable[[str], bool]:
    return lambda name: part in name


def qwen_files(dense: Sequence[Tensor], shards: Sequence[Tensor]) -> list[FilePlan]:
    """Plan 37 files: the table in 00005 to 00037, first and last shared with other tensors."""
    left = list(dense)
    groups = [
        _take(left, lambda name: "embed_tokens" in name or name == "lm_head.weight"),
        _take(left, _has(".layers.0.")),
        _take(left, _has(".layers.2.")),
        _take(left, _has(".layers.3.")),
    ]
    late = ("ngram_heads_offsets", "ngram_heads_vocab_sizes", "weight_scale")
    groups.append([*_take(left, lambda n: n.startswith(PLE) and not n.endswith(late)), *shards[:2]])
    groups.extend(list(shards[first : first + 4]) for first in range(2, NUM_SHARDS - 2, 4))
    groups.append([*left, *shards[-2:]])
    return [
        _library_file(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group)
        for i, group in enumerate(groups, start=1)
    ]


def radixark_files(dense: Sequence[Tensor], shards: Sequence[Tensor]) -> list[FilePlan]:
    """Plan ten table files of 13 shards in lexicographic order, and dense files.

    The scale lies behind the last 11 shards, the hash buffers in the last dense file.
    """
    left = list(dense)
    table = sorted(shards, key=lambda t: t.name) + _take(left, lambda n: n.startswith(TABLE))
    kind = "plefp8" if shards[0].dtype == "F8_E4M3" else "plebf16"
    files = [
        _script_file(f"model-{kind}-{i:05d}.safetensors", table[13 * i : 13 * (i + 1)])
        for i in range(10)
    ]
    ple = _take(left, lambda n: n.startswith(PLE))
    groups = [_take(left, _has("embed_tokens"))]
    for layer in range(4):
        groups.append(_take(left, _has(f".layers.{layer}.mlp.")))
        groups.append(_take(left, _has(f".layers.{layer}.")))
    files.extend(
        _script_file(f"model-bf16-{i:05d}.safetensors", group)
        for i, group in enumerate([*groups, left, ple])
    )
    return files


def plan_files(layout: str, dense: Sequence[Tensor], shards: Sequence[Tensor]) -> list[FilePlan]:
    """Plan all safetensors files of a layout."""
    check_layout(layout)
    return (qwen_files if layout == "qwen" else radixark_files)(dense, shards)


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout needs one of {', '.join(LAYOUTS)}, got {layout!r}")
