"""Measures decoding beside the prefetch of a prompt: python benchmarks/lookahead.py --dir FOLDER.

Real text, no cache. One token every 5 ms alone, alone again and beside the prefetch of 32K tokens;
and the prefetch alone. Rounds take their turns in changing order, on text not read before.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cache import trace_for
from benchmarks.device import Device
from benchmarks.ngrams import Trace
from benchmarks.reader import Measure, table_at, verdict, write_results

from rowstream import RowStore, tables
from rowstream.prefetch import Ticket

_ROOT = Path(__file__).resolve().parents[1]
_EVERY_S = 0.005
_ALONE = 1000  # tokens of a turn without a prefetch
_DEPTH = 128


class Beside:
    """A store, and text for it that was not read before."""

    def __init__(self, folder: Path, trace: Trace, prompt: int, lookahead_bytes: int) -> None:
        (manifest,) = tables(folder)
        # the store hashes tokens itself: with the constants of the text, and the table's sizes
        manifest = replace(manifest, hash=trace.constants)
        self.store = RowStore(
            manifest,
            backend="disk",
            queue_depth=_DEPTH,
            lookahead_bytes=lookahead_bytes,
        )
        self.trace = trace
        self.prompt = prompt
        self._out = np.zeros((1, self.store.heads, self.store.row_bytes), np.uint8)
        # prompts from the start of the text, tokens to decode from its second half
        self._next_prompt = 0
        self._next_token = len(trace.keys) // 2

    def reads(self) -> int:
        """Return all reads issued so far."""
        stats = self.store.stats()
        return int(stats["reads"]) + int(stats["lookahead_reads"])

    def start(self) -> Ticket:
        """Start the prefetch of the next prompt."""
        first, self._next_prompt = self._next_prompt, self._next_prompt + self.prompt
        if self._next_prompt > len(self.trace.keys) // 2:
            raise RuntimeError("the text is over: fewer rounds")
        return self.store.prefetch([(None, self.trace.corpus.tokens[first : self._next_prompt])])

    def decode(self, more: Callable[[int], bool]) -> list[float]:
        """Gather a token every 5 ms while there is more; returns the waits in us."""
        waits: list[float] = []
        next_at = time.perf_counter()
        while more(len(waits)):
            next_at = max(next_at + _EVERY_S, time.perf_counter())
            time.sleep(max(0.0, next_at - time.perf_counter()))
            ids = self.trace.row_ids(self._next_token, self._next_token + 1)
            self._next_token += 1
            began = time.perf_counter_ns()
            self.store.gather(ids, self._out)
            waits.append((time.perf_counter_ns() - began) / 1000)
        return waits

    def ahead_reads(self) -> int:
        """Return the reads that prefetches have issued so far."""
        return int(self.store.stats()["lookahead_reads"])


def _reading(ticket: Ticket, _done: int = 0) -> bool:
    return not ticket.progress().over


def whole(ticket: Ticket) -> None:
    """Raise RuntimeError unless all rows of a prefetch have arrived."""
    progress = ticket.progress()
    if progress.arrived_rows != progress.wanted_rows:
        raise RuntimeError(f"the prefetch ended early: {progress}")
    ticket.drop()


def measure(beside: Beside, device: Device, rounds: int) -> list[Measure]:
    """Take turns: alone, alone again, beside a prefetch, and the prefetch alone, twice."""
    waits: dict[str, list[list[float]]] = {"alone": [], "again": [], "beside": []}
    rates: dict[str, list[float]] = {"beside": [], "prefetch": [], "prefetch again": []}
    arms = ["alone", "beside", "prefetch", "again", "prefetch again"]
    for turn in range(rounds):
        first = turn % len(arms)
        order = arms[first:] + arms[:first]
        for arm in order if turn % 2 == 0 else order[::-1]:
            time.sleep(0.1)  # longer than a lookup is remembered
            counted, issued, ahead = device.reads(), beside.reads(), beside.ahead_reads()
            began = time.perf_counter()
            if arm in ("alone", "again"):
                waits[arm].append(beside.decode(lambda done: done < _ALONE))
            else:
                ticket = beside.start()
                if arm == "beside":
                    waits[arm].append(beside.decode(partial(_reading, ticket)))
                while _reading(ticket):
                    time.sleep(0.002)
                rates[arm].append((beside.ahead_reads() - ahead) / (time.perf_counter() - began))
                whole(ticket)
            device.check(counted, beside.reads() - issued)
    tokens = sum(len(each) for each in waits["beside"])
    print(f"{tokens} tokens were decoded beside {rounds} prefetches")
    found = []
    for percentile, bound in ((50, 1.15), (95, 1.3), (99, None)):
        each = {
            arm: [float(np.percentile(some, percentile)) for some in blocks]
            for arm, blocks in waits.items()
        }
        name = f"decode p{percentile}, beside a prefetch / alone"
        found.append(_paired(name, each, "beside", ("alone", "again"), "us", None, bound))
    peers = ("prefetch", "prefetch again")
    name = "prefetch reads/s, beside decode / alone"
    found.append(_paired(name, rates, "beside", peers, "1/s", 0.4, None))
    return found


def _paired(
    name: str,
    values: dict[str, list[float]],
    ours: str,
    peers: tuple[str, str],
    unit: str,
    at_least: float | None,
    at_most: float | None,
) -> Measure:
    pairs = list(zip(values[peers[0]], values[peers[1]], strict=True))
    both = [(one + other) / 2 for one, other in pairs]
    ratio = median(mine / theirs for mine, theirs in zip(values[ours], both, strict=True))
    aa = median(other / one for one, other in pairs)
    judged = verdict(ratio, aa, at_least, at_most)
    return Measure(name, 16, _DEPTH, median(values[ours]), median(both), ratio, aa, unit, judged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--dir", type=Path, default=_ROOT / "build" / "bench", help="where the table is or goes")
    add("--gib", type=float, default=8.0, help="size of the table (default 8)")
    add("--prompt", type=int, default=32_768, help="tokens of a prompt (default 32768)")
    add("--lookahead-mib", type=int, default=128, help="memory for the prompt (default 128)")
    add("--rounds", type=int, default=11, help="turns of each (default 11)")
    add("--machine", help="name of the results (default: processors, kernel, device)")
    add("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()
    folder = table_at(arguments.dir, arguments.gib)
    device = Device(folder / "config.json")
    load = os.getloadavg()
    beside = Beside(folder, trace_for(folder), arguments.prompt, arguments.lookahead_mib << 20)
    found = measure(beside, device, arguments.rounds)
    beside.store.close()
    for m in found:
        print(
            f"{m.measure:44}{m.ours:10.5g}{m.peer:10.5g}{m.ratio:8.3f}{m.aa:8.3f}  "
            f"{m.unit}, {m.verdict}"
        )
    print(f"load average {load[0]:.2f} before, {os.getloadavg()[0]:.2f} after")
    if not arguments.no_results:
        name = f"lookahead-{arguments.machine or device.machine()}.csv"
        write_results(_ROOT / "benchmarks" / "results" / name, found)
        print(f"written to {name}")


if __name__ == "__main__":
    main()
