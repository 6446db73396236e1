"""Measures decoding beside the prefetch of a prompt: python benchmarks/lookahead.py --dir FOLDER.

Real text, no cache. One token every 5 ms alone, alone again and beside the prefetch of 32K tokens;
and the prefetch alone, twice. Blocks of half a second, so that a device that changes its mind does
so for all, take turns in changing order, on text not read before.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device import Device
from benchmarks.measure import Measure, at_least, at_most, compare, finish, options, paced, turn_of
from benchmarks.ngrams import Trace
from benchmarks.places import table_at, trace_for

from rowstream import RowStore, tables
from rowstream.prefetch import Ticket

_EVERY_S = 0.005
_BLOCK = 100  # tokens
_PREFETCH_S = 0.3
_DEPTH = 128
# percentile, rounds that give one value of it, bound
_PERCENTILES = ((50, 1, at_most(1.15)), (95, 5, at_most(1.3)), (99, 10, None))


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

    @contextmanager
    def prefetch(self) -> Iterator[Ticket]:
        """Have the next prompt read, as far as there is time."""
        first, self._next_prompt = self._next_prompt, self._next_prompt + self.prompt
        if self._next_prompt > len(self.trace.keys) // 2:
            raise RuntimeError("the text is over: fewer rounds")
        with self.store.prefetch(
            [(None, self.trace.corpus.tokens[first : self._next_prompt])]
        ) as ticket:
            yield ticket

    def decode(self, tokens: int) -> list[float]:
        """Gather a token every 5 ms; returns the waits in us."""
        waits: list[float] = []
        for _ in paced(range(tokens), _EVERY_S):
            ids = self.trace.row_ids(self._next_token, self._next_token + 1)
            self._next_token += 1
            began = time.perf_counter_ns()
            self.store.gather(ids, self._out)
            waits.append((time.perf_counter_ns() - began) / 1000)
        return waits

    def ahead_reads(self) -> int:
        """Return the reads that prefetches have issued so far."""
        return int(self.store.stats()["lookahead_reads"])


def whole(beside: Beside) -> None:
    """Have one prompt read to its end beside decoding; raise RuntimeError unless all arrives."""
    with beside.prefetch() as ticket:
        began, tokens = time.perf_counter(), 0
        while not ticket.progress().over:
            tokens += len(beside.decode(_BLOCK))
        progress = ticket.progress()
    print(
        f"a prompt of {beside.prompt} tokens took {time.perf_counter() - began:.1f} s beside "
        f"{tokens} decoded tokens"
    )
    if progress.arrived_rows != progress.wanted_rows:
        raise RuntimeError(f"the prefetch ended early: {progress}")


def measure(beside: Beside, device: Device, rounds: int) -> list[Measure]:
    """Take turns: alone, alone again, beside a prefetch, and the prefetch alone, twice."""
    waits: dict[str, list[list[float]]] = {"alone": [], "again": [], "beside": []}
    rates: dict[str, list[float]] = {"beside": [], "prefetch": [], "prefetch again": []}
    arms = ["alone", "beside", "prefetch", "again", "prefetch again"]
    for turn in range(rounds):
        for arm in turn_of(arms, turn):
            time.sleep(0.06)  # longer than a lookup is remembered
            counted, issued = device.reads(), beside.reads()
            if arm in ("alone", "again"):
                waits[arm].append(beside.decode(_BLOCK))
            else:
                with beside.prefetch() as ticket:
                    ahead, began = beside.ahead_reads(), time.perf_counter()
                    if arm == "beside":
                        waits[arm].append(beside.decode(_BLOCK))
                    else:
                        time.sleep(_PREFETCH_S)
                    elapsed_s = time.perf_counter() - began
                    rates[arm].append((beside.ahead_reads() - ahead) / elapsed_s)
                    if ticket.progress().over:
                        raise RuntimeError("the prompt was over before the block: a longer one")
            device.check(counted, beside.reads() - issued)
    found = []
    for percentile, together, bound in _PERCENTILES:
        each = {arm: percentiles(some, percentile, together) for arm, some in waits.items()}
        name = f"decode p{percentile}, beside a prefetch / alone"
        found.append(
            compare(name, 16, _DEPTH, each, "us", bound, ours="beside", peers=("alone", "again"))
        )
    name = "prefetch reads/s, beside decode / alone"
    peers = ("prefetch", "prefetch again")
    found.append(compare(name, 16, _DEPTH, rates, "1/s", at_least(0.4), ours="beside", peers=peers))
    return found


def percentiles(blocks: Sequence[Sequence[float]], percentile: float, together: int) -> list[float]:
    """Return a percentile of each so many blocks; the tail of one says little."""
    together = min(together, len(blocks))
    return [
        float(np.percentile(np.concatenate(blocks[at : at + together]), percentile))
        for at in range(0, len(blocks) - together + 1, together)
    ]


def main() -> None:
    parser = options(__doc__, rounds=36)
    add = parser.add_argument
    add("--prompt", type=int, default=32_768, help="tokens of a prompt (default 32768)")
    add("--lookahead-mib", type=int, default=128, help="memory for the prompt (default 128)")
    arguments = parser.parse_args()
    folder = table_at(arguments.dir, arguments.gib)
    device = Device(folder / "config.json")
    beside = Beside(folder, trace_for(folder), arguments.prompt, arguments.lookahead_mib << 20)
    beside.decode(_BLOCK)  # code and device awake
    found = measure(beside, device, arguments.rounds)
    whole(beside)
    beside.store.close()
    finish("lookahead", found, arguments, device.machine())


if __name__ == "__main__":
    main()
