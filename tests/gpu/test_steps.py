"""Captured lookups of every kind of wait, queued and alternating, with and without faults."""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from gpu.steps import HEADS, ROW_BYTES, VOID, Rig, Step
from gpu.words import new_stream
from rowstream import _core
from rowstream.device.channel import Output
from rowstream.device.sync import MODES
from rowstream.errors import ReadError, UnavailableError

every_sync = pytest.mark.parametrize("sync", MODES)
waits = pytest.mark.parametrize("sync", MODES[:-1])
EIO = 5


def run(steps: list[Step], replays: int) -> None:
    """Half of the replays one by one, half of them eight at a time."""
    gated = steps[0].gate is not None
    for replay in range(replays // 2):
        steps[replay % len(steps)].replay()
        torch.cuda.synchronize()
    for replay in range(replays // 2):
        steps[replay % len(steps)].replay()
        if replay % 8 == 7 or gated:
            torch.cuda.synchronize()
    torch.cuda.synchronize()


@every_sync
def test_steps_on_one_stream_and_on_two(sync: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path, sync)
    replays = 400 if sync == "gate" else 2500
    first, second = rig.capture(1), rig.capture(5, padded=True)
    wide = rig.capture(80, padded=True)
    wide.stream = second.stream = first.stream
    run([first, second, wide], replays)
    two = [rig.capture(2), rig.capture(3, padded=True)]
    run(two, replays)
    assert [step.right_void_wrong for step in two] == [(replays // 2, 0, 0)] * 2
    counts = [step.right_void_wrong for step in (first, second, wide)]
    assert all((void, wrong) == (0, 0) for _, void, wrong in counts)
    assert sum(right for right, _, _ in counts) == replays
    rig.link.check()


def test_ten_thousand_queued_steps(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "doorbell", reader="inline")
    steps = [rig.capture(1), rig.capture(4, padded=True)]
    run(steps, 10_000)
    assert [step.right_void_wrong for step in steps] == [(5000, 0, 0), (5000, 0, 0)]


@waits
def test_faults_make_steps_void_never_wrong(sync: str, tmp_path: Path) -> None:
    chance = random.Random()
    faults, at = [], 200
    for _ in range(12):
        at += chance.randrange(200, 900)
        kind = chance.choice([{"result": -EIO}, {"delay_ms": 30}, {"delay_ms": 1500}])
        faults.append(_core.Fault(at, 60, **kind))
        at += 60
    rig = Rig(tmp_path, sync, faults=faults, read_timeout_s=0.4)
    step = rig.capture(2, padded=True)
    failures = 0
    for replay in range(1200):
        step.replay()
        if replay % 8 == 7:
            torch.cuda.synchronize()
            try:
                rig.link.check()
            except ReadError:
                failures += 1
    torch.cuda.synchronize()
    right, void, wrong = step.right_void_wrong
    assert wrong == 0
    assert right + void == 1200
    assert right > 600
    assert void >= failures > 0


@waits
def test_eager_lookups_of_any_size_on_any_stream(sync: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path, sync)
    streams = [new_stream() for _ in range(4)]
    counts = torch.zeros(3, dtype=torch.int64, device=rig.device)
    live = torch.full((), 10**6, dtype=torch.int32, device=rig.device)
    torch.cuda.synchronize()
    for turn in range(200):
        tokens = random.choice([1, 2, 7, 64, 300])
        with torch.cuda.stream(streams[turn * 7 % 4]):
            stream = torch.cuda.current_stream().cuda_stream
            ids = torch.randint(-3, rig.rows, (tokens, HEADS), device=rig.device)
            out = torch.full((tokens, HEADS, ROW_BYTES), 0xEE, dtype=torch.uint8, device=rig.device)
            with rig.link.locked():
                channel = rig.link.borrow(stream)
                channel.post(stream, ids, tokens, None)
                channel.wait(stream)
                channel.take(stream, out, tokens, Output(VOID))
                rig.link.give_back(channel, stream)
            torch.cuda.current_stream().synchronize()
            rig.judge(ids, live, out, counts)
    torch.cuda.synchronize()
    assert counts.tolist() == [200, 0, 0]
    assert rig.link.stats()["channels"] <= 3


def test_a_channel_goes_back_with_its_graph(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "doorbell", channel_bytes=1 << 20)
    for _ in range(20):
        step = rig.capture(64)  # 180 KB each
        step.replay()
        torch.cuda.synchronize()
        assert step.right_void_wrong == (1, 0, 0)
        del step
        gc.collect()
        until = time.monotonic() + 5
        while rig.link.stats()["channel_bytes_used"] > 0 and time.monotonic() < until:
            time.sleep(0.005)
        assert rig.link.stats()["channel_bytes_used"] == 0


def test_a_link_may_end_while_a_graph_is_captured(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "doorbell")
    ids = torch.randint(rig.rows, (1, HEADS), device=rig.device)
    out = torch.empty((1, HEADS, ROW_BYTES), dtype=torch.uint8, device=rig.device)
    stream = torch.cuda.current_stream().cuda_stream
    channel = rig.link.borrow(stream)
    channel.post(stream, ids, 1, None)
    channel.wait(stream)
    channel.take(stream, out, 1, Output(VOID))
    rig.link.give_back(channel, stream)
    capturing, graph = new_stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=capturing):
        out.fill_(1)
        # torch has 32 in turn: its next one is the one that captures
        while new_stream().cuda_stream != capturing.cuda_stream:
            pass
        for _ in range(31):
            new_stream()
        rig.link.close()
        out.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 2).all()


def test_a_full_arena_says_so(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "doorbell", channel_bytes=1 << 19)
    with pytest.raises(UnavailableError, match=r"channel for 8192 rows needs \d+ bytes"):
        rig.link.add(8192, gated=False)


@waits
def test_closed_while_a_stream_waits(sync: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path, sync, faults=[_core.Fault(0, 10**6, delay_ms=3000)], read_timeout_s=0.7)
    step = rig.capture(1)
    step.replay()
    time.sleep(0.1)
    began = time.monotonic()
    rig.link.close()
    step.replay()
    torch.cuda.synchronize()
    assert time.monotonic() - began < 0.7 + 1.0 + 0.5
    right, void, wrong = step.right_void_wrong
    assert (right, wrong) == (0, 0)
    assert void == 2


def test_two_instances_of_one_lookup_are_void_and_can_be_reset(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "doorbell")
    ids = torch.randint(rig.rows, (1, HEADS), device=rig.device)
    out = torch.empty((1, HEADS, ROW_BYTES), dtype=torch.uint8, device=rig.device)
    stream = torch.cuda.current_stream().cuda_stream
    channel = rig.link.borrow(stream)
    for _ in range(2):
        channel.post(stream, ids, 1, None)
    for _ in range(2):
        channel.wait(stream)
        channel.take(stream, out, 1, Output(VOID))
    torch.cuda.synchronize()
    assert (out == VOID).all()
    rig.link.give_back(channel, stream)
    with pytest.raises(ReadError, match="two streams use one channel"):
        rig.link.check()
    channel.reset()
    channel.post(stream, ids, 1, None)
    channel.wait(stream)
    channel.take(stream, out, 1, Output(VOID))
    torch.cuda.synchronize()
    assert torch.equal(out, rig.table[ids])


def test_gated_launches_with_other_ids_are_void(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "gate")
    step = rig.capture(2)
    assert step.gate is not None
    step.replay()
    torch.cuda.synchronize()
    with torch.cuda.stream(step.stream):
        step.graph.replay()  # nobody filled it
    torch.cuda.synchronize()
    step.replay()
    torch.cuda.synchronize()
    assert step.right_void_wrong == (2, 1, 0)
