"""Tables of random bytes in two files, and ids, for reads that fail, come late or race."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import raw_tables
from raw_tables import DISK_KINDS, KINDS, RawTable
from rowstream._core import Fault

every_kind = pytest.mark.parametrize("kind", KINDS)
every_disk_kind = pytest.mark.parametrize("kind", DISK_KINDS)

# a gather that is still there a second later, and then gives the right bytes
SLOW = [Fault(0, 1, delay_ms=1000)]


def written(folder: Path) -> RawTable:
    return raw_tables.write(folder, np.random.default_rng(), shard_rows=(3000, 3000, 1234))


def ids_of(raw: RawTable, tokens: int = 200) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.random.default_rng().integers(0, raw.num_rows, (tokens, 16))
