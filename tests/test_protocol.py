"""The protocol of a channel, searched whole: no wrong rows, no hang, and each rule is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from interleavings import search
from protocol import Rules, Setting

TWO = (2, 1)  # replays of two streams that share a channel, which nobody should do

SOUND = {
    "nobody is late": Setting(Rules(watchdog=False)),
    "an answer late at any moment": Setting(),
    "a thread stuck for ever": Setting(stuck=True),
    "a stray flag": Setting(strays=1, stuck=True),
    "closed at any moment": Setting(closes=1, stuck=True),
    "two streams": Setting(steps=TWO),
    "two streams, a stuck thread": Setting(steps=TWO, stuck=True),
    "spinning": Setting(sync="kernel", stuck=True),
    "spinning, given up at any moment": Setting(sync="kernel", gives_up=True, stuck=True),
    "spinning, nobody answers": Setting(Rules(watchdog=False), "kernel", gives_up=True, stuck=True),
    "spinning, closed at any moment": Setting(sync="kernel", closes=1, stuck=True),
    "spinning, two streams": Setting(sync="kernel", steps=TWO),
    "gated": Setting(sync="gate"),
    "gated, launches lost, ids that differ": Setting(sync="gate", lost=2, other_ids=True),
    "gated, closed at any moment": Setting(sync="gate", lost=1, closes=1, other_ids=True),
}

WRONG_ROWS = {
    "header not checked": Setting(Rules(header_checked=False)),
    "header not checked, a stray flag": Setting(
        Rules(header_checked=False, watchdog=False), strays=1
    ),
    "no busy exchange": Setting(Rules(busy_exchanged=False), steps=TWO),
    "channel free before its rows are taken": Setting(Rules(busy_until_taken=False), steps=TWO),
    "a verdict that names no epoch": Setting(Rules(ok_names_epoch=False), steps=TWO),
    "epochs counted without an atomic": Setting(Rules(epoch_atomic=False), steps=TWO),
    "epoch bumped behind the ring": Setting(Rules(epoch_first=False), steps=TWO),
    "time-outs without epochs": Setting(Rules(epochs=False)),
    "gated, ids not compared": Setting(Rules(gate_compares=False), "gate", other_ids=True),
    "gated, filled before the last take": Setting(Rules(gate_waits=False), "gate"),
}

HANGS = {
    "no watchdog": Setting(Rules(watchdog=False), stuck=True),
    "no watchdog, spinning": Setting(Rules(watchdog=False), "kernel", stuck=True),
    "no open state, two streams": Setting(Rules(open_state=False), steps=TWO),
    "a ring over another one's MISUSE": Setting(Rules(door_rechecked=False), steps=TWO),
    "open header stored once": Setting(Rules(header_again=False), "kernel", closes=1),
}


# of the word between a verdict and its take, which a take alone does not need
BETWEEN = {"channel free before its rows are taken", "a verdict that names no epoch"}

alone = pytest.mark.parametrize("alone", [False, True])


@alone
@pytest.mark.parametrize("name", SOUND)
def test_neither_wrong_rows_nor_a_hang(name: str, alone: bool) -> None:
    found = search(replace(SOUND[name], alone=alone))
    # a protocol whose steps are all void would be sound
    assert "stream 0 takes rows" in found.moves, found
    assert found.states > 80, found
    assert found.wrong is None, found
    assert found.hang is None, found


@pytest.mark.parametrize(
    ("name", "alone"),
    [(name, alone) for name in WRONG_ROWS for alone in {False, name not in BETWEEN}],
)
def test_without_a_rule_rows_are_wrong(name: str, alone: bool) -> None:
    found = search(replace(WRONG_ROWS[name], alone=alone))
    assert found.wrong is not None, found


@alone
@pytest.mark.parametrize("name", HANGS)
def test_without_a_rule_a_stream_hangs(name: str, alone: bool) -> None:
    found = search(replace(HANGS[name], alone=alone))
    assert (found.wrong, found.hang is not None) == (None, True), found


@pytest.mark.parametrize("sync", ["flag", "kernel"])
def test_no_step_is_void_without_a_fault(sync: str) -> None:
    moves = search(Setting(Rules(watchdog=False), sync)).moves
    assert "stream 0 takes rows" in moves
    assert "stream 0 is void" not in moves
