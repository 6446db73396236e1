"""What GPU benchmarks share: graphs that differ in one thing only, replayed in turn and timed.

Times are those between two events around a replay, in microseconds: what the stream did, nothing of
Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Bound, Measure, at_most, judged, turn_of

from rowstream.device.lookup import Lookup

__all__ = [
    "CUDA",
    "Arm",
    "Steps",
    "added",
    "captured",
    "difference",
    "event",
    "memory",
    "percentile",
    "replay_in_turn",
    "work_of",
]

CUDA = torch.device("cuda", 0)


def event(*, timing: bool = True) -> Any:
    """Return a CUDA event."""
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class Arm:
    """A graph and the times of its replays."""

    graph: torch.cuda.CUDAGraph
    step: Callable[[], None]  # with its tensors, of which a graph holds the addresses alone
    times_us: list[float] = field(default_factory=list)


def captured(step: Callable[[], None]) -> Arm:
    """Capture a step."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    torch.cuda.synchronize()
    return Arm(graph, step)


def work_of(micros: float, device: torch.device) -> Callable[[], None]:
    """Return matrix products that take about so long, on the current stream."""
    size = 2048 if micros >= 20 else 512
    left = torch.randn((size, size), device=device, dtype=torch.bfloat16)
    out = torch.empty_like(left)
    for _ in range(20):
        torch.matmul(left, left, out=out)
    begin, end = event(), event()
    begin.record()
    for _ in range(200):
        torch.matmul(left, left, out=out)
    end.record()
    torch.cuda.synchronize()
    count = max(1, round(micros / (begin.elapsed_time(end) * 1e3 / 200)))

    def work() -> None:
        for _ in range(count):
            torch.matmul(left, left, out=out)

    return work


def replay_in_turn(
    arms: Mapping[str, Arm],
    turns: int,
    *,
    queued: int = 1,
    between: Callable[[], None] | None = None,
) -> None:
    """Replay each arm `turns` times, in turn; `queued` replays at a time, their mean counts."""
    names = list(arms)
    begin, end = event(), event()
    for turn in range(turns + 5):
        for name in turn_of(names, turn):
            arm = arms[name]
            begin.record()
            for _ in range(queued):
                arm.graph.replay()
            end.record()
            end.synchronize()
            if turn >= 5:
                arm.times_us.append(begin.elapsed_time(end) * 1e3 / queued)
        if between is not None:
            between()


def memory(lookup: Lookup, *, cache_bytes: int = 0) -> Measure:
    """Make a line of what a store and its lookup hold beside the cache."""
    held = lookup.store.stats()["memory_bytes"] - cache_bytes + lookup.options.channel_bytes
    line = Measure("memory without cache", 0, 0, held / 2**20, 0, 0, float("nan"), "MiB")
    return judged(line, at_most(64.0, "MiB"))


def percentile(times: Sequence[float], share: float) -> float:
    """Return a percentile."""
    return float(np.percentile(times, share))


def difference(
    name: str,
    rows: int,
    arms: Mapping[str, Arm],
    bound: Bound | None = None,
    *,
    share: float = 50,
) -> Measure:
    """Make a line of how much longer the arm "with" takes than "without" and "without again".

    `ours` is the difference in microseconds, `peer` the time without; aa is the time without over
    itself.
    """
    mine, one, other = (
        percentile(arms[arm].times_us, share) for arm in ("with", "without", "without again")
    )
    peer = (one + other) / 2
    added = mine - peer
    return judged(Measure(name, rows, 0, added, peer, mine / peer, other / one, "us", ""), bound)


class Steps:
    """Captured steps over one lookup: ids made on the device, work beside it, rows to bfloat16.

    The lookup is a branch of the graph, or with `halves` it is started before the work and finished
    after it.
    """

    def __init__(
        self,
        lookup: Lookup,
        work: Callable[[], None] | None,
        *,
        fresh: bool,
        halves: bool = False,
    ) -> None:
        self.lookup = lookup
        self.work = work
        self.fresh = fresh  # other rows in every step
        self.halves = halves
        self.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def arm(self, tokens: int, *, lookup: bool = True) -> Arm:
        """Capture a step of so many tokens; without the lookup only what is around it."""
        store = self.lookup.store
        shape = (tokens, store.heads)
        ids = torch.randint(store.num_rows, shape, device=CUDA)
        out = torch.empty((*shape, store.row_values), dtype=torch.bfloat16, device=CUDA)

        def step() -> None:
            main = torch.cuda.current_stream()
            # a stride that is prime to the number of rows: no row comes twice in a run
            ids.add_(15_485_863 if self.fresh else 0).remainder_(store.num_rows)
            if self.halves:
                started = self.lookup.start(ids) if lookup else None
                if self.work is not None:
                    self.work()
                if started is not None:
                    self.lookup.finish(started, out)
                return
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                if lookup:
                    self.lookup(ids, out)
            if self.work is not None:
                self.work()
            main.wait_stream(self.side)

        return captured(step)

    def arms(self, tokens: int) -> dict[str, Arm]:
        """Return the arms of a difference."""
        return {
            "with": self.arm(tokens),
            "without": self.arm(tokens, lookup=False),
            "without again": self.arm(tokens, lookup=False),
        }


def added(name: str, rows: int, arms: dict[str, Arm], bound: float | None) -> list[Measure]:
    """Return p50, on which the bound is, and the tail."""
    p50 = at_most(bound, "us") if bound is not None else None
    found = [difference(f"{name}: added, p50", rows, arms, p50)]
    found += [
        difference(f"{name}: added, p{share:g}", rows, arms, share=share)
        for share in (95, 99, 99.9)
    ]
    return found
