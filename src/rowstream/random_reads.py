"""How fast a disk answers random 4 KiB reads at one depth, measured in about 0.15 s.

Measures through the core's own reader, so that the figures are those that gathers can have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rowstream import _core
from rowstream.block_device import BlockDevice
from rowstream.manifest import Manifest

__all__ = [
    "DEPTHS",
    "DEVICE_SHARE",
    "READ_BYTES",
    "Blocks",
    "RandomReads",
    "from_device",
    "measure",
    "of_table",
]

# (bytes of a block, (file, offset, first block, blocks) each), as the core takes it for rows
Blocks = tuple[int, list[tuple[int, int, int, int]]]

DEPTHS = (1, 16, 64, 192)
READ_BYTES = 4096

_RATE_S = 0.1
_BATCHES_S = 0.05
_MOST_READS = 4096  # of one gather: 16 MiB of output
# of the reads issued; the rest of the machine can only add to what the device counts
DEVICE_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class RandomReads:
    """Random reads at one depth."""

    depth: int
    reads_per_s: float  # with the queue kept full
    p50_us: float  # until `depth` reads submitted at once are all there
    reads: int
    device_reads: int | None  # what the device counted meanwhile


def of_table(manifest: Manifest, block: int) -> Blocks:
    """Return the aligned blocks that lie whole within a table's rows."""
    extents = []
    first = 0
    for plane in manifest.planes:
        for extent in plane.extents:
            start = -(-extent.offset // block) * block
            end = extent.offset + extent.num_rows * plane.row_bytes
            count = max(0, (end - start) // block)
            if count:
                extents.append((extent.file, start, first, count))
                first += count
    return block, extents


def measure(
    open_at: Callable[[int], _core.DiskTable], depth: int, device: BlockDevice
) -> RandomReads:
    """Measure at one depth; `open_at(depth)` opens a table whose rows are the blocks to read."""
    rng = np.random.default_rng()
    # written: a page's first touch is not the disk's
    out = np.ones((_MOST_READS, 1, READ_BYTES), np.uint8)
    table = open_at(depth)

    def gather(reads: int) -> float:
        ids = rng.integers(table.num_rows, size=(reads, 1))
        began = time.perf_counter()
        table.gather(ids, (1,), out[:reads])
        return time.perf_counter() - began

    try:
        device_before = device.completed_reads()
        batches = [gather(depth)]
        while sum(batches) < _BATCHES_S:
            batches.append(gather(depth))
        p50_s = float(np.median(batches))
        # long gathers for the rate: at both ends of one the queue is not full
        size = min(_MOST_READS, max(depth, int(depth / p50_s * _RATE_S)))
        reads_before, elapsed_s = table.counters()["reads"], 0.0
        while elapsed_s < _RATE_S:
            elapsed_s += gather(size)
        reads = table.counters()["reads"]
        device_after = device.completed_reads()
    finally:
        table.close()
    counted = (
        None if device_before is None or device_after is None else device_after - device_before
    )
    return RandomReads(depth, (reads - reads_before) / elapsed_s, p50_s * 1e6, reads, counted)


def from_device(measured: Sequence[RandomReads]) -> bool | None:
    """Return whether the device's own count confirms the reads; None if it does not count."""
    counted = [m.device_reads for m in measured if m.device_reads is not None]
    if not measured or len(counted) < len(measured):
        return None
    return sum(counted) >= DEVICE_SHARE * sum(m.reads for m in measured)
