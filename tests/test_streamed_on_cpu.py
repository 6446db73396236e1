"""Lookups through channels, the host in the GPU's place: kernels compiled by g++, the real loop.

Streams here run what they are given at once, so what is queued, captured or overtaken is shown by
tests/gpu alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import raw_tables
from host_kernels import on_host
from raw_tables import RawTable
from rowstream import _core
from rowstream.device import arena, channel, driver, link
from rowstream.device.link import DeviceLink
from rowstream.device.outputs import Outputs
from rowstream.device.streamed import StreamedRows
from rowstream.errors import ReadError

HEADS, ROW_BYTES = 16, 160
SYNCS = ["doorbell", "kernel", "hostnode", "gate"]
OpenRows = Callable[..., StreamedRows]


class FakeEvent:
    def record(self, stream: Any = None) -> None:
        self.recorded = True

    def synchronize(self) -> None: ...


class FakeStream:
    cuda_stream = 7

    def __init__(self, *arguments: Any) -> None: ...

    def wait_event(self, event: FakeEvent) -> None:
        assert isinstance(event, FakeEvent)


class FakeStates:
    def refill(self) -> None: ...

    def take(self) -> torch.Tensor:
        return torch.zeros(8, dtype=torch.int64)


def wait_and_reset(stream: int, flag: int) -> None:
    word = ctypes.c_uint32.from_address(flag)
    until = time.monotonic() + 10
    while word.value < 1:
        assert time.monotonic() < until, "a wait that nobody ends"
        time.sleep(0)
    word.value = 0


def host_function(stream: int, function: int, argument: int) -> None:
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


@pytest.fixture
def raw(tmp_path: Path, rng: np.random.Generator) -> RawTable:
    return raw_tables.write(tmp_path, rng)


@pytest.fixture
def open_rows(raw: RawTable, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenRows]:
    for name, fake in {
        "current_stream": lambda device=None: FakeStream(),
        "device": lambda device: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "Event": FakeEvent,
        "Stream": FakeStream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(driver, "pin", lambda address, num_bytes: address)
    monkeypatch.setattr(driver, "unpin", lambda address: None)
    monkeypatch.setattr(driver, "wait_and_reset", wait_and_reset)
    monkeypatch.setattr(driver, "host_function", host_function)
    monkeypatch.setattr(link, "_cpus_near", lambda device: [])
    monkeypatch.setattr(arena, "_orphans", [])
    for module in (link, channel):
        monkeypatch.setattr(module, "states", lambda device: FakeStates())
    opened: list[StreamedRows] = []

    def open_one(sync: str, faults: Any = (), **options: Any) -> StreamedRows:
        table = raw.open("uring-direct", faults=list(faults)) if faults else raw.open("loaded")
        made = DeviceLink(
            table,
            device=torch.device("cuda", 0),
            row_bytes=ROW_BYTES,
            groups=[8, 8],
            sync=sync,
            copies="kernel",
            **{"channel_bytes": 1 << 20, "read_timeout_s": 1.0, **options},
        )
        manifest: Any = SimpleNamespace(codec="bf16", scale=None, row_bytes=ROW_BYTES)
        opened.append(StreamedRows(made, Outputs(manifest, "out"), np.asarray))
        return opened[-1]

    with on_host() as kernels:
        monkeypatch.setattr(link, "kernels", lambda device: kernels)
        yield open_one
        for rows in opened:
            rows.close()


def ids_of(raw: RawTable, rng: np.random.Generator, tokens: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-1, raw.num_rows, (tokens, HEADS)))


def empty(tokens: int) -> torch.Tensor:
    return torch.full((tokens, HEADS, ROW_BYTES), 0xEE, dtype=torch.uint8)


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


@pytest.mark.parametrize("closed", [True, False])
def test_channels_go_when_the_device_has_done_with_them(
    closed: bool, raw: RawTable, open_rows: OpenRows, rng: np.random.Generator
) -> None:
    table = raw.open("loaded")
    options: dict[str, Any] = {"row_bytes": ROW_BYTES, "groups": [8, 8], "channel_bytes": 1 << 20}
    made = DeviceLink(table, device=torch.device("cuda", 0), **options)
    manifest: Any = SimpleNamespace(codec="bf16", scale=None, row_bytes=ROW_BYTES)
    rows = StreamedRows(made, Outputs(manifest, "out"), np.asarray)
    rows.start(ids_of(raw, rng, 1), None)
    rows.run(ids_of(raw, rng, 1), None, empty(1))
    memory = made.arena.core
    assert memory.used_bytes > 0
    if closed:
        rows.close()
        rows.close()
        with pytest.raises(ValueError, match="table is closed"):
            rows.run(ids_of(raw, rng, 1), None, empty(1))
    del rows, made
    gc.collect()
    until = time.monotonic() + 5
    while memory.used_bytes > 0:
        assert time.monotonic() < until
        time.sleep(0.001)
