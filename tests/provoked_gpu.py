"""What only a GPU can show; tests/gpu/test_messages.py tries it, test_troubleshooting.py lists it.

Can be imported without a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gpu.steps import HEADS, ROW_BYTES, VOID, Rig
from provocations import Provoke, met_on_gpu
from rowstream import ReadError, RowStore, UnavailableError
from rowstream.device.addressed import AddressedTable
from rowstream.device.arena import States
from rowstream.device.channel import Output
from rowstream.device.kernels import kernels
from rowstream.device.lookup import Lookup
from rowstream.device.outputs import Outputs
from rowstream.device.places import DeviceMemory
from rowstream.device.streamed import StreamedRows
from rowstream.synth import write_checkpoint

CUDA = torch.device("cuda", 0)


def store(act: Callable[[RowStore], object]) -> Provoke:
    def provoke(folder: Path) -> object:
        write_checkpoint(folder / "checkpoint", base=2000, dtype="fp8")
        with RowStore.open(folder / "checkpoint", backend="disk") as opened:
            return act(opened)

    return provoke


def linked(act: Callable[[Rig], object]) -> Provoke:
    def provoke(folder: Path) -> object:
        rig = Rig(folder, "doorbell")
        try:
            return act(rig)
        finally:
            rig.link.close()

    return provoke


# tables in the GPU's memory


def rows_of(table: AddressedTable, opened: RowStore, row_id: int) -> None:
    ids = torch.full((1, opened.heads), row_id, dtype=torch.int64, device=CUDA)
    out = torch.empty((1, opened.heads, opened.row_bytes), dtype=torch.uint8, device=CUDA)
    table.rows(torch.cuda.current_stream().cuda_stream, ids, 1, None, out, Output(VOID))
    torch.cuda.synchronize()


def closed(opened: RowStore) -> None:
    table = AddressedTable(opened, CUDA, "device")
    table.close()
    rows_of(table, opened, 0)


def past_the_table(opened: RowStore) -> None:
    table = AddressedTable(opened, CUDA, "device")
    try:
        rows_of(table, opened, opened.num_rows)
        table.check()
    finally:
        table.close()


def larger_than_memory(folder: Path) -> object:
    rows = range((1 << 42) // ROW_BYTES)
    table: Any = SimpleNamespace(
        num_rows=len(rows),
        row_bytes=ROW_BYTES,
        owned=SimpleNamespace(rows=rows),
        manifest=SimpleNamespace(name="table"),
    )
    return DeviceMemory(table, CUDA, None)


met_on_gpu("table is closed", ValueError, "device/addressed.py AddressedTable.rows", store(closed))
met_on_gpu(
    "row id <id> is outside [0, <rows>) in <table>",
    IndexError,
    "device/addressed.py AddressedTable.check",
    store(past_the_table),
)
met_on_gpu(
    "<table>: device needs <n> bytes of GPU memory, <n> of <n> are free; use disk or pinned",
    UnavailableError,
    "device/places.py DeviceMemory.__init__",
    larger_than_memory,
)

# steps and captures


def twice_at_a_time(rig: Rig) -> None:
    ids = torch.zeros((1, HEADS), dtype=torch.int64, device=rig.device)
    out = torch.empty((1, HEADS, ROW_BYTES), dtype=torch.uint8, device=rig.device)
    stream = torch.cuda.current_stream().cuda_stream
    channel = rig.link.borrow(stream)
    for _ in range(2):
        channel.post(stream, ids, 1, None)
    for _ in range(2):
        channel.wait(stream)
        channel.take(stream, out, 1, Output(VOID))
    torch.cuda.synchronize()
    rig.link.give_back(channel, stream)
    rig.link.check()


def too_many_at_once(rig: Rig) -> None:
    outputs: Any = None  # a start has none
    ids = torch.zeros((rig.link.eager_tokens + 1, HEADS), dtype=torch.int64, device=rig.device)
    StreamedRows(rig.link, outputs, np.asarray).start(ids, None)


def too_many_captures(folder: Path) -> None:
    states = States(CUDA)
    while True:
        states.take()


def not_warmed_up(opened: RowStore) -> object:
    # a scale that nobody has asked for before
    outputs = Outputs(dataclasses.replace(opened.manifest, scale=0.375), "out")
    out = torch.empty((1, opened.row_values), dtype=torch.bfloat16, device=CUDA)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        out.zero_()  # torch warns of an empty graph
        return outputs.of(out)


met_on_gpu(
    "<table>: <n> void steps: <reason> (errno 5)",
    ReadError,
    "device/link.py DeviceLink.check",
    linked(twice_at_a_time),
)
met_on_gpu(
    "start takes at most <n> tokens, got <n>",
    ValueError,
    "device/streamed.py StreamedRows._start",
    linked(too_many_at_once),
)
met_on_gpu(
    "<n> lookups were captured since the last eager one: call warm_up() before the next capture",
    RuntimeError,
    "device/arena.py States.take",
    too_many_captures,
)
met_on_gpu(
    "lookup needs warm_up() with <dtype> before its first capture",
    RuntimeError,
    "device/outputs.py _lut",
    store(not_warmed_up),
)

# arguments


def three_heads(opened: RowStore) -> None:
    ids = torch.zeros((2, 3), dtype=torch.int64, device=CUDA)
    Lookup(opened)(ids, torch.empty((2, 3, opened.row_values), device=CUDA))


met_on_gpu(
    "ids on a GPU need a last axis of <n> heads, got shape <shape>",
    ValueError,
    "device/lookup.py Lookup._check_ids",
    store(three_heads),
)
met_on_gpu(
    "lookup needs fewer than <n> units of <n> bytes, got <n>",
    ValueError,
    "device/kernels.py Kernels.blocks",
    # refused before anything is launched: the addresses are none
    lambda folder: kernels(0).take(0, 16, 17, 16, 1 << 20, 16, 0, 16, 160, 0),
)
