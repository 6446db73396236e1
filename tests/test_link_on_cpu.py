"""The channels of a link, on a GPU that the host plays: none is lost, and none goes too early."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from host_gpu import HEADS, ROW_BYTES, SYNCS, HostGpu, empty, host_gpu, ids_of
from raw_tables import RawTable
from rowstream import _core
from rowstream.device import arena, driver, kernels, link
from rowstream.device.streamed import StreamedRows
from rowstream.errors import ReadError


@pytest.fixture
def gpu(raw: RawTable, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostGpu]:
    with host_gpu(raw, monkeypatch) as played:
        yield played


def right(rows: StreamedRows, raw: RawTable, rng: np.random.Generator, tokens: int) -> bool:
    ids, out = ids_of(raw, rng, tokens), empty(tokens)
    rows.run(ids, None, out)
    return np.array_equal(out.numpy(), raw.expected(ids.numpy()))


def given_back(memory: _core.Arena) -> bool:
    """Whether all of it is, after the threads had time to see it."""
    until = time.monotonic() + 60
    while memory.used_bytes > 0:
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def kept(memory: _core.Arena) -> bool:
    """Whether some of it is, after the threads have looked several times."""
    time.sleep(0.1)
    return memory.used_bytes > 0


def addresses(rows: StreamedRows) -> list[int]:
    """Of the channels, which they do not keep."""
    return [channel.core.argument for channel, _ in rows.link._idle]


def let_go(gpu: HostGpu, channels: list[int]) -> None:
    """What is left on purpose would be looked after until the tests end."""
    gpu.failed = False
    for channel in channels:
        gpu.host_function(7, _core.RELEASE_HOLD, channel)


# --- what fails between start and finish ----------------------------------------------------------


@pytest.mark.parametrize("sync", SYNCS)
def test_memory_that_is_not_there_costs_no_channel(
    sync: str, raw: RawTable, gpu: HostGpu, rng: np.random.Generator
) -> None:
    rows = gpu.open(sync)
    for _ in range(8):
        # codes that become wider values: they need room on their way
        ids, out = ids_of(raw, rng, 3), torch.full((3, HEADS, ROW_BYTES // 2), np.nan)
        sent = rows.start(ids, None)
        gpu.full = True
        with pytest.raises(torch.OutOfMemoryError):
            rows.finish(sent, out)
        with pytest.raises(torch.OutOfMemoryError):
            rows.run(ids, None, out)
        gpu.full = False
        rows.finish(sent, out)  # it is still to be had
        codes = torch.from_numpy(raw.expected(ids.numpy())).view(torch.bfloat16)
        torch.testing.assert_close(out, codes.float(), rtol=0, atol=0, equal_nan=True)
        gc.collect()
        assert right(rows, raw, rng, 3)
    assert rows.stats()["channels"] <= 3
    rows.check()


@pytest.mark.parametrize("sync", SYNCS)
def test_a_dropped_start_is_waited_for(
    sync: str, raw: RawTable, gpu: HostGpu, rng: np.random.Generator
) -> None:
    # nobody looks at its ring while another one is read
    rows = gpu.open(sync, faults=[_core.Fault(0, 10**6, delay_ms=100)])
    ids, out = ids_of(raw, rng, 1).abs(), empty(1)
    slow = rows.start(ids, None)
    sent = rows.start(ids_of(raw, rng, 1), None)
    del sent
    gc.collect()
    assert right(rows, raw, rng, 1)
    rows.finish(slow, out)
    assert np.array_equal(out.numpy(), raw.expected(ids.numpy()))
    assert rows.stats()["channels"] == 2
    rows.check()


def test_an_output_that_is_too_large_costs_no_channel(
    raw: RawTable, gpu: HostGpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = gpu.open("doorbell")
    ids, out = ids_of(raw, rng, 2), empty(2)
    sent = rows.start(ids, None)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_MAX_UNITS", 8)
        with pytest.raises(ValueError, match="lookup needs fewer than 8 units of"):
            rows.finish(sent, out)
    rows.finish(sent, out)
    assert np.array_equal(out.numpy(), raw.expected(ids.numpy()))
    assert rows.stats()["channels"] == 1


def test_rows_that_the_host_cannot_read_cost_no_channel(
    raw: RawTable, gpu: HostGpu, rng: np.random.Generator
) -> None:
    rows = gpu.open("gate", faults=[_core.Fault(0, 40, result=-5)])
    ids, out = torch.arange(HEADS).reshape(1, HEADS), empty(1)
    failures = 0
    for _ in range(60):
        try:
            rows.run(ids, None, out)
            break
        except ReadError:
            failures += 1
    assert failures > 3
    assert np.array_equal(out.numpy(), raw.expected(ids.numpy()))
    assert rows.stats()["channels"] <= 2


@pytest.mark.parametrize("captured", [False, True])
def test_a_start_in_a_capture_has_its_finish_there(
    captured: bool, raw: RawTable, gpu: HostGpu, rng: np.random.Generator
) -> None:
    rows = gpu.open("doorbell")
    ids, out = ids_of(raw, rng, 1), empty(1)
    gpu.capturing = captured
    sent = rows.start(ids, None)
    gpu.capturing = not captured
    with pytest.raises(RuntimeError, match="finish in the same capture, or both outside of one"):
        rows.finish(sent, out)
    assert (out == 0xEE).all()
    gpu.capturing = captured
    rows.finish(sent, out)
    gpu.capturing = False
    assert np.array_equal(out.numpy(), raw.expected(ids.numpy()))


@pytest.mark.parametrize("sync", SYNCS)
def test_graphs_that_are_gone_make_room_for_the_next(
    sync: str, raw: RawTable, gpu: HostGpu, rng: np.random.Generator
) -> None:
    rows = gpu.open(sync)
    tokens = 250  # two thirds of the arena
    for _ in range(3):
        with gpu.capture():
            rows.link._faults = rows.link._loop.faults  # of gates that nobody has filled
            rows.run(ids_of(raw, rng, tokens), None, empty(tokens))
        assert all(gate.in_a_graph for gate in rows.gates)
        assert len(rows.gates) == (sync == "gate")
        gpu.destroy_graphs()


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [True, False])
def test_channels_go_when_the_device_has_done_with_them(
    closed: bool, raw: RawTable, gpu: HostGpu, rng: np.random.Generator
) -> None:
    rows = gpu.open("doorbell")
    rows.start(ids_of(raw, rng, 1), None)
    assert right(rows, raw, rng, 1)
    memory = rows.link.arena.core
    assert memory.used_bytes > 0
    if closed:
        rows.close()
        rows.close()
        with pytest.raises(ValueError, match="table is closed"):
            rows.run(ids_of(raw, rng, 1), None, empty(1))
    gpu.opened.clear()
    del rows
    gc.collect()
    assert given_back(memory)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("sync", SYNCS)
def test_a_table_that_was_closed_in_a_lookup_is_closed(
    sync: str, finished: bool, raw: RawTable, gpu: HostGpu, rng: np.random.Generator
) -> None:
    rows = gpu.open(sync)
    memory = rows.link.arena.core
    ids, out = ids_of(raw, rng, 1), empty(1)
    sent = rows.start(ids, None)
    rows.close()
    if finished:
        rows.finish(sent, out)
        assert (out == 0xFF).all() or np.array_equal(out.numpy(), raw.expected(ids.numpy()))
    del sent
    gc.collect()
    rows.link._faults = rows.link._loop.faults
    for _ in range(3):
        with pytest.raises(ValueError, match="table is closed"):
            rows.run(ids, None, out)
    gpu.opened.clear()
    del rows
    gc.collect()
    assert given_back(memory)


def test_a_channel_stays_until_a_take_behind_its_close(
    raw: RawTable, gpu: HostGpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = gpu.open("doorbell")
    memory = rows.link.arena.core
    sent = rows.start(ids_of(raw, rng, 1), None)
    rows.close()
    queued: list[tuple[int, int]] = []
    monkeypatch.setattr(driver, "host_function", lambda stream, *call: queued.append(call))
    rows.finish(sent, empty(1))
    gpu.opened.clear()
    del rows, sent
    gc.collect()
    assert kept(memory)
    for call in queued:
        gpu.host_function(7, *call)
    assert given_back(memory)


@pytest.mark.parametrize("sync", SYNCS)
def test_what_is_queued_when_the_process_ends_keeps_its_channel(
    sync: str, raw: RawTable, gpu: HostGpu, rng: np.random.Generator, monkeypatch: Any
) -> None:
    # at the end of the process finalizers do not run, and all objects go
    without = SimpleNamespace(finalize=lambda *arguments: SimpleNamespace())
    with monkeypatch.context() as patch:
        patch.setattr(link, "weakref", without)
        rows = gpu.open(sync)
    assert right(rows, raw, rng, 1)
    memory, channels = rows.link.arena.core, addresses(rows)
    gpu.opened.clear()
    del rows
    gc.collect()
    assert kept(memory)
    let_go(gpu, channels)
    assert given_back(memory)


@pytest.mark.parametrize("closed", [True, False])
def test_a_gpu_that_failed_keeps_its_memory_and_is_left_quietly(
    closed: bool, raw: RawTable, gpu: HostGpu, rng: np.random.Generator
) -> None:
    rows = gpu.open("doorbell")
    assert right(rows, raw, rng, 1)
    memory, channels = rows.link.arena.core, addresses(rows)
    gpu.failed = True
    if closed:
        rows.close()
    gpu.opened.clear()
    del rows
    gc.collect()
    assert kept(memory)
    let_go(gpu, channels)
    assert given_back(memory)


@pytest.mark.parametrize("closed", [True, False])
def test_a_forked_child_asks_nothing_of_the_gpu(
    closed: bool, raw: RawTable, gpu: HostGpu, rng: np.random.Generator, monkeypatch: Any
) -> None:
    rows = gpu.open("doorbell")
    assert right(rows, raw, rng, 1)
    memory, channels = rows.link.arena.core, addresses(rows)
    gpu.called.clear()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        if closed:
            rows.close()
        gpu.opened.clear()
        del rows
        gc.collect()
    assert gpu.called == []
    let_go(gpu, channels)
    assert given_back(memory)


# --- what a link is made of -----------------------------------------------------------------------


def test_memory_stays_mapped_for_as_long_as_it_is_registered(
    gpu: HostGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(address: int) -> None:
        raise RuntimeError("cuMemHostUnregister: CUDA_ERROR_LAUNCH_FAILED")

    core = arena.PinnedArena(1 << 16, []).core  # nobody has it any more
    assert arena._orphans == [core]
    with monkeypatch.context() as patch:
        patch.setattr(driver, "unpin", refused)
        with pytest.raises(RuntimeError, match="cuMemHostUnregister"):
            arena.PinnedArena(1 << 16, [])
    assert arena._orphans == [core]
    del arena._orphans[:]
    arena.PinnedArena(1 << 16, [])


@pytest.mark.parametrize("named", [True, False])
def test_a_link_is_made_on_its_own_device(
    named: bool, raw: RawTable, gpu: HostGpu, rng: np.random.Generator
) -> None:
    # in a thread that has called nothing of CUDA yet, and where another device may be current
    gpu.context = None
    gpu.current = 0 if named else 1
    device = torch.device("cuda", 1) if named else torch.device("cuda")
    rows = gpu.open("doorbell", device=device)
    assert rows.link.device == torch.device("cuda", 1)
    assert gpu.context == 1
    assert gpu.current == (0 if named else 1)
    gpu.current = 1
    assert right(rows, raw, rng, 1)
