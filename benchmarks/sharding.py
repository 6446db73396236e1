"""Counts the reads of every rank of a shared table: python benchmarks/sharding.py --dir FOLDER.

Ours is the rank that reads most of real text, its peer the mean over the ranks. The text is read in
chunks of 16K tokens from a table of holes; what counts is its second half. Caches share out the
same memory.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device import Device
from benchmarks.measure import Measure, at_most, finish, judged, options
from benchmarks.ngrams import Trace
from benchmarks.places import holes_at, trace_for

from rowstream import RowStore

_CHUNK = 16_384
_DEPTH = 128
_RELEASED_GIB = 47.7  # fewer rows of a smaller table share a block by chance


def reads_of(
    folder: Path, trace: Trace, tokens: int, rank: int, world: int, by: str, cache_bytes: int
) -> float:
    """Return the reads per token of one rank."""
    chunks = [(first, last) for first, last in trace.chunks(_CHUNK) if last <= tokens]
    half, before = 0, 0
    with RowStore.open(
        folder,
        backend="disk",
        queue_depth=_DEPTH,
        cache_bytes=cache_bytes // world,
        rank=rank,
        world=world,
        shard_by=by,
    ) as store:
        out = np.empty((_CHUNK, store.heads, store.row_bytes), np.uint8)
        for first, last in chunks:
            if not half and first >= tokens // 2:
                half, before = first, int(store.stats()["reads"])
            store.gather(trace.row_ids(first, last), out[: last - first])
        return float(store.stats()["reads"] - before) / (chunks[-1][1] - half)


def main() -> None:
    parser = options(__doc__, gib=_RELEASED_GIB)
    add = parser.add_argument
    add("--tokens", type=int, default=400_000, help="of the text (default 400,000)")
    add("--world", type=int, nargs="+", default=[2, 4, 8], help="ranks (default 2, 4, 8)")
    add("--mib", type=int, default=256, help="cache over all ranks (default 256)")
    arguments = parser.parse_args()
    folder = holes_at(arguments.dir, arguments.gib)
    trace = trace_for(folder)
    found = []
    for cache in (0, arguments.mib):
        for world in arguments.world:
            for by, name in (("heads", "head % ranks"), ("rows", "row ranges")):
                each = [
                    reads_of(folder, trace, arguments.tokens, rank, world, by, cache << 20)
                    for rank in range(world)
                ]
                most, mean = max(each), sum(each) / world
                line = Measure(
                    f"{name}, {world} ranks, {f'{cache} MiB cache' if cache else 'no cache'}",
                    *(16, _DEPTH, most, mean, most / mean, math.nan, "reads/token"),
                )
                found.append(judged(line, at_most(1.02) if by == "heads" else None))
                print(f"{line.measure}: {line.ratio:.4f}", flush=True)
    finish("sharding", found, arguments, Device(arguments.dir).machine())


if __name__ == "__main__":
    main()
