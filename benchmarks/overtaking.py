"""Measures steps beside the gathers of prompts: python benchmarks/overtaking.py --dir FOLDER.

A thread gathers a token's 16 rows every 5 ms, alone, alone again, and beside another one that
gathers prompts of 8,192 tokens from the same store, one after the other. Rows nobody has read.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device import Device
from benchmarks.lookahead import percentiles
from benchmarks.measure import Measure, compare, finish, options, paced, turn_of
from benchmarks.places import table_at
from benchmarks.spans import unique_rows

from rowstream import RowStore

_EVERY_S = 0.005
_BLOCK = 200  # tokens
_PROMPT = 8192
_DEPTH = 128


class Both:
    """One store and the two who gather from it."""

    def __init__(self, folder: Path) -> None:
        self.store = RowStore.open(folder, backend="disk", queue_depth=_DEPTH)
        self._random = np.random.default_rng()
        self._out = np.zeros((1, self.store.heads, self.store.row_bytes), np.uint8)
        self._prompt_out = np.zeros((_PROMPT, *self._out.shape[1:]), np.uint8)
        self._over = threading.Event()
        self.prompt_rows = 0

    def ids(self, tokens: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Return the ids of tokens."""
        heads = self.store.heads
        rows = unique_rows(self._random, self.store.num_rows, tokens * heads)
        return rows.reshape(tokens, heads)

    def decode(self) -> list[float]:
        """Gather a token every 5 ms; returns the waits in us."""
        waits: list[float] = []
        asked = self.ids(_BLOCK)
        for number in paced(range(_BLOCK), _EVERY_S):
            began = time.perf_counter_ns()
            self.store.gather(asked[number : number + 1], self._out)
            waits.append((time.perf_counter_ns() - began) / 1000)
        return waits

    @contextmanager
    def prompts(self) -> Iterator[None]:
        """Have prompts gathered by another thread."""
        self._over.clear()
        begun = threading.Event()
        asked = [self.ids(_PROMPT) for _ in range(3)]

        def work() -> None:
            turn = 0
            while not self._over.is_set():
                begun.set()
                self.store.gather(asked[turn % 3], self._prompt_out)
                self.prompt_rows += asked[0].size
                turn += 1

        worker = threading.Thread(target=work)
        worker.start()
        begun.wait()
        try:
            yield
        finally:
            self._over.set()
            worker.join()


def measure(both: Both, rounds: int) -> list[Measure]:
    """Take turns: alone, alone again, beside prompts, and prompts alone, twice."""
    waits: dict[str, list[list[float]]] = {"alone": [], "again": [], "beside": []}
    rates: dict[str, list[float]] = {"beside": [], "prompts": [], "prompts again": []}
    arms = ["alone", "beside", "prompts", "again", "prompts again"]
    for turn in range(rounds):
        for arm in turn_of(arms, turn):
            if arm in ("alone", "again"):
                waits[arm].append(both.decode())
                continue
            rows, began = both.prompt_rows, time.perf_counter()
            with both.prompts():
                if arm == "beside":
                    waits[arm].append(both.decode())
                else:
                    time.sleep(_BLOCK * _EVERY_S)
            rates[arm].append((both.prompt_rows - rows) / (time.perf_counter() - began))
    found = []
    for percentile in (50, 95, 99):
        each = {arm: percentiles(some, percentile, 1) for arm, some in waits.items()}
        name = f"16 rows beside prompts / alone, p{percentile}"
        peers = ("alone", "again")
        found.append(compare(name, 16, _DEPTH, each, "us", ours="beside", peers=peers))
    name = "rows/s of prompts, beside steps / alone"
    peers = ("prompts", "prompts again")
    rows = _PROMPT * both.store.heads
    found.append(compare(name, rows, _DEPTH, rates, "rows/s", ours="beside", peers=peers))
    return found


def main() -> None:
    arguments = options(__doc__, rounds=11).parse_args()
    folder = table_at(arguments.dir, arguments.gib)
    both = Both(folder)
    both.decode()  # code and device awake
    found = measure(both, arguments.rounds)
    both.store.close()
    finish("overtaking", found, arguments, Device(folder / "config.json").machine())


if __name__ == "__main__":
    main()
