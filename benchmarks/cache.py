"""Measures the store's cache with real text: python benchmarks/cache.py --dir FOLDER.

Every gather with a cache is repeated by an exact simulator, and a count that differs ends the run.
The curve over budgets is read from a table of holes, where reads cost next to nothing; the rest
from the disk.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device import Device
from benchmarks.mirrored import MirroredStore
from benchmarks.ngrams import Trace, released_constants
from benchmarks.reader import Measure, table_at, verdict, write_results
from benchmarks.text import load_corpus

from rowstream import RowStore, tables
from rowstream.synth import write_checkpoint

_ROOT = Path(__file__).resolve().parents[1]
_CHUNK = 16_384
_READS = 8  # of a group
_BLOCK = 500
_EVERY_S = 0.005
_DEPTH = 128
_PARTS = ("curve", "prefill", "decode")


def judged(value: float, at_most: float) -> str:
    """Judge a count, which has no noise."""
    return f"{'met' if value <= at_most else 'missed'} (<= {at_most}), exact"


def documents(trace: Trace, after: int, tokens: int, count: int) -> list[int]:
    """Return the first tokens of documents of some length that begin after a token."""
    starts = trace.corpus.starts
    long = np.flatnonzero((np.diff(starts) >= tokens) & (starts[:-1] >= after))
    if len(long) < count:
        raise RuntimeError(f"{count} documents of {tokens} tokens needed, {len(long)} are left")
    return [int(starts[index]) for index in long[:count]]


def fill(store: MirroredStore, tokens: int) -> int:
    """Read whole documents from the start of the text, at least so many tokens."""
    for first, last in store.trace.chunks(_CHUNK):
        if first >= tokens and first in store.trace.corpus.starts:
            return first
        store.gather([(first, last)])
    return len(store.trace.keys)


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
        found.append(_count(f"16K chunks, {budget} MiB cache, holes", read, wanted, "exact"))
        store.close()
        print(f"{budget} MiB: {read:.2f} reads per token of 16", flush=True)
    return found


def _count(name: str, reads: float, rows: float, verdict_: str) -> Measure:
    # the peer: rows that the simulator's cache has not; some of them share a block
    return Measure(name, 16, _DEPTH, reads, rows, reads / rows, 1.0, "reads/token", verdict_)


def prefill(folder: Path, device: Device, trace: Trace, filled: int) -> list[Measure]:
    """Read first chunks of documents with 1 GiB filled by others, and without a cache."""
    store = MirroredStore(folder, trace, 1 << 30, _DEPTH)
    plain = RowStore.open(folder, backend="disk", queue_depth=_DEPTH)
    end = fill(store, filled)
    out = np.zeros((_CHUNK, plain.heads, plain.row_bytes), np.uint8)
    waits: list[tuple[float, float]] = []
    reads = misses = 0
    for turn, first in enumerate(documents(trace, end, _CHUNK, 11)):
        ids = trace.row_ids(first, first + _CHUNK)
        each = [0.0, 0.0]
        # who comes second may find blocks in a cache below the device
        for arm in (turn % 2, 1 - turn % 2):
            if arm == 1:
                began = time.perf_counter()
                plain.gather(ids, out)
                each[1] = _CHUNK / (time.perf_counter() - began)
                continue
            counted, before = device.reads(), store.reads
            each[0] = _CHUNK / (store.gather([(first, first + _CHUNK)]) * 1e-9)
            device.check(counted, store.reads - before)
            reads += store.reads - before
            misses += int(store.misses[-1])
        waits.append((each[0], each[1]))
    store.check()
    tokens = _CHUNK * len(waits)
    read = reads / tokens
    name = f"first 16K chunk, 1024 MiB cache filled by {end} tokens of others"
    found = [_count(name, read, misses * _READS / tokens, judged(read, 6.5))]
    ratio = median(ours / theirs for ours, theirs in waits)
    ours, theirs = (median(side) for side in zip(*waits, strict=True))
    found.append(
        Measure(
            "the same, tokens/s / no cache",
            16,
            _DEPTH,
            ours,
            theirs,
            ratio,
            math.nan,
            "1/s",
            "shown",
        )
    )
    store.close()
    plain.close()
    return found


def lanes(store: MirroredStore, device: Device, after: int, steps: int) -> list[Measure]:
    """Decode documents side by side, one token of each at a time; of few lanes several sets."""
    found = []
    for count in (1, 4, 16, 64):
        starts = documents(store.trace, after, steps, max(count, 16))
        counted, before = device.reads(), store.reads
        done = len(store.misses)
        waits = [
            store.gather([(first + step, first + step + 1) for first in starts[at : at + count]])
            for at in range(0, len(starts), count)
            for step in range(steps)
        ]
        device.check(counted, store.reads - before)
        tokens = len(starts) * steps
        reads, rows = (store.reads - before) / tokens, store.misses[done:].sum() * _READS / tokens
        found.append(_count(f"{count} lanes, 256 MiB cache", reads, rows, "exact"))
        p50 = median(waits) / 1000
        print(f"{count} lanes: {reads:.2f} reads per token, step p50 {p50:.0f} us", flush=True)
        after = starts[-1] + steps
    store.check()
    return found


def decode(
    store: MirroredStore, folder: Path, device: Device, after: int, rounds: int
) -> list[Measure]:
    """Decode at one token per 5 ms in blocks with the cache, without, and without again."""
    plain = RowStore.open(folder, backend="disk", queue_depth=_DEPTH)
    trace = store.trace
    out = np.zeros((1, plain.heads, plain.row_bytes), np.uint8)
    blocks: list[list[float]] = [[], [], []]
    prompt = 2048
    all_waits: list[list[float]] = [[], [], []]
    starts = documents(trace, after, prompt + 3 * _BLOCK, rounds)
    for turn, start in enumerate(starts):
        store.gather([(start, start + prompt)])
        for place in range(3):
            arm = (turn + place) % 3
            first = start + prompt + place * _BLOCK
            waits = []
            counted, issued = device.reads(), int(plain.stats()["reads"])
            next_at = time.perf_counter()
            for token in range(first, first + _BLOCK):
                next_at += _EVERY_S
                time.sleep(max(0.0, next_at - time.perf_counter()))
                if arm == 0:
                    waits.append(store.gather([(token, token + 1)]) / 1000)
                    continue
                ids = trace.row_ids(token, token + 1)
                began = time.perf_counter_ns()
                plain.gather(ids, out)
                waits.append((time.perf_counter_ns() - began) / 1000)
            if arm != 0:
                device.check(counted, int(plain.stats()["reads"]) - issued)
                # what was said without the cache belongs to the conversation all the same
                for token in range(first, first + _BLOCK):
                    store.gather([(token, token + 1)])
            blocks[arm].append(mean(waits))
            all_waits[arm] += waits
    store.check()
    plain.close()
    pairs = list(zip(*blocks, strict=True))
    ratio = median(on / ((off + again) / 2) for on, off, again in pairs)
    aa = median(again / off for _, off, again in pairs)
    off = [(one + other) / 2 for _, one, other in pairs]
    name = "decode wait, 256 MiB cache / none, mean"
    found = [
        Measure(
            name, 16, _DEPTH, median(blocks[0]), median(off), ratio, aa, "us",
            verdict(ratio, aa, None, 0.6),
        )
    ]  # fmt: skip
    for percentile in (50, 95, 99):
        on, one, other = (float(np.percentile(waits, percentile)) for waits in all_waits)
        peer = (one + other) / 2
        name = f"decode wait, 256 MiB cache / none, p{percentile}"
        found.append(
            Measure(name, 16, _DEPTH, on, peer, on / peer, other / one, "us", "shown")
        )  # fmt: skip
    return found


def holes_at(folder: Path, gib: float) -> Path:
    """Return a checkpoint whose table of that size has no bytes at all."""
    place = folder / f"holes-{gib:g}gib"
    if not (place / "config.json").exists():
        write_checkpoint(place, table_gib=gib, sparse=True)
    return place


def trace_for(folder: Path, trace: Trace | None = None) -> Trace:
    """Return the trace of the corpus for the table at a folder."""
    (manifest,) = tables(folder)
    constants = released_constants(manifest.hash)
    if trace is not None and trace.constants == constants:
        return trace
    return Trace.of(load_corpus(), constants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--dir", type=Path, default=_ROOT / "build" / "bench", help="where the tables are or go")
    add("--gib", type=float, default=8.0, help="size of the tables (default 8)")
    add("--mib", type=int, nargs="*", default=[16, 64, 256, 1024, 4096], help="caches of the curve")
    add("--tokens", type=int, help="of the text for the curve (default: all)")
    add("--fill", type=int, default=2_000_000, help="tokens that fill 1 GiB (default 2 million)")
    add("--rounds", type=int, default=11, help="rounds of decode (default 11)")
    add("--steps", type=int, default=500, help="tokens of each lane (default 500)")
    add("--part", nargs="+", default=list(_PARTS), choices=_PARTS, help="what to measure")
    add("--machine", help="name of the results (default: processors, kernel, device)")
    add("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()
    load = os.getloadavg()
    folder = table_at(arguments.dir, arguments.gib)
    device = Device(folder / "config.json")
    machine = arguments.machine or device.machine()
    trace = trace_for(folder)
    for part in arguments.part:
        if part == "curve":
            holes = holes_at(arguments.dir, arguments.gib)
            trace = trace_for(holes, trace)
            found = curve(holes, trace, arguments.mib, arguments.tokens or len(trace.keys))
        elif part == "prefill":
            trace = trace_for(folder, trace)
            found = prefill(folder, device, trace, arguments.fill)
        else:
            trace = trace_for(folder, trace)
            store = MirroredStore(folder, trace, 256 << 20, _DEPTH)
            end = fill(store, arguments.fill // 4)
            found = decode(store, folder, device, end, arguments.rounds)
            found += lanes(store, device, len(trace.keys) // 2, arguments.steps)
            store.close()
        for m in found:
            print(
                f"{m.measure:68}{m.ours:10.5g}{m.peer:10.5g}{m.ratio:8.3f}{m.aa:8.3f}  "
                f"{m.unit}, {m.verdict}"
            )
        if not arguments.no_results:
            name = f"cache-{part}-{machine}.csv"
            write_results(_ROOT / "benchmarks" / "results" / name, found)
            print(f"written to {name}")
    print(f"load average {load[0]:.2f} before, {os.getloadavg()[0]:.2f} after")


if __name__ == "__main__":
    main()
