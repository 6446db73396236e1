"""Tables whose parts do not fit together, configs of nonsense, and what is said of each."""

from __future__ import annotations

import json
import math
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import (
    FILE,
    INDEX,
    TINY_CONFIG,
    Array,
    hash_buffers,
    int64,
    scale,
    shards,
    table_bytes,
    write_config,
    write_file,
    write_index,
    write_tiny,
)
from hostile_files import NAME, POINTER, Write

# --- tables: shards and their likes


def tiny_of(change: Callable[[list[Array]], list[Array]], **config: Any) -> Write:
    def write(folder: Path) -> None:
        write_config(folder, **config)
        rows = shards(table_bytes(64, 6), [16] * 4)
        write_file(folder / FILE, change([scale(), *rows, *hash_buffers()]))

    return write


def with_scale(data: bytes, dtype: str = "F32", shape: tuple[int, ...] = ()) -> Write:
    stored = Array(f"{NAME}.weight_scale", dtype, shape, data)
    return tiny_of(lambda held: [stored, *held[1:]])


def other_constants(position: int) -> Write:
    def change(held: list[Array]) -> list[Array]:
        values = np.frombuffer(held[position].data or b"", "<i8").copy()
        values[0] += 2
        held[position] = int64(held[position].name, values.tolist())
        return held

    return tiny_of(change)


def split(folder: Path, **names: list[Array]) -> None:
    write_config(folder)
    for name, arrays in names.items():
        write_file(folder / f"{name}.safetensors", arrays)


def duplicate_shard(folder: Path) -> None:
    rows = shards(table_bytes(64, 6), [16] * 4)
    split(folder, a=[scale(), *rows], b=[rows[2]])


def missing_file(folder: Path) -> None:
    rows = shards(table_bytes(64, 6), [16] * 4)
    split(folder, a=[scale(), *rows[:3]])
    files = {rows[3].name: "b.safetensors", rows[0].name: "a.safetensors"}
    write_index(folder, files)


TABLES: dict[str, tuple[Write, str]] = {
    "a shard twice": (duplicate_shard, "shard_2.weight needs one file, found also a.safetensors"),
    "a shard of both styles": (
        tiny_of(lambda held: [*held, Array(f"{NAME}.shards.1.weight", "F8_E4M3", (16, 6))]),
        "needs one tensor for a shard",
    ),
    "a shard missing": (tiny_of(lambda held: [*held[:2], *held[3:]]), "needs shard 1, found shard"),
    "the first shard missing": (tiny_of(lambda held: [held[0], *held[2:]]), "needs shard 0, found"),
    "the last shard missing": (tiny_of(lambda held: [*held[:4], *held[5:]]), "rows needs 64, foun"),
    "a file of shards missing": (missing_file, f"b.safetensors needs to exist, named by {INDEX}"),
    "a row no reader can hold": (
        lambda folder: write_file(folder / FILE, [Array(f"{NAME}.weight", "F32", (3, 2**33))]),
        "row width needs 65536 at most, found 8589934592",
    ),
    "a shard number without end": (
        tiny_of(lambda held: [Array(f"{NAME}.shard_{'9' * 4000}.weight", "F8_E4M3", (1, 6))]),
        "needs a name like",
    ),
    "a layer without end": (
        lambda folder: write_file(
            folder / FILE,
            [Array(f"layers.{'9' * 4000}.ple.ple_embedding.ngram_embedding.weight", "F32", (1, 1))],
        ),
        "needs tensors like",
    ),
    "a scale that is no number": (
        with_scale(struct.pack("<f", math.nan)),
        "needs a finite positive scale, found nan",
    ),
    "a scale without end": (with_scale(struct.pack("<f", math.inf)), "finite positive scale, foun"),
    "a scale of zero": (with_scale(bytes(4)), "needs a finite positive scale, found 0.0"),
    "a negative scale": (with_scale(struct.pack("<f", -1)), "finite positive scale, found -1.0"),
    "a scale for each row": (with_scale(bytes(256), shape=(64,)), r"needs \[\] or \[1\]"),
    "other multipliers": (other_constants(5), r"layer_multipliers \[0\] needs \d+, found \d+"),
    "other offsets": (other_constants(6), r"ngram_heads_offsets \[0\] needs 0, found 2"),
    "other sizes": (other_constants(7), r"ngram_heads_vocab_sizes \[0\] needs 11, found 13"),
    "sizes of another seed": (tiny_of(lambda held: held, seed=99), r"layer_multipliers \[0\]"),
}


# --- configs


def config_of(content: bytes) -> Write:
    def write(folder: Path) -> None:
        write_tiny(folder)
        (folder / "config.json").write_bytes(content)

    return write


def changed(**fields: Any) -> Write:
    return config_of(json.dumps({**TINY_CONFIG, **fields}).encode())


def sparse_config(folder: Path) -> None:
    write_tiny(folder)
    os.truncate(folder / "config.json", 1 << 40)


CONFIGS: dict[str, tuple[Write, str]] = {
    "empty": (config_of(b""), "config.json needs a JSON object"),
    "cut off": (config_of(b'{"model_type": "qwen4'), "config.json needs a JSON object"),
    "an LFS pointer": (config_of(POINTER), "config.json needs a JSON object"),
    "a list": (config_of(b"[]"), "config.json needs a JSON object, found list"),
    "noise": (config_of(random.Random(3).randbytes(999)), "config.json needs a JSON object"),
    "a terabyte": (sparse_config, "config.json needs 16000000 bytes at most"),
    "deeper than any stack": (config_of(b'{"a":' * 1_000_000), "found maximum recursion"),
    "a number of a million digits": (
        config_of(b'{"seed":' + b"9" * 1_000_000 + b"}"),
        "found Exceeds the limit",
    ),
    "not a number": (changed(ngram_vocab_size_base=math.nan), "ngram_vocab_size_base needs an int"),
    "a value of a megabyte": (changed(seed="x" * 1_000_000), r"seed needs an .* found xx"),
    "a value of many lines": (changed(model_type="a\nb\x1b[0m"), r"found a\\nb\\x1b\[0m"),
    "layers by the million": (
        changed(ple_layer_ids=list(range(1, 1_500_000))),
        "ple_layer_ids needs a list of integers from 1 to 4096",
    ),
    "primes without end": (
        changed(
            ple_layer_ids=list(range(1, 65)),
            heads_per_ngram=512,
            ple_embed_dim=1024,
            ngram_vocab_size_base=2**40,
        ),
        "ple_layer_ids needs 4096 heads in total at most, found 65536",
    ),
    "the most primes that are allowed": (
        changed(
            ple_layer_ids=list(range(1, 65)),
            heads_per_ngram=32,
            ple_embed_dim=64,
            ngram_vocab_size_base=2**40,
            vocab_size=2**31,
        ),
        "ple_layer_ids 1 needs a table in layer 0",
    ),
}
