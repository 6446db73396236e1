"""Every interleaving of a protocol's actors, visited: wrong rows, hangs, and the ways there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from protocol import Setting, State, Stream, moves


@dataclass(frozen=True)
class Outcome:
    """How many states there are, and the shortest way to wrong rows and to a hang."""

    states: int
    wrong: tuple[str, ...] | None
    hang: tuple[str, ...] | None
    moves: frozenset[str]  # names of all that happened

    def __str__(self) -> str:
        found = {"wrong rows": self.wrong, "hang": self.hang}
        ways = [f"{name}: {'; '.join(way)}" for name, way in found.items() if way is not None]
        return "\n".join([f"{self.states} states", *ways])


@contextmanager
def uncollected() -> Iterator[None]:
    # so many small tuples and no cycle: the collector would take half of the time
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@uncollected()
def search(setting: Setting) -> Outcome:
    """Visit every state that can be reached, up to the first wrong rows.

    A hang is a state from which no way leads to the end of all streams.
    """
    start = State(
        tuple(Stream(launched=setting.sync != "gate") for _ in setting.steps),
        strays=setting.strays,
        closes=setting.closes,
        lost=setting.lost,
    )
    numbers = {start: 0}
    reached = [start]
    came: list[tuple[int, str]] = [(0, "")]
    befores: list[list[int]] = [[]]
    seen: set[str] = set()

    def way(to: int) -> tuple[str, ...]:
        names = []
        while to:
            to, name = came[to]
            names.append(name)
        return tuple(reversed(names))

    for number, state in enumerate(reached):  # grows on the way
        for name, after in moves(state, setting):
            if after == state:
                continue
            seen.add(name)
            known = numbers.setdefault(after, len(reached))
            if known == len(reached):
                reached.append(after)
                came.append((number, name))
                befores.append([])
                if after.wrong:
                    return Outcome(len(reached), way(known), None, frozenset(seen))
            befores[known].append(number)

    ends = [n for n, s in enumerate(reached) if tuple(m.step for m in s.streams) == setting.steps]
    live = bytearray(len(reached))
    for number in ends:
        live[number] = 1
    for number in ends:  # grows on the way
        for before in befores[number]:
            if not live[before]:
                live[before] = 1
                ends.append(before)
    hang = live.find(0)
    return Outcome(len(reached), None, None if hang < 0 else way(hang), frozenset(seen))
