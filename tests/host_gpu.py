"""A GPU that the host plays: kernels compiled by g++, the real loop, and streams that run at once.

What is queued, captured or overtaken on a GPU is shown by tests/gpu alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from host_kernels import on_host
from raw_tables import RawTable
from rowstream.device import arena, channel, driver, link
from rowstream.device.kernels import Kernels
from rowstream.device.link import DeviceLink
from rowstream.device.outputs import Outputs
from rowstream.device.streamed import StreamedRows

__all__ = ["GPU", "HEADS", "ROW_BYTES", "SYNCS", "HostGpu", "empty", "host_gpu", "ids_of"]

HEADS, ROW_BYTES = 16, 160
SYNCS = ["doorbell", "kernel", "hostnode", "gate"]
GPU = torch.device("cuda", 0)
_PATIENCE_S = 60


class FakeEvent:
    def record(self, stream: Any = None) -> None:
        self.recorded = True

    def synchronize(self) -> None: ...


class FakeStream:
    cuda_stream = 7
    device = GPU

    def __init__(self, *arguments: Any) -> None: ...

    def wait_event(self, event: FakeEvent) -> None:
        assert isinstance(event, FakeEvent)


class FakeStates:
    def refill(self) -> None: ...

    def take(self) -> torch.Tensor:
        return torch.zeros(8, dtype=torch.int64)


class HostGpu:
    """What the host's GPU is like at the moment, and the tables that are linked to it."""

    def __init__(self, raw: RawTable, kernels: Kernels) -> None:
        self.raw = raw
        self.capturing = False
        self.full = False  # none of its memory is left
        self.failed = False  # it refuses all, as after a kernel that failed
        self.current = 0  # torch's device
        self.context: int | None = 0  # the calling thread's
        self.called: list[int] = []  # host functions
        self.opened: list[StreamedRows] = []
        self._kernels = kernels
        self._graphs: list[tuple[int, int]] = []
        self._empty = torch.empty

    def open(
        self, sync: str, faults: Any = (), device: torch.device = GPU, **options: Any
    ) -> StreamedRows:
        """Link a table to it."""
        raw = self.raw
        table = raw.open("uring-direct", faults=list(faults)) if faults else raw.open("loaded")
        made = DeviceLink(
            table,
            device=device,
            row_bytes=ROW_BYTES,
            groups=[8, 8],
            sync=sync,
            **{"channel_bytes": 1 << 20, "read_timeout_s": _PATIENCE_S, **options},
        )
        manifest: Any = SimpleNamespace(codec="bf16", scale=None, row_bytes=ROW_BYTES)
        self.opened.append(StreamedRows(made, Outputs(manifest, "out"), np.asarray))
        return self.opened[-1]

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self.capturing = True
        yield
        self.capturing = False

    def destroy_graphs(self) -> None:
        while self._graphs:
            call(*self._graphs.pop())

    # --- the driver and torch -------------------------------------------------------------------

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def use_primary_context(self, index: int) -> None:
        assert self.current == index, "stays current in the caller"
        self.context = index

    def kernels(self, index: int) -> Kernels:
        assert self.context == self.current == index
        return self._kernels

    def pin(self, address: int, num_bytes: int) -> int:
        assert self.context is not None
        return address

    def wait_and_reset(self, stream: int, flag: int) -> None:
        word = ctypes.c_uint32.from_address(flag)
        until = time.monotonic() + _PATIENCE_S
        while word.value < 1:
            assert time.monotonic() < until, "a wait that nobody ends"
            time.sleep(0)
        word.value = 0

    def host_function(self, stream: int, function: int, argument: int) -> None:
        if self.failed:
            raise RuntimeError("cuLaunchHostFunc: CUDA_ERROR_LAUNCH_FAILED")
        self.called.append(function)
        call(function, argument)

    def retain_in_graph(self, stream: int, destructor: int, argument: int) -> bool:
        if self.capturing:
            self._graphs.append((destructor, argument))
        return self.capturing

    def empty(self, *arguments: Any, **named: Any) -> torch.Tensor:
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._empty(*arguments, **named)


def call(function: int, argument: int) -> None:
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)


@contextlib.contextmanager
def host_gpu(raw: RawTable, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostGpu]:
    """Have the host play the GPU; what was linked to it is closed in the end."""
    with on_host() as compiled:
        gpu = HostGpu(raw, compiled)
        for name, fake in {
            "current_stream": lambda device=None: FakeStream(),
            "current_device": lambda: gpu.current,
            "device": gpu.device,
            "is_current_stream_capturing": lambda: gpu.capturing,
            "Event": FakeEvent,
            "Stream": FakeStream,
            "ExternalStream": FakeStream,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch, "empty", gpu.empty)
        for name in (
            "host_function",
            "pin",
            "retain_in_graph",
            "use_primary_context",
            "wait_and_reset",
        ):
            monkeypatch.setattr(driver, name, getattr(gpu, name))
        monkeypatch.setattr(driver, "unpin", lambda address: None)
        monkeypatch.setattr(link, "kernels", gpu.kernels)
        monkeypatch.setattr(link, "_cpus_near", lambda device: [])
        monkeypatch.setattr(arena, "_orphans", [])
        for module in (link, channel):
            monkeypatch.setattr(module, "states", lambda device: FakeStates())
        yield gpu
        for rows in gpu.opened:
            rows.close()


def ids_of(raw: RawTable, rng: np.random.Generator, tokens: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-1, raw.num_rows, (tokens, HEADS)))


def empty(tokens: int) -> torch.Tensor:
    return torch.full((tokens, HEADS, ROW_BYTES), 0xEE, dtype=torch.uint8)
