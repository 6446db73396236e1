"""Measures decoding with a cache and without: python benchmarks/decode.py --dir FOLDER.

Real text, one token every 5 ms in blocks of 500, and up to 64 lanes at once. A block is made of
many conversations one after the other: what a document repeats differs from none to all of its
n-grams, so that blocks of single documents would compare documents. Every gather with the cache is
repeated by an exact simulator, and a count that differs ends the run.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device import Device
from benchmarks.measure import (
    Measure,
    at_most,
    compare,
    finish,
    one_of_each,
    options,
    paced,
    turn_of,
)
from benchmarks.mirrored import MirroredStore
from benchmarks.places import table_at, trace_for

from rowstream import RowStore

_CHUNK = 16_384
_READS = 8  # of a group
_BLOCK = 500
_TALKS = 20  # conversations, each with its part of every block
_PROMPT = 2048
_EVERY_S = 0.005
_DEPTH = 128
_CACHE_MIB = 256
_ARMS = ("on", "off", "off again")
_PARTS = ("waits", "lanes")


class Decoder:
    """A store with a cache and one without, and text to decode."""

    def __init__(self, store: MirroredStore, folder: Path, device: Device) -> None:
        self.store = store
        self.trace = store.trace
        self.device = device
        self.plain = RowStore.open(folder, backend="disk", queue_depth=_DEPTH)
        self._out = np.zeros((64, self.plain.heads, self.plain.row_bytes), np.uint8)

    def with_cache(self, tokens: Sequence[int]) -> float:
        """Gather tokens at once; returns the wait in us."""
        return self.store.gather([(token, token + 1) for token in tokens]) / 1000

    def without(self, tokens: Sequence[int]) -> float:
        """Gather tokens at once without the cache; returns the wait in us."""
        ids = np.concatenate([self.trace.row_ids(token, token + 1) for token in tokens])
        began = time.perf_counter_ns()
        self.plain.gather(ids, self._out[: len(ids)])
        return (time.perf_counter_ns() - began) / 1000

    def block(self, tokens: Sequence[int], cached: bool) -> tuple[list[float], NDArray[np.int64]]:
        """Decode tokens at their pace; returns the waits, and the groups that the cache missed."""
        counted, issued = self.device.reads(), self._issued()
        first = len(self.store.misses)
        gather = self.with_cache if cached else self.without
        waits = [gather([token]) for token in paced(tokens, _EVERY_S)]
        self.device.check(counted, self._issued() - issued)
        if not cached:
            # what was said without the cache belongs to the conversation all the same
            for token in tokens:
                self.with_cache([token])
        return waits, self.store.misses[first:]

    def _issued(self) -> int:
        return int(self.plain.stats()["reads"]) + self.store.reads


def waits(decoder: Decoder, after: int, rounds: int) -> list[Measure]:
    """Decode at one token per 5 ms with the cache, without, and without again, in turn."""
    part = _BLOCK // _TALKS
    talks = decoder.trace.documents(after, _PROMPT + 3 * rounds * part, _TALKS)
    for start in talks:
        decoder.store.gather([(start, start + _PROMPT)])
    places = [start + _PROMPT for start in talks]
    each: dict[str, list[list[float]]] = {arm: [] for arm in _ARMS}
    missed: dict[str, list[NDArray[np.int64]]] = {arm: [] for arm in _ARMS}
    for turn in range(rounds):
        for arm in turn_of(_ARMS, turn):
            tokens = [place + step for place in places for step in range(part)]
            places = [place + part for place in places]
            waited, misses = decoder.block(tokens, arm == "on")
            each[arm].append(waited)
            missed[arm].append(misses)
    decoder.store.check()
    return list(_told(each, missed, part))


def _told(
    each: dict[str, list[list[float]]], missed: dict[str, list[NDArray[np.int64]]], part: int
) -> Iterator[Measure]:
    name = f"decode wait, {_CACHE_MIB} MiB cache / none"
    peers = ("off", "off again")
    means = {arm: [mean(block) for block in blocks] for arm, blocks in each.items()}
    yield compare(f"{name}, mean", 16, _DEPTH, means, "us", at_most(0.6), ours="on", peers=peers)
    blocks = {arm: np.array(some) for arm, some in each.items()}
    talks = {
        arm: some.reshape(len(some), -1, part).mean(axis=(0, 2)).tolist()
        for arm, some in blocks.items()
    }
    yield compare(f"{name}, mean of each document", 16, _DEPTH, talks, "us", ours="on", peers=peers)
    yield one_of_each(
        f"{name}, mean of all", 16, _DEPTH, [float(some.mean()) for some in blocks.values()], "us"
    )
    trimmed = [
        float(np.sort(some, axis=None)[: some.size * 99 // 100].mean()) for some in blocks.values()
    ]
    yield one_of_each(f"{name}, mean without the slowest 1 %", 16, _DEPTH, trimmed, "us")
    for percentile in (50, 95, 99):
        tails = [float(np.percentile(some, percentile)) for some in blocks.values()]
        yield one_of_each(f"{name}, p{percentile}", 16, _DEPTH, tails, "us")
    # without the cache all have 16 reads, though some of them were done before
    misses = {arm: np.concatenate(some) for arm, some in missed.items()}
    for groups in range(3):
        of = {arm: blocks[arm].reshape(-1)[misses[arm] == groups] for arm in _ARMS}
        share = len(of["on"]) / blocks["on"].size
        print(f"{share:.3f} of the tokens need {groups * _READS} reads")
        if min(len(some) for some in of.values()):
            yield one_of_each(
                f"{name}, tokens of {groups * _READS} reads", 16, _DEPTH,
                [float(np.median(some)) for some in of.values()], "us",
            )  # fmt: skip
    reads = float(misses["on"].mean()) * _READS
    yield Measure(f"decode reads, {_CACHE_MIB} MiB cache / none", 16, _DEPTH, reads, 16.0,
                  reads / 16, math.nan, "reads/token", "", "exact")  # fmt: skip


def lanes(decoder: Decoder, after: int, counts: Sequence[int], steps: int) -> list[Measure]:
    """Decode documents side by side, one token of each at a time; of few lanes several sets."""
    found = []
    store = decoder.store
    for count in counts:
        starts = decoder.trace.documents(after, steps, max(count, 16))
        with_cache: list[float] = []
        without: list[float] = []
        groups = reads = tokens = 0
        for at in range(0, len(starts), count):
            for step in range(steps):
                now = [start + step for start in starts[at : at + count]]
                if step % 2:
                    without.append(decoder.without(now))
                before = store.reads
                waited = decoder.with_cache(now)
                if step % 2 == 0:
                    with_cache.append(waited)
                    reads += store.reads - before
                    groups += int(store.misses[-1])
                    tokens += count
        rows = groups * _READS / tokens
        found.append(Measure(f"{count} lanes, {_CACHE_MIB} MiB cache, reads", 16 * count, _DEPTH,
                             reads / tokens, rows, reads / tokens / rows, math.nan,
                             "reads/token", "", "exact"))  # fmt: skip
        on, off = median(with_cache), median(without)
        found.append(Measure(f"{count} lanes, {_CACHE_MIB} MiB cache / none, step p50",
                             16 * count, _DEPTH, on, off, on / off, math.nan, "us"))  # fmt: skip
        after = starts[-1] + steps
    store.check()
    return found


def main() -> None:
    parser = options(__doc__, rounds=11)
    add = parser.add_argument
    add("--fill", type=int, default=300_000, help="tokens that fill the cache (default 300000)")
    add("--lanes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="at once")
    add("--steps", type=int, default=100, help="tokens of each lane (default 100)")
    add("--part", nargs="+", default=list(_PARTS), choices=_PARTS, help="what to measure")
    arguments = parser.parse_args()
    folder = table_at(arguments.dir, arguments.gib)
    device = Device(folder / "config.json")
    trace = trace_for(folder)
    store = MirroredStore(folder, trace, _CACHE_MIB << 20, _DEPTH)
    end = store.fill(arguments.fill, _CHUNK)
    print(f"{end} tokens of others read: the cache is {store.full():.1%} full", flush=True)
    decoder = Decoder(store, folder, device)
    if "waits" in arguments.part:
        finish("decode", waits(decoder, end, arguments.rounds), arguments, device.machine())
    if "lanes" in arguments.part:
        found = lanes(decoder, len(trace.keys) // 2, arguments.lanes, arguments.steps)
        finish("lanes", found, arguments, device.machine())
    store.close()
    decoder.plain.close()


if __name__ == "__main__":
    main()
