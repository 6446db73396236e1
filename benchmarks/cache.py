"""Measures the store's cache with real text: python benchmarks/cache.py --dir FOLDER.

Every gather with a cache is repeated by an exact simulator, and a count that differs ends the run.
The curve over budgets is read from a table of holes, where reads cost next to nothing; prefill
from the disk. Decoding is in decode.py.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device import Device
from benchmarks.measure import Bound, Measure, at_most, finish, judged, options
from benchmarks.mirrored import MirroredStore
from benchmarks.ngrams import Trace
from benchmarks.places import holes_at, table_at, trace_for

from rowstream import RowStore

_CHUNK = 16_384
_READS = 8  # of a group
_DEPTH = 128
_PARTS = ("curve", "prefill")
_FILLED = 0.99
_DOCUMENTS = 11


def curve(folder: Path, trace: Trace, mib: Sequence[int], tokens: int) -> list[Measure]:
    """Read the text in chunks with caches of all sizes; what counts is its second half."""
    chunks = [(first, last) for first, last in trace.chunks(_CHUNK) if last <= tokens]
    found = []
    for budget in mib:
        store = MirroredStore(folder, trace, budget << 20, _DEPTH)
        half, reads = 0, 0
        for first, last in chunks:
            if not half and first >= tokens // 2:
                half, reads = first, store.reads
            store.gather([(first, last)])
        store.check()
        later = [first >= half for first, _ in chunks]
        count = chunks[-1][1] - half
        read = (store.reads - reads) / count
        wanted = store.misses[later].sum() * _READS / count
        found.append(_count(f"16K chunks, {budget} MiB cache, holes", read, wanted, None))
        store.close()
        print(f"{budget} MiB: {read:.2f} reads per token of 16", flush=True)
    return found


def _count(name: str, reads: float, rows: float, bound: Bound | None) -> Measure:
    # the peer: rows that the simulator's cache has not; some of them share a block
    line = Measure(
        name, 16, _DEPTH, reads, rows, reads / rows, math.nan, "reads/token", verdict="exact"
    )
    return judged(line, bound)


def prefill(folder: Path, device: Device, trace: Trace, filled: int, plain: int) -> list[Measure]:
    """Read first chunks of documents with 1 GiB filled by others; some also without a cache."""
    store = MirroredStore(folder, trace, 1 << 30, _DEPTH)
    bare = RowStore.open(folder, backend="disk", queue_depth=_DEPTH)
    end = store.fill(filled, _CHUNK)
    print(f"{end} tokens of others read: the cache is {store.full():.1%} full", flush=True)
    if store.full() < _FILLED:
        raise RuntimeError(f"the cache is {store.full():.1%} full: more text to fill it")
    out = np.zeros((_CHUNK, bare.heads, bare.row_bytes), np.uint8)
    waits: list[tuple[float, float]] = []
    reads = misses = 0
    for turn, first in enumerate(trace.documents(end, _CHUNK, _DOCUMENTS)):
        ids = trace.row_ids(first, first + _CHUNK)
        each = [0.0, 0.0]
        # who comes second may find blocks in a cache below the device
        for arm in (turn % 2, 1 - turn % 2) if turn < plain else (0,):
            if arm == 1:
                began = time.perf_counter()
                bare.gather(ids, out)
                each[1] = _CHUNK / (time.perf_counter() - began)
                continue
            counted, before = device.reads(), store.reads
            each[0] = _CHUNK / (store.gather([(first, first + _CHUNK)]) * 1e-9)
            device.check(counted, store.reads - before)
            reads += store.reads - before
            misses += int(store.misses[-1])
        if turn < plain:
            waits.append((each[0], each[1]))
    store.check()
    tokens = _CHUNK * _DOCUMENTS
    name = f"first 16K chunk, 1024 MiB cache filled by {end} tokens of others"
    bound = at_most(6.5, "reads/token")
    found = [_count(name, reads / tokens, misses * _READS / tokens, bound)]
    if waits:
        ratio = median(ours / theirs for ours, theirs in waits)
        ours, theirs = (median(side) for side in zip(*waits, strict=True))
        name = "the same, tokens/s / no cache"
        found.append(Measure(name, 16, _DEPTH, ours, theirs, ratio, math.nan, "1/s"))
    store.close()
    bare.close()
    return found


def main() -> None:
    parser = options(__doc__)
    add = parser.add_argument
    add("--mib", type=int, nargs="*", default=[16, 64, 256, 1024, 4096], help="caches of the curve")
    add("--tokens", type=int, help="of the text for the curve (default: all)")
    add("--fill", type=int, default=1_000_000, help="tokens that fill 1 GiB (default 1 million)")
    add("--plain", type=int, default=5, help="documents read without a cache too (default 5)")
    add("--part", nargs="+", default=list(_PARTS), choices=_PARTS, help="what to measure")
    arguments = parser.parse_args()
    device = Device(arguments.dir)
    if "curve" in arguments.part:
        holes = holes_at(arguments.dir, arguments.gib)
        trace = trace_for(holes)
        found = curve(holes, trace, arguments.mib, arguments.tokens or len(trace.keys))
        finish("cache-curve", found, arguments, device.machine())
    if "prefill" in arguments.part:
        folder = table_at(arguments.dir, arguments.gib)
        found = prefill(folder, device, trace_for(folder), arguments.fill, arguments.plain)
        finish("cache-prefill", found, arguments, device.machine())


if __name__ == "__main__":
    main()
