"""`post` and `verdict` alone: no channel, no thread; the test is the host."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from gpu.words import (
    BUSY,
    CLOSED,
    COUNT,
    DOOR,
    EPOCH,
    FAULT,
    GOOD,
    HEADER,
    MISMATCH,
    MISUSE,
    MISUSED_DOOR,
    NUM_ROWS,
    POISON,
    READ,
    ROWS,
    TIMEOUT,
    Words,
    on_device,
    poisoned,
    random_ids,
)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 16), (1, 1), (7, 3), (64, 16), (1000, 16)])
def test_post_brings_ids_to_the_mailbox_and_rings(tokens: int, heads: int, dtype: Any) -> None:
    words = Words(tokens * heads + 1, 1)
    words.mailbox(tokens * heads + 1)[:] = -7
    ids = random_ids(tokens, heads, dtype)
    ids[-1, -1] = NUM_ROWS - 1
    ids[0, 0] = -5
    words.post(on_device(ids))
    words.synchronize()
    expected = np.maximum(ids.astype(np.int64), -1).ravel()
    assert words.mailbox(tokens * heads).tolist() == expected.tolist()
    assert words.mailbox(tokens * heads + 1)[-1] == -7
    assert words.word(ROWS, "<u4") == tokens * heads
    assert words.word(DOOR) == 1
    assert words.state_word(EPOCH) == 1
    assert words.state_word(BUSY) == 1


def test_post_keeps_ids_past_32_bits() -> None:
    words = Words(2, 1)
    words.post(torch.tensor([[2**40 + 3, 2**62]], device="cuda"))
    words.synchronize()
    assert words.mailbox(2).tolist() == [2**40 + 3, 2**62]


@pytest.mark.parametrize("live", [-3, 0, 1, 5, 8, 100])
def test_post_masks_padded_tokens_and_foreign_heads(live: int) -> None:
    tokens, heads, mine = 8, 16, [1, 5, 9, 13, 2]
    words = Words(tokens * len(mine), 1)
    ids = random_ids(tokens, heads)
    count = torch.tensor([live], dtype=torch.int32, device="cuda")
    heads_of = torch.tensor(mine, dtype=torch.int32, device="cuda")
    words.post(on_device(ids), live=count, head_of=heads_of)
    words.synchronize()
    expected = ids[:, mine]
    expected[max(live, 0) :] = -1
    assert words.mailbox(expected.size).tolist() == expected.ravel().tolist()
    assert words.word(ROWS, "<u4") == expected.size


def test_a_post_between_post_and_take_is_misuse_and_changes_no_ids() -> None:
    words = Words(16, 160)
    ids = random_ids(1, 16)
    words.post(on_device(ids))
    words.synchronize()
    assert words.word(DOOR) == 1
    words.post(on_device(random_ids(1, 16, seed=1)))
    words.synchronize()
    assert words.word(DOOR) == MISUSED_DOOR
    assert words.mailbox(16).tolist() == ids.ravel().tolist()
    # the first step's answer is now of another epoch: void
    words.set_word(HEADER, 1 << 8)
    words.verdict()
    words.synchronize()
    assert words.state_word(GOOD) == 0
    assert words.word(FAULT) == 2 << 8 | MISUSE


def test_every_launch_of_a_graph_rings_anew() -> None:
    words = Words(16, 16)
    ids = on_device(random_ids(1, 16))
    out = poisoned(1, 16, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=words.stream):
        words.handle = torch.cuda.current_stream().cuda_stream
        ids.add_(1)
        words.post(ids)
        words.verdict()
        words.take(out, 16, POISON)
    for epoch in range(1, 6):
        words.set_word(HEADER, epoch << 8)
        with torch.cuda.stream(words.stream):
            graph.replay()
        words.synchronize()
        assert words.word(DOOR) == epoch
        assert words.mailbox(16).tolist() == ids.cpu().ravel().tolist()
        assert words.state_word(BUSY) == 0
        assert not out.any()
    assert words.word(COUNT, "<u4") == 0


@pytest.mark.parametrize("differs", [None, 0, 15, 37])
def test_a_gated_post_compares_and_writes_no_id(differs: int | None) -> None:
    tokens, heads = 3, 16
    words = Words(tokens * heads, 16)
    ids = random_ids(tokens, heads)
    live = torch.tensor([2], dtype=torch.int32, device="cuda")
    expected = ids.copy()
    expected[2] = -1
    words.mailbox(ids.size)[:] = expected.ravel()
    if differs is not None:
        words.mailbox(ids.size)[differs] += 1
    before = words.mailbox(ids.size).tolist()
    words.set_word(HEADER, 1 << 8)
    words.post(on_device(ids), live=live, gated=True)
    words.verdict()
    words.synchronize()
    assert words.mailbox(ids.size).tolist() == before
    assert words.state_word(MISMATCH) == (differs is not None)
    assert words.state_word(GOOD) == (differs is None)
    assert words.word(FAULT) == (0 if differs is None else 1 << 8 | MISUSE)
    # and the next step is judged by itself
    words.take(poisoned(tokens, heads, 16), 16, POISON)
    words.mailbox(ids.size)[:] = expected.ravel()
    words.set_word(HEADER, 2 << 8)
    words.post(on_device(ids), live=live, gated=True)
    words.verdict()
    assert words.state_word(GOOD) == 2


# --- verdict ----------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_ns", [0, 20_000_000])
@pytest.mark.parametrize(
    ("header", "fault"),
    [
        (1 << 8, 0),
        (1 << 8 | READ, 1 << 8 | READ),
        (1 << 8 | TIMEOUT, 1 << 8 | TIMEOUT),
        (CLOSED, 1 << 8 | CLOSED),
        (MISUSE, 1 << 8 | MISUSE),
    ],
)
def test_verdict_trusts_the_header_alone(header: int, fault: int, timeout_ns: int) -> None:
    words = Words(16, 16)
    words.post(on_device(random_ids(1, 16)))
    words.set_word(HEADER, header)
    words.verdict(timeout_ns)
    words.synchronize()
    assert words.state_word(GOOD) == (fault == 0)
    assert words.word(FAULT) == fault
    assert words.word(COUNT, "<u4") == (fault != 0)


@pytest.mark.parametrize("header", [0, 2 << 8, 2 << 8 | READ, (1 << 40) + 1 << 8])
def test_a_header_of_another_epoch_makes_the_step_void(header: int) -> None:
    words = Words(16, 16)
    words.post(on_device(random_ids(1, 16)))
    words.set_word(HEADER, header)
    words.verdict()
    words.synchronize()
    assert words.state_word(GOOD) == 0
    assert words.word(FAULT) == 1 << 8 | MISUSE


@pytest.mark.parametrize("header", [0, 7 << 8])
def test_a_spinning_verdict_gives_up_by_itself(header: int) -> None:
    words = Words(16, 16)
    words.post(on_device(random_ids(1, 16)))
    words.synchronize()
    words.set_word(HEADER, header)
    began = time.monotonic()
    words.verdict(50_000_000)
    words.synchronize()
    took = time.monotonic() - began
    assert 0.04 < took < 2
    assert words.word(FAULT) == 1 << 8 | TIMEOUT
    assert words.state_word(GOOD) == 0


def test_a_spinning_verdict_sees_an_answer_that_comes_while_it_spins() -> None:
    words = Words(16, 160)
    out = poisoned(1, 16, 160)
    words.post(on_device(random_ids(1, 16)))
    words.verdict(10_000_000_000)
    words.take(out, 160, POISON)
    began = time.monotonic()
    while words.word(DOOR) != 1:
        assert time.monotonic() - began < 5
    time.sleep(0.02)
    rows = np.random.default_rng(5).integers(0, 256, (16, 160), np.uint8)
    words.staging(16, 160)[:] = rows
    words.set_word(HEADER, 1 << 8)
    words.synchronize()
    assert time.monotonic() - began < 5
    assert np.array_equal(out.cpu().numpy()[0], rows)


def test_faults_are_counted() -> None:
    words = Words(16, 16)
    out = poisoned(1, 16, 16)
    words.set_word(HEADER, CLOSED)
    for step in range(1, 4):
        words.post(on_device(random_ids(1, 16)))
        words.verdict()
        words.take(out, 16, POISON)
        words.synchronize()
        assert words.word(COUNT, "<u4") == step
        assert words.word(FAULT) == step << 8 | CLOSED
