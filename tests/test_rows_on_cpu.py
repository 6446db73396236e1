"""`take` and `rows`, their own text compiled for the host, against NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from host_kernels import POISON, Channel, at, host_driver, memory, on_host, random_ids
from rowstream.device.kernels import Kernels

READ, IDS, CLOSED = 1, 3, 4
VOID = 0x7FC17FC1
SLOTS = [-1, 0, -1, -1, 2, 1, -1, 3]
# of 16, 4 and 1 bytes at a time
WIDTHS = [1, 7, 100, 160, 164, 320]


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    with on_host() as found:
        yield found


# --- take ---------------------------------------------------------------------------------------


def take(
    channel: Channel,
    out: NDArray[np.uint8],
    tokens: int,
    heads: int,
    slot_of: list[int] | None = None,
    lut: NDArray[Any] | None = None,
    *,
    judged: bool = True,
) -> bool:
    """Whether it was the only launch, and its own judge."""
    slots = None if slot_of is None else np.array(slot_of, np.int32)
    owned = heads if slot_of is None else max(slot_of) + 1
    value_bytes = 1 if lut is None else lut.itemsize
    before = len(host_driver().launches)
    channel.kernels.take(
        1, at(channel.state), at(channel.staging), at(out), tokens, heads, at(slots), owned,
        channel.row_bytes, VOID & (1 << 8 * value_bytes) - 1, at(lut), value_bytes,
        None if judged else channel.answer(),
    )  # fmt: skip
    return not judged and len(host_driver().launches) == before + 1


def table_of(value_bytes: int) -> NDArray[Any] | None:
    """A random output for every code, or None: the bytes as they are."""
    if value_bytes == 1:
        return None
    words = np.random.default_rng(value_bytes).integers(0, 2**32, 256, np.uint32)
    return words.astype(f"u{value_bytes}")


def outputs_of(rows: NDArray[np.uint8], lut: NDArray[Any] | None) -> NDArray[Any]:
    return rows if lut is None else lut[rows]


def test_take_believes_no_verdict_on_another_ring(kernels: Kernels) -> None:
    # another stream has rung meanwhile: who of the two takes first cannot be told
    channel = Channel(kernels, 16, 160)
    channel.answered(1, 16)
    channel.state[0] += 1
    out = memory(16 * 160)
    take(channel, out, 1, 16)
    assert (out == (VOID & 255)).all()


# tokens, row_bytes, bytes of a value, where the output starts behind 16 bytes
SHAPES = [
    *itertools.product([1, 29], WIDTHS, [1, 2, 4], [0]),
    *itertools.product([3], [160, 164], [1], [1, 4, 8]),
    *itertools.product([3], [160, 164], [2], [2, 4, 8]),
    *itertools.product([3], [160, 164], [4], [4, 8]),
]


@pytest.mark.parametrize("judged", [True, False])
@pytest.mark.parametrize(("tokens", "row_bytes", "value_bytes", "shift"), SHAPES)
def test_take_brings_staging_to_where_the_output_is(
    kernels: Kernels, tokens: int, row_bytes: int, value_bytes: int, shift: int, judged: bool
) -> None:
    channel = Channel(kernels, tokens * 16, row_bytes)
    rows = channel.answered(tokens, 16, judged=judged)
    lut = table_of(value_bytes)
    count = rows.size * value_bytes
    out = memory(count + 16, shift)
    alone = take(channel, out, tokens, 16, lut=lut, judged=judged)
    assert np.array_equal(out[:count], outputs_of(rows, lut).reshape(-1).view(np.uint8))
    assert (out[count:] == POISON).all()
    # its own verdict is nobody else's business
    assert channel.epoch_busy_good_mismatch_done == (1, 0, not alone, 0, 0)


@pytest.mark.parametrize("judged", [True, False])
@pytest.mark.parametrize("value_bytes", [1, 2, 4])
@pytest.mark.parametrize("row_bytes", [7, 100, 160])
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("status", [0, READ])
def test_take_gives_zeroes_for_heads_of_others_and_nan_for_a_void_step(
    kernels: Kernels, row_bytes: int, value_bytes: int, tokens: int, status: int, judged: bool
) -> None:
    channel = Channel(kernels, tokens * 4, row_bytes)
    rows = channel.answered(tokens, 4, status, judged=judged)
    lut = table_of(value_bytes)
    out = memory(tokens * 8 * row_bytes * value_bytes)
    alone = take(channel, out, tokens, 8, SLOTS, lut, judged=judged)
    found = out.view(f"u{value_bytes}").reshape(tokens, 8, row_bytes)
    for head, slot in enumerate(SLOTS):
        if status:
            assert (found[:, head] == VOID & (1 << 8 * value_bytes) - 1).all()
        elif slot < 0:
            assert not found[:, head].any()
        else:
            assert np.array_equal(found[:, head], outputs_of(rows[:, slot], lut))
    good = not status and not alone
    assert channel.epoch_busy_good_mismatch_done == (1, 0, good, 0, 0)
    assert channel.faults == ((1 << 8 | status, 1) if status else (0, 0))


@pytest.mark.parametrize("header", [0, 2 << 8, 1 << 8 | READ, CLOSED])
def test_a_take_alone_believes_its_own_ring(kernels: Kernels, header: int) -> None:
    channel = Channel(kernels, 16, 160)
    channel.answered(1, 16)  # a verdict that was good, of the ring before
    take(channel, memory(16 * 160), 1, 16)
    channel.post(random_ids(1, 16))
    channel.header[0] = header
    out = memory(16 * 160)
    take(channel, out, 1, 16, judged=False)
    assert (out == (VOID & 255)).all() == (header != 2 << 8)
    assert channel.faults[1] == (header != 2 << 8)


def test_faults_are_counted(kernels: Kernels) -> None:
    channel = Channel(kernels, 16)
    for step in range(1, 4):
        channel.post(random_ids(1, 16))
        channel.verdict(CLOSED)
        take(channel, memory(256), 1, 16)
        assert channel.faults == (step << 8 | CLOSED, step)


# --- rows ---------------------------------------------------------------------------------------

NUM_ROWS = 70


def addressed(
    kernels: Kernels,
    ids: NDArray[Any],
    row_bytes: int,
    value_bytes: int = 1,
    live: int | None = None,
    slot_of: list[int] | None = None,
) -> tuple[NDArray[Any], NDArray[Any], int]:
    """Return the outputs, those of NumPy with each head and token alive, and the fault."""
    table = memory(NUM_ROWS * row_bytes).reshape(NUM_ROWS, row_bytes)
    table[:] = np.random.default_rng(row_bytes).integers(0, 256, table.shape, np.uint8)
    lut = table_of(value_bytes)
    out = memory((ids.size + 1) * row_bytes * value_bytes)
    slots = None if slot_of is None else np.array(slot_of, np.int32)
    count = None if live is None else np.array([live], np.int32)
    fault = np.zeros(1, np.uint64)
    tokens, heads = ids.shape
    kernels.rows(
        1, at(table), at(ids), ids.itemsize, at(count), tokens, heads, at(slots), at(out),
        row_bytes, NUM_ROWS, VOID & (1 << 8 * value_bytes) - 1, at(fault), at(lut), value_bytes,
    )  # fmt: skip
    values = out.view(f"u{value_bytes}").reshape(ids.size + 1, row_bytes)
    assert (values[-1].view(np.uint8) == POISON).all()
    expected = outputs_of(table, lut)[np.clip(ids, 0, NUM_ROWS - 1)]
    expected[ids < 0] = 0
    return values[:-1].reshape(expected.shape), expected, int(fault[0])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("value_bytes", [1, 2, 4])
@pytest.mark.parametrize("row_bytes", WIDTHS)
def test_rows_come_out_of_a_table_by_their_ids(
    kernels: Kernels, row_bytes: int, value_bytes: int, dtype: Any
) -> None:
    ids = (random_ids(9, 8, dtype) % NUM_ROWS).astype(dtype)
    ids[0, :2] = NUM_ROWS - 1, 0
    ids[4, 2:4] = -1, np.iinfo(dtype).min
    found, expected, fault = addressed(kernels, ids, row_bytes, value_bytes)
    assert np.array_equal(found, expected)
    assert fault == 0


@pytest.mark.parametrize("live", [-1, 0, 4, 100])
@pytest.mark.parametrize("row_bytes", [7, 160])
def test_rows_of_padded_tokens_and_of_other_ranks_are_zeroes(
    kernels: Kernels, live: int, row_bytes: int
) -> None:
    ids = random_ids(9, 8) % NUM_ROWS
    foreign = np.array(SLOTS) < 0
    # nobody looks at what is not ours
    ids[:, foreign] = NUM_ROWS + 5
    ids[max(live, 0) :] = NUM_ROWS + 5
    found, expected, fault = addressed(kernels, ids, row_bytes, 2, live, SLOTS)
    expected[max(live, 0) :] = 0
    expected[:, foreign] = 0
    assert np.array_equal(found, expected)
    assert fault == 0


@pytest.mark.parametrize("value_bytes", [1, 2, 4])
@pytest.mark.parametrize("past", [NUM_ROWS, 2**31 - 1, 2**40 + 7])
def test_an_id_past_the_table_is_nan_and_told(
    kernels: Kernels, past: int, value_bytes: int
) -> None:
    ids = random_ids(5, 8) % NUM_ROWS
    ids[3, 6] = past
    found, expected, fault = addressed(kernels, ids, 100, value_bytes)
    expected[3, 6] = VOID & (1 << 8 * value_bytes) - 1
    assert np.array_equal(found, expected)
    assert fault == past << 8 | IDS


# --- launches -----------------------------------------------------------------------------------


def test_launches_are_as_large_as_their_work(kernels: Kernels) -> None:
    host = host_driver()
    host.launches.clear()
    channel = Channel(kernels, 300 * 16, 160)
    channel.answered(300, 16, judged=False)
    take(channel, memory(300 * 16 * 160), 300, 16, judged=False)
    take(channel, memory(4 * 16 * 160), 4, 16, judged=False)
    take(channel, memory(3 * 16 * 160), 3, 16, judged=False)
    addressed(kernels, random_ids(1, 16) % NUM_ROWS, 160)
    addressed(kernels, random_ids(300, 16) % NUM_ROWS, 160)
    small = Channel(kernels, 3)
    small.post(random_ids(1, 3))
    assert host.launches == [
        ("post", 1, 1024),
        ("verdict", 1, 1),
        ("take_bytes", 2, 256),  # of 188, one for each multiprocessor
        ("verdict", 1, 1),
        ("take_bytes", 2, 256),  # of 3
        ("take_bytes", 1, 256),  # of 2, which judges by itself
        ("rows_bytes", 1, 256),
        ("rows_bytes", 8, 256),
        ("post", 1, 32),
    ]


def test_more_than_the_kernels_can_count_is_refused(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="lookup needs fewer than 2147483648 units of 1 bytes"):
        kernels.take(1, 0, 0, 0, 2**20, 2**4, 0, 2**4, 2**7 + 1, 0)
    with pytest.raises(ValueError, match="units of 16 bytes"):
        kernels.rows(1, 0, 0, 8, 0, 2**24, 16, 0, 0, 160, 1, 0, 0)
