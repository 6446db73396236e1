"""`take` and `rows` against NumPy: no channel, no thread; the test is the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from gpu.words import (
    BUSY,
    CLOSED,
    COUNT,
    DONE,
    EPOCH,
    FAULT,
    HEADER,
    IDS,
    POISON,
    READ,
    Words,
    address,
    on_device,
    poisoned,
    random_ids,
)
from rowstream.device.dequantize import lut, reference, void_bits, void_byte

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


# --- take -------------------------------------------------------------------------------------


def _step(
    words: Words,
    tokens: int,
    owned: int,
    row_bytes: int,
    header: int | None = None,
    *,
    judged: bool = True,
) -> Any:
    """Post, fill staging with random rows, answer; return the rows [tokens, owned, row_bytes]."""
    epoch = words.state_word(EPOCH) + 1
    words.post(on_device(random_ids(tokens, owned)))
    words.synchronize()
    shape = (tokens * owned, row_bytes)
    rows = np.random.default_rng(epoch).integers(0, 256, shape, np.uint8)
    words.staging(*shape)[:] = rows
    words.set_word(HEADER, epoch << 8 if header is None else header)
    if judged:
        words.verdict()
    return rows.reshape(tokens, owned, row_bytes)


@pytest.mark.parametrize("judged", [True, False])
@pytest.mark.parametrize("row_bytes", [1, 7, 100, 160, 164, 168, 320, 640])
@pytest.mark.parametrize("tokens", [1, 3, 5, 333])
def test_take_copies_rows_of_any_width(tokens: int, row_bytes: int, judged: bool) -> None:
    words = Words(tokens * 16, row_bytes)
    rows = _step(words, tokens, 16, row_bytes, judged=judged)
    out = poisoned(tokens + 1, 16, row_bytes)
    words.take(out[:tokens], row_bytes, 0x7F, answer=None if judged else words.answer())
    words.synchronize()
    assert np.array_equal(out[:tokens].cpu().numpy(), rows)
    assert (out[tokens] == POISON).all()
    assert words.state_word(BUSY) == 0
    assert words.state_word(DONE) == 0


@pytest.mark.parametrize("shift", [1, 4, 8])
def test_take_writes_where_the_output_starts(shift: int) -> None:
    words = Words(16, 160)
    rows = _step(words, 1, 16, 160)
    flat = poisoned(16 * 160 + 64)
    words.take(flat[shift : shift + 16 * 160].view(1, 16, 160), 160, 0x7F)
    words.synchronize()
    found = flat.cpu().numpy()
    assert np.array_equal(found[shift : shift + 2560].reshape(1, 16, 160), rows)
    assert (found[:shift] == POISON).all()
    assert (found[shift + 2560 :] == POISON).all()


SLOTS = [-1, 0, -1, -1, 2, 1, -1, 3]


@pytest.mark.parametrize("row_bytes", [7, 160])
def test_take_gives_zeroes_for_heads_of_others(row_bytes: int) -> None:
    words = Words(20 * 4, row_bytes)
    rows = _step(words, 20, 4, row_bytes)
    slot_of = torch.tensor(SLOTS, dtype=torch.int32, device="cuda")
    out = poisoned(20, 8, row_bytes)
    words.take(out, row_bytes, 0x7F, slot_of=slot_of, owned=4)
    words.synchronize()
    expected = np.zeros((20, 8, row_bytes), np.uint8)
    for head, slot in enumerate(SLOTS):
        if slot >= 0:
            expected[:, head] = rows[:, slot]
    assert np.array_equal(out.cpu().numpy(), expected)


@pytest.mark.parametrize("codec", ["fp8_e4m3", "bf16"])
@pytest.mark.parametrize("row_bytes", [7, 100, 160])
@pytest.mark.parametrize("judged", [True, False])
def test_a_void_step_leaves_nan_everywhere(judged: bool, row_bytes: int, codec: str) -> None:
    words = Words(5 * 4, row_bytes)
    _step(words, 5, 4, row_bytes, header=1 << 8 | READ, judged=judged)
    slot_of = torch.tensor(SLOTS, dtype=torch.int32, device="cuda")
    out = poisoned(5, 8, row_bytes)
    answer = None if judged else words.answer()
    words.take(out, row_bytes, void_byte(codec), slot_of=slot_of, owned=4, answer=answer)
    words.synchronize()
    assert (out == void_byte(codec)).all()
    assert words.state_word(BUSY) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ["f32", "out"])
def test_take_dequantizes_every_code_to_the_bits_of_the_cpu(
    dtype: torch.dtype, rounding: str
) -> None:
    words = Words(16, 160)
    scales = np.random.default_rng(8).uniform(1e-5, 2, 40).astype(np.float32).tolist()
    for scale in [0.00019931793212890625, *scales]:
        table = lut(scale, dtype, rounding)
        table_there = table.cuda()
        _step(words, 1, 16, 160)
        codes = np.arange(16 * 160, dtype=np.uint32).astype(np.uint8).reshape(1, 16, 160)
        words.staging(16, 160)[:] = codes[0]
        out = poisoned(1, 16, 160, dtype=dtype)
        words.take(out, 160, void_bits(dtype), lut=table_there)
        words.synchronize()
        expected = reference(torch.from_numpy(codes), "fp8_e4m3", scale, dtype, "scaled", rounding)
        assert torch.equal(out.cpu().view(table.dtype), expected.view(table.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_bytes", [7, 100, 160, 168])
def test_take_dequantizes_rows_of_any_width_with_foreign_heads(
    row_bytes: int, dtype: torch.dtype
) -> None:
    words = Words(33 * 4, row_bytes)
    table = lut(0.37, dtype, "f32")
    slot_of = torch.tensor(SLOTS, dtype=torch.int32, device="cuda")
    table_there = table.cuda()
    rows = _step(words, 33, 4, row_bytes)
    out = poisoned(34, 8, row_bytes, dtype=dtype)
    bits = out.view(table.dtype)
    words.take(out[:33], row_bytes, void_bits(dtype), slot_of=slot_of, owned=4, lut=table_there)
    words.synchronize()
    expected = np.zeros((33, 8, row_bytes), table.numpy().dtype)
    for head, slot in enumerate(SLOTS):
        if slot >= 0:
            expected[:, head] = table.numpy()[rows[:, slot]]
    assert np.array_equal(bits[:33].cpu().numpy(), expected)
    assert (bits[33].contiguous().view(torch.uint8) == POISON).all()

    _step(words, 33, 4, row_bytes, header=CLOSED)
    words.take(out[:33], row_bytes, void_bits(dtype), slot_of=slot_of, owned=4, lut=table_there)
    words.synchronize()
    assert (bits[:33] == void_bits(dtype)).all()
    assert torch.isnan(out[:33]).all()


def test_take_of_many_rows_uses_many_blocks_and_frees_the_channel_once() -> None:
    tokens = 4096
    words = Words(tokens * 16, 160)
    out = poisoned(tokens, 16, 160)
    for _ in range(3):
        rows = _step(words, tokens, 16, 160)
        words.take(out, 160, 0x7F)
        words.synchronize()
        assert np.array_equal(out.cpu().numpy(), rows)
        assert words.state_word(BUSY) == 0
    assert words.word(COUNT, "<u4") == 0


# --- rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["pinned", "device"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("row_bytes", "shift"), [(160, 0), (160, 1), (100, 0), (7, 0), (640, 4)])
def test_rows_are_those_of_the_table(row_bytes: int, shift: int, dtype: Any, where: str) -> None:
    words = Words(16, 16)
    random = np.random.default_rng(1)
    table = random.integers(0, 256, (1000, row_bytes), np.uint8)
    flat = torch.zeros(table.size + shift, dtype=torch.uint8)
    flat[shift:] = torch.from_numpy(table.ravel())
    base = flat.pin_memory() if where == "pinned" else flat.cuda()
    tokens, heads = 50, 8
    ids = random.integers(0, 1000, (tokens, heads)).astype(dtype)
    ids[0, 1], ids[1, 1], ids[2, 1] = 0, 999, -1
    ids_there = on_device(ids)
    live = torch.tensor([47], dtype=torch.int32, device="cuda")
    slot_of = torch.tensor(SLOTS, dtype=torch.int32, device="cuda")
    out = poisoned(tokens + 1, heads, row_bytes)
    words.keep(base, ids_there, live, slot_of, out)
    expected = np.zeros((tokens, heads, row_bytes), np.uint8)
    for head, slot in enumerate(SLOTS):
        for token in range(47):
            if slot >= 0 and ids[token, head] >= 0:
                expected[token, head] = table[ids[token, head]]
    for first in (live, None):
        if first is None:
            expected[47:] = np.where(np.array(SLOTS)[:, None] >= 0, table[ids[47:]], 0)
        words.kernels.rows(
            words.handle,
            base.data_ptr() + shift,
            ids_there.data_ptr(),
            ids.itemsize,
            address(first),
            tokens,
            heads,
            slot_of.data_ptr(),
            out.data_ptr(),
            row_bytes,
            1000,
            0x7F,
            words.at(FAULT),
        )
        words.synchronize()
        assert np.array_equal(out[:tokens].cpu().numpy(), expected)
    assert (out[tokens] == POISON).all()
    assert words.word(FAULT) == 0


@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_rows_past_the_table_are_nan_and_told(dtype: torch.dtype | None) -> None:
    words = Words(16, 16)
    table = np.random.default_rng(2).integers(0, 256, (64, 160), np.uint8)
    base = torch.from_numpy(table).pin_memory()
    ids = np.arange(48).reshape(3, 16)
    ids[1, 7] = 64
    ids_there = on_device(ids)
    bits = None if dtype is None else lut(0.5, dtype, "f32")
    on_gpu = None if bits is None else bits.cuda()
    void = 0x7F if dtype is None else void_bits(dtype)
    out = poisoned(3, 16, 160, dtype=torch.uint8 if bits is None else bits.dtype)
    words.keep(base, ids_there, on_gpu, out)
    words.kernels.rows(
        words.handle,
        base.data_ptr(),
        ids_there.data_ptr(),
        8,
        0,
        3,
        16,
        0,
        out.data_ptr(),
        160,
        64,
        void,
        words.at(FAULT),
        address(on_gpu),
        1 if bits is None else bits.element_size(),
    )
    words.synchronize()
    assert words.word(FAULT) == 64 << 8 | IDS
    rows = table[np.minimum(ids, 63)]
    expected = rows if bits is None else bits.numpy()[rows]
    expected[1, 7] = void
    assert np.array_equal(out.cpu().numpy(), expected)


def test_a_lookup_too_large_to_count_is_refused() -> None:
    words = Words(16, 16)
    with pytest.raises(ValueError, match="units of 1 bytes"):
        words.kernels.take(words.handle, 16, 17, 16, 1 << 20, 16, 0, 16, 160, 0)
