"""Lookups through channels to a GPU that the host plays: their rows, and what they refuse."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from host_gpu import HEADS, ROW_BYTES, SYNCS, HostGpu, empty, host_gpu, ids_of
from raw_tables import RawTable
from rowstream import _core
from rowstream.device.streamed import StreamedRows
from rowstream.errors import ReadError

OpenRows = Callable[..., StreamedRows]


@pytest.fixture
def gpu(raw: RawTable, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostGpu]:
    with host_gpu(raw, monkeypatch) as played:
        yield played


@pytest.fixture
def open_rows(gpu: HostGpu) -> OpenRows:
    return gpu.open


@pytest.mark.parametrize("sync", SYNCS)
def test_lookups_of_every_size(
    sync: str, raw: RawTable, open_rows: OpenRows, rng: np.random.Generator
) -> None:
    rows = open_rows(sync)
    for tokens in (1, 3, rows.link.eager_tokens, rows.link.eager_tokens * 2 + 5):
        for live in (None, tokens - 1, 0):
            ids, out = ids_of(raw, rng, tokens), empty(tokens)
            count = None if live is None else torch.tensor(live, dtype=torch.int32)
            rows.run(ids, count, out)
            expected = raw.expected(ids.numpy())
            expected[tokens if live is None else live :] = 0
            assert np.array_equal(out.numpy(), expected)
    rows.check()
    assert rows.stats()["void_steps"] == 0
    assert rows.stats()["channels"] <= 2


@pytest.mark.parametrize("sync", SYNCS)
def test_starts_that_overlap_and_one_that_is_dropped(
    sync: str, raw: RawTable, open_rows: OpenRows, rng: np.random.Generator
) -> None:
    rows = open_rows(sync)
    for _ in range(8):
        rows.start(ids_of(raw, rng, 2), None)  # never finished
        gc.collect()
        asked = [ids_of(raw, rng, 4) for _ in range(2)]
        sent = [rows.start(ids, None) for ids in asked]
        for ids, one in reversed(list(zip(asked, sent, strict=True))):
            out = empty(4)
            rows.finish(one, out)
            assert np.array_equal(out.numpy(), raw.expected(ids.numpy()))
            with pytest.raises(RuntimeError, match="one finish"):
                rows.finish(one, out)
    assert rows.stats()["channels"] <= 4
    rows.check()


def test_an_output_that_cannot_be_leaves_the_start_whole(
    raw: RawTable, open_rows: OpenRows, rng: np.random.Generator
) -> None:
    rows = open_rows("doorbell")
    rows._outputs._scale = 0.5
    rows._outputs._codec = "fp8_e4m3"
    ids = ids_of(raw, rng, 1)
    sent = rows.start(ids, None)
    with pytest.raises(TypeError, match="dtype needs"):
        rows.finish(sent, torch.empty((1, HEADS, ROW_BYTES), dtype=torch.float64))
    out = empty(1)
    rows.finish(sent, out)
    assert np.array_equal(out.numpy(), raw.expected(ids.numpy()))


@pytest.mark.parametrize("sync", SYNCS[:-1])
def test_a_void_step_is_raised_once_and_the_next_is_right(
    sync: str, raw: RawTable, open_rows: OpenRows, rng: np.random.Generator
) -> None:
    rows = open_rows(sync, faults=[_core.Fault(0, 12, result=-5)])
    ids, out = torch.arange(HEADS).reshape(1, HEADS), empty(1)
    rows.run(ids, None, out)
    assert (out == 0xFF).all()
    with pytest.raises(ReadError, match="Input/output error"):
        rows.check()
    rows.check()
    for _ in range(12):
        rows.run(ids, None, out)
        if not (out == 0xFF).all():
            break
        with pytest.raises(ReadError):
            rows.check()
    assert np.array_equal(out.numpy(), raw.expected(ids.numpy()))
