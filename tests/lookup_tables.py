"""Tiny tables of every codec, and what NumPy says that a lookup must make of their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import checkpoints
from checkpoints import (
    ITEM_BYTES,
    SCALE,
    TINY_ROWS,
    TINY_WIDTH,
    hash_buffers,
    shards,
    table_bytes,
    write_config,
    write_file,
)

HEADS, NUM_ROWS = 4, TINY_ROWS[1]
CODECS = {"fp8_e4m3": "F8_E4M3", "bf16": "BF16", "f16": "F16", "f32": "F32"}
FLOATS = ["bfloat16", "float16", "float32"]


def rounded(values: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    """Round to the nearest number of the type, ties to even."""
    if name == "float32":
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        if name == "float16":
            return values.astype(np.float16).astype(np.float32)
        bits = values.view(np.uint32).astype(np.uint64)
        up = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
        nearest = up.astype(np.uint32).view(np.float32)
    return np.where(np.isnan(values), values, nearest)


def stored(rows: NDArray[np.uint8], codec: str) -> NDArray[np.float32]:
    """Values of rows without their scale."""
    with np.errstate(invalid="ignore"):
        if codec == "f32":
            return rows.view("<f4")
        if codec == "f16":
            return rows.view("<f2").astype(np.float32)
        if codec == "bf16":
            return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
        exponent, mantissa = rows >> 3 & 15, (rows & 7).astype(np.float64)
        small = np.ldexp(mantissa, -9)
        large = np.ldexp(8 + mantissa, exponent.astype(int) - 10)
        magnitude = np.where(exponent == 0, small, large)
        magnitude[rows & 127 == 127] = np.nan
        return np.where(rows & 128, -magnitude, magnitude).astype(np.float32)


def expected(
    rows: NDArray[np.uint8], codec: str, name: str, rounding: str, scale: float = SCALE
) -> NDArray[np.float32]:
    """What a lookup must give for the rows, as float32."""
    values = stored(rows, codec)
    if codec != "fp8_e4m3":
        return rounded(values, name)
    factor = np.array([scale], np.float32)
    if rounding == "out":
        values, factor = rounded(values, name), rounded(factor, name)
    return rounded(values * factor, name)


def same(found: Any, wanted: NDArray[np.float32]) -> bool:
    values = found.float().numpy()
    signs = np.signbit(values) == np.signbit(wanted)
    return np.array_equal(values, wanted, equal_nan=True) and bool((signs | np.isnan(wanted)).all())


def write(folder: Path, codec: str) -> NDArray[np.uint8]:
    """Write a checkpoint of the codec and return its rows."""
    kind = CODECS[codec]
    table = table_bytes(NUM_ROWS, TINY_WIDTH * ITEM_BYTES[kind], seed=3)
    if codec == "fp8_e4m3":
        table.reshape(-1)[:256] = np.arange(256)
    write_config(folder)
    arrays = [*shards(table, [16] * 4, dtype=kind), *hash_buffers()]
    write_file(
        folder / "model.safetensors", [*arrays, *[checkpoints.scale()] * (codec == "fp8_e4m3")]
    )
    return table


def some_ids(*shape: int) -> NDArray[np.int64]:
    return np.random.default_rng(11).integers(0, NUM_ROWS, (*shape, HEADS))


def empty(shape: tuple[int, ...], width: int, dtype: Any = None) -> Any:
    """An output that was never filled."""
    return torch.full((*shape, width), 77, dtype=dtype or torch.uint8)
