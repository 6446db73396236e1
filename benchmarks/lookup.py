"""Measures what a lookup adds to a step of a model on a GPU: python benchmarks/lookup.py.

Each figure is the difference of two graphs that differ in the lookup alone, replayed in turn. The
rows come from the cache; what reads cost is in behind.py.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device import Device
from benchmarks.gpu import (
    CUDA,
    Arm,
    Steps,
    added,
    captured,
    memory,
    percentile,
    replay_in_turn,
    work_of,
)
from benchmarks.measure import Measure, at_most, finish, judged, options
from benchmarks.places import table_at

from rowstream import RowStore
from rowstream.device import driver
from rowstream.device.channel import Output
from rowstream.device.lookup import Lookup

_CACHE_BYTES = 64 << 20


def cached(lookup: Lookup, turns: int) -> list[Measure]:
    """Rows that are in the cache, beside 56 us of work and alone."""
    found: list[Measure] = []
    for tokens in (1, 4, 16, 64):
        arms = Steps(lookup, work_of(56, CUDA), fresh=False).arms(tokens)
        count = turns if tokens == 1 else turns // 5
        replay_in_turn(arms, count)
        bound = 2.0 if tokens == 1 else None
        found += added("cached rows beside 56 us", tokens * 16, arms, bound)
        for arm in arms.values():
            arm.times_us.clear()
        replay_in_turn(arms, count // 8, queued=8)
        found += added("the same, 8 queued", tokens * 16, arms, None)[:1]
    alone = {"alone": Steps(lookup, None, fresh=False).arm(1)}
    for queued, bound in ((8, 30.0), (1, None)):
        replay_in_turn(alone, turns // queued, queued=queued)
        for share in (50, 99):
            ours = percentile(alone["alone"].times_us, share)
            name = f"the path alone, {queued} queued, p{share}"
            line = Measure(name, 16, 0, ours, 0, 0, float("nan"), "us")
            found.append(judged(line, at_most(bound, "us") if bound and share == 50 else None))
        alone["alone"].times_us.clear()
    return found


def beside_copies(lookup: Lookup, turns: int) -> list[Measure]:
    """Cached rows while 1 GiB goes both ways on other streams."""
    host = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    other = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    memory = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
    up, down = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]

    def copy() -> None:
        for stream in (up, down):
            if not stream.query():
                continue
            with torch.cuda.stream(stream):
                for _ in range(4):
                    if stream is up:
                        memory.copy_(host, non_blocking=True)
                    else:
                        other.copy_(memory, non_blocking=True)

    copy()
    arms = Steps(lookup, work_of(56, CUDA), fresh=False).arms(1)
    replay_in_turn(arms, turns, between=copy)
    torch.cuda.synchronize()
    ours, peer = (percentile(arms[arm].times_us, 99) for arm in ("with", "without"))
    line = Measure(
        "beside 1 GiB copies both ways: step in all, p99", 16, 0, ours, peer, ours / peer,
        float("nan"), "us",
    )  # fmt: skip
    return [judged(line, at_most(100.0, "us")), *added("beside the copies", 16, arms, None)[:2]]


def takes(lookup: Lookup, turns: int) -> list[Measure]:
    """The take alone: of 16 rows, and of 16K tokens in pieces of several sizes."""
    path = lookup.path(CUDA)
    link = path.link  # type: ignore[union-attr]
    store = lookup.store
    output = lookup.outputs.of(torch.empty(0, dtype=torch.bfloat16, device=CUDA))
    # rows to take: those of a lookup that is answered
    ids = torch.randint(store.num_rows, (link.eager_tokens, store.heads), device=CUDA)
    lookup(ids, torch.empty((*ids.shape, store.row_bytes), dtype=torch.uint8, device=CUDA))
    torch.cuda.synchronize()
    channel = link.borrow(torch.cuda.current_stream().cuda_stream)
    staging = channel.core.staging_address
    pinned = link.arena.on_device(staging)
    raw = torch.zeros((*ids.shape, store.row_bytes), dtype=torch.uint8, device=CUDA)
    channel.take(torch.cuda.current_stream().cuda_stream, raw, len(ids), Output(0x7F))
    if not np.array_equal(raw.cpu().numpy().ravel(), channel.core.staging.ravel()[: raw.nbytes]):
        raise RuntimeError("takes are void: no report")

    def take(stream: int, rows: int, out: torch.Tensor) -> None:
        link.kernels.take(
            stream,
            channel.state.data_ptr(),
            rows,
            out.data_ptr(),
            len(out),
            link.heads,
            link.slot_of,
            link.owned,
            link.row_bytes,
            output.void_value,
            output.lut_address,
            output.value_bytes,
            channel.answer,
        )

    def arm(times: int, tokens: int, way: str) -> Arm:
        num_bytes = tokens * store.heads * store.row_bytes
        shape = (tokens, store.heads, store.row_values)
        out = torch.empty(shape, dtype=torch.bfloat16, device=CUDA)
        room = torch.empty(num_bytes, dtype=torch.uint8, device=CUDA)

        def step() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for _ in range(times):
                if way != "take":
                    driver.copy_async(stream, room.data_ptr(), staging, num_bytes)
                if not way.startswith("copy"):
                    take(stream, pinned if way == "take" else room.data_ptr(), out)

        return captured(step)

    arms = {"takes": arm(100, 1, "take")}
    replay_in_turn(arms, 200)
    ours = percentile(arms["takes"].times_us, 50) / 100
    line = Measure("take of 16 rows, one of 100", 16, 0, ours, 0, 0, float("nan"), "us")
    found = [judged(line, at_most(10.0, "us"))]
    for tokens in (64, 256, link.eager_tokens):
        pieces = 16_384 // tokens
        ways = ("take", "copied first", "copy", "copy again")
        arms = {way: arm(pieces, tokens, way) for way in ways}
        replay_in_turn(arms, max(20, turns // 50))
        mine, first, one, other = (percentile(arms[way].times_us, 50) for way in ways)
        peer = (one + other) / 2
        rows = tokens * store.heads
        name = f"take of 16K tokens in pieces of {rows:,} rows / copies of as many bytes"
        bound = at_most(1.3) if tokens == link.eager_tokens else None
        for named, us, wanted in ((name, mine, bound), ("the same, copied first", first, None)):
            line = Measure(named, 16_384 * store.heads, 0, us, peer, us / peer, other / one, "us")
            found.append(judged(line, wanted))
    link.give_back(channel, torch.cuda.current_stream().cuda_stream)
    return found


def prefill(lookup: Lookup) -> list[Measure]:
    """An eager lookup of 8K new tokens, in pieces."""
    store = lookup.store
    tokens = 8192
    out = torch.empty((tokens, store.heads, store.row_values), dtype=torch.bfloat16, device=CUDA)
    times = []
    for _ in range(5):
        ids = torch.randint(store.num_rows, (tokens, store.heads), device=CUDA)
        torch.cuda.synchronize()
        began = time.perf_counter()
        lookup(ids, out)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    per_1k = sorted(times)[2] * 1e3 / (tokens / 1024)
    return [
        Measure("prefill of new rows, per 1K tokens", 16_384, 0, per_1k, 0, 0, float("nan"), "ms")
    ]


def main() -> None:
    parser = options(__doc__, gib=4.0)
    parser.add_argument("--turns", type=int, default=5000, help="replays of each (default 5000)")
    arguments = parser.parse_args()
    folder = table_at(arguments.dir, arguments.gib)
    turns = arguments.turns
    began = time.perf_counter()
    with RowStore.open(folder, backend="disk", cache_bytes=_CACHE_BYTES) as store:
        opened_ms = (time.perf_counter() - began) * 1e3
        lookup = Lookup(store)
        began = time.perf_counter()
        lookup.warm_up(CUDA, [torch.bfloat16])
        warm_s = time.perf_counter() - began
        found = [
            Measure("time to open", 0, 0, opened_ms, 0, 0, float("nan"), "ms"),
            Measure("time to warm up, probe included", 0, 0, warm_s, 0, 0, float("nan"), "s"),
        ]
        print(lookup.sync_reason, lookup.stats(), flush=True)
        for part in (cached, beside_copies, takes):
            found += part(lookup, turns)
            print(f"{part.__name__}: {time.perf_counter() - began:.0f} s", flush=True)
        found += prefill(lookup)
        found.append(memory(lookup, cache_bytes=_CACHE_BYTES))
        lookup.check()
        lookup.close()
    finish("lookup", found, arguments, Device(folder).machine())


if __name__ == "__main__":
    main()
