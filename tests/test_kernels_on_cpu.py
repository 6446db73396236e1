"""`post` and `verdict`, their own text compiled for the host; on a GPU it is tests/gpu's.

Threads and blocks are few, and what hardware does to the order of memory is not seen here.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from host_kernels import Channel, host_driver, on_host, random_ids
from rowstream.device import driver
from rowstream.device.kernels import Kernels

READ, TIMEOUT, IDS, CLOSED, MISUSE = 1, 2, 3, 4, 5
MISUSED_DOOR = 2**64 - 1


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    with on_host() as found:
        yield found


# --- post ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("tokens", "heads"), [(0, 16), (1, 1), (1, 16), (7, 3), (90, 16)])
def test_post_brings_ids_to_the_mailbox_and_rings(
    kernels: Kernels, tokens: int, heads: int, dtype: Any
) -> None:
    channel = Channel(kernels, tokens * heads)
    ids = random_ids(tokens, heads, dtype)
    if tokens:
        ids[0, 0] = np.iinfo(dtype).min
        ids[-1, -1] = np.iinfo(dtype).max
    channel.post(ids)
    assert channel.mailbox.tolist() == [*np.maximum(ids, -1).ravel().tolist(), -7]
    assert channel.rows[0] == tokens * heads
    assert channel.door[0] == 1
    assert channel.epoch_busy_good_mismatch_done == (1, 1, 0, 0, 0)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("live", [None, -3, 0, 1, 5, 8, 100])
@pytest.mark.parametrize("mine", [None, [0], [13, 1, 5, 9, 2]])
def test_post_masks_padded_tokens_and_foreign_heads(
    kernels: Kernels, dtype: Any, live: int | None, mine: list[int] | None
) -> None:
    ids = random_ids(8, 16, dtype)
    expected = ids[:, list(range(16)) if mine is None else mine].astype(np.int64)
    if live is not None:
        expected[max(live, 0) :] = -1
    channel = Channel(kernels, expected.size)
    channel.post(ids, live, mine)
    assert channel.mailbox.tolist() == [*expected.ravel().tolist(), -7]
    assert channel.rows[0] == expected.size


def test_a_post_between_post_and_take_is_misuse_and_changes_no_ids(kernels: Kernels) -> None:
    channel = Channel(kernels, 16)
    ids = random_ids(1, 16)
    channel.post(ids)
    channel.post(random_ids(1, 8, seed=1))
    assert channel.door[0] == MISUSED_DOOR
    assert channel.rows[0] == 16
    assert channel.mailbox[:16].tolist() == ids.ravel().tolist()
    channel.verdict(1 << 8)
    assert channel.epoch_busy_good_mismatch_done == (2, 1, 0, 0, 0)
    assert channel.faults == (2 << 8 | MISUSE, 1)


def test_a_post_that_wiped_off_the_mark_of_another_sets_it_again(kernels: Kernels) -> None:
    host = host_driver()
    channel = Channel(kernels, 16)

    def other_post() -> None:
        host.at_fence(None)
        channel.state[0] += 1
        channel.door[0] = MISUSED_DOOR

    hook = ctypes.CFUNCTYPE(None)(other_post)
    host.at_fence(hook)
    channel.post(random_ids(1, 16))
    assert channel.door[0] == MISUSED_DOOR


@pytest.mark.parametrize("differs", [None, 0, 15, 37])
def test_a_gated_post_compares_and_writes_no_id(kernels: Kernels, differs: int | None) -> None:
    channel = Channel(kernels, 48)
    ids = random_ids(3, 16)
    ids[1, 4] = -9
    expected = np.maximum(ids, -1)
    expected[2] = -1
    channel.mailbox[:48] = expected.ravel()
    if differs is not None:
        channel.mailbox[differs] += 1
    before = channel.mailbox.copy()
    channel.post(ids, live=2, gated=True)
    channel.verdict(1 << 8)
    assert np.array_equal(channel.mailbox, before)
    wrong = differs is not None
    assert channel.epoch_busy_good_mismatch_done == (1, 1, not wrong, wrong, 0)
    assert channel.faults == ((1 << 8 | MISUSE, 1) if wrong else (0, 0))
    # and the next step is judged by itself
    channel.state[1] = 0
    channel.mailbox[:48] = expected.ravel()
    channel.post(ids, live=2, gated=True)
    channel.verdict(2 << 8)
    assert channel.epoch_busy_good_mismatch_done == (2, 1, 2, 0, 0)


# --- verdict ------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_ns", [0, 10**10])
@pytest.mark.parametrize(
    ("epoch", "status"),
    [(1, 0), (1, READ), (1, TIMEOUT), (1, IDS), (0, READ), (0, CLOSED), (0, MISUSE)],
)
def test_verdict_trusts_a_header_of_its_epoch_and_of_an_open_channel(
    kernels: Kernels, epoch: int, status: int, timeout_ns: int
) -> None:
    channel = Channel(kernels, 16)
    channel.post(random_ids(1, 16))
    channel.verdict(epoch << 8 | status, timeout_ns)
    assert channel.state[2] == (status == 0)
    assert channel.faults == ((1 << 8 | status, 1) if status else (0, 0))


@pytest.mark.parametrize("header", [0, 2 << 8, 2 << 8 | READ, (1 << 40) + 1 << 8])
def test_a_header_of_another_epoch_makes_the_step_void(kernels: Kernels, header: int) -> None:
    channel = Channel(kernels, 16)
    channel.post(random_ids(1, 16))
    channel.verdict(header)
    assert channel.state[2] == 0
    assert channel.faults == (1 << 8 | MISUSE, 1)


@pytest.mark.parametrize("header", [0, 7 << 8, 7 << 8 | READ])
def test_a_waiting_verdict_gives_up_by_itself(kernels: Kernels, header: int) -> None:
    channel = Channel(kernels, 16)
    channel.post(random_ids(1, 16))
    began = time.monotonic()
    channel.verdict(header, 20_000_000)
    assert time.monotonic() - began >= 0.02
    assert channel.state[2] == 0
    assert channel.faults == (1 << 8 | TIMEOUT, 1)


def test_a_waiting_verdict_sees_an_answer_that_comes_meanwhile(kernels: Kernels) -> None:
    channel = Channel(kernels, 16)
    channel.post(random_ids(1, 16))
    answer = threading.Timer(0.05, channel.header.fill, [1 << 8])
    answer.start()
    began = time.monotonic()
    channel.verdict(0, 10**11)
    assert time.monotonic() - began < 50
    answer.join()
    assert channel.state[2] == 1


def test_a_thread_without_a_context_gets_one(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_driver()
    made: list[int] = []
    monkeypatch.setattr(driver, "use_primary_context", made.append)
    invalid = type("Code", (int,), {"name": "CUDA_ERROR_INVALID_CONTEXT"})(201)
    channel = Channel(kernels, 16)
    host.refuse.append(invalid)
    channel.post(random_ids(1, 16))
    assert made == [0]
    assert channel.door[0] == 1
    monkeypatch.setattr(driver, "_error", lambda code: (code.name, ""))
    host.refuse += [invalid, invalid]
    with pytest.raises(RuntimeError, match="verdict: CUDA_ERROR_INVALID_CONTEXT"):
        channel.verdict(0)
