"""Parts of a tiny table, and the refusal of a folder that holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints import TINY_ROWS, TINY_WIDTH, Array, root, shards, table_bytes
from rowstream.catalog import tables
from rowstream.errors import ManifestError


def tiny_shards(**keywords: Any) -> list[Array]:
    return shards(table_bytes(TINY_ROWS[1], TINY_WIDTH), [16] * 4, **keywords)


def refused(folder: Path, message: str) -> ManifestError:
    with pytest.raises(ManifestError, match=message) as caught:
        tables(folder)
    assert "\n" not in str(caught.value)
    return caught.value


def named(part: str, dtype: str = "F8_E4M3", shape: tuple[int, ...] = (1,)) -> Array:
    return Array(f"{root()}.ngram_embedding.{part}", dtype, shape)


def fused(shape: tuple[int, ...], dtype: str = "F8_E4M3") -> Array:
    return named("weight", dtype, shape)
