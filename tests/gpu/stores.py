"""Stores over files of random bytes, of any codec, and what compares their values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from rowstream.manifest import Extent, FileIdentity, Manifest, Plane, TableFile
from rowstream.sharding import Shard
from rowstream.store import RowStore

HEADS = 16
VALUES = 96
ROWS = 9001
SCALE = 0.00019931793212890625
ITEM_BYTES = {"fp8_e4m3": 1, "bf16": 2, "f16": 2, "f32": 4}
CUDA = "cuda"
OpenStore = Callable[..., RowStore]


def store_at(
    folder: Path, codec: str = "fp8_e4m3", shard: Shard | None = None, name: str = "table"
) -> RowStore:
    """Open a store over a file of a folder, which is written if it is missing."""
    row_bytes = VALUES * ITEM_BYTES[codec]
    path = folder / f"{name}-{codec}.bin"
    if not path.exists():
        path.write_bytes(np.random.default_rng().bytes(777 + ROWS * row_bytes))
    manifest = Manifest(
        name="layers.1.ple",
        tensor="table",
        layer=1,
        family="ple",
        format="safetensors",
        root=folder,
        codec=codec,
        scale=SCALE if codec == "fp8_e4m3" else None,
        num_rows=ROWS,
        row_values=VALUES,
        heads=HEADS,
        groups=(8, 8),
        planes=(Plane("codes", row_bytes, (Extent(0, 777, 0, ROWS),)),),
        files=(TableFile(path, FileIdentity.of(path)),),
        hash=None,
    )
    return RowStore(manifest, shard=shard)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit, any NaN counted as the same."""
    one, other = one.cpu(), other.cpu()
    if one.dtype == torch.uint8:
        return torch.equal(one, other)
    nan = one.isnan()
    return torch.equal(nan, other.isnan()) and torch.equal(
        one.contiguous().view(torch.uint8).view(*one.shape, -1)[~nan],
        other.contiguous().view(torch.uint8).view(*other.shape, -1)[~nan],
    )
