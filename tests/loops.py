"""Loops that answer the channels of a table of random bytes, and what is asked of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from raw_tables import RawTable
from rowstream import _core
from streams import Stream

HEADS = 16
ROW_BYTES = 160

OpenLoop = Callable[..., _core.Loop]


def some_ids(raw: RawTable, rng: np.random.Generator, tokens: int) -> NDArray[np.int64]:
    ids = rng.integers(0, raw.num_rows, (tokens, HEADS))
    ids[rng.random(ids.shape) < 0.1] = -1
    return ids


def stream_of(loop: _core.Loop, arena: _core.Arena, tokens: int = 64) -> Stream:
    return Stream(loop.add(arena, tokens * HEADS, ROW_BYTES))
