"""Captured steps that look rows up and judge on the GPU what came: right, void or wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gpu.words import new_stream
from rowstream import _core
from rowstream.device.channel import Channel, Output
from rowstream.device.link import DeviceLink

ROW_BYTES, HEADS, GROUPS = 160, 16, [8, 8]
VOID = 0x7F


@dataclass
class Step:
    """One captured step; replaying it moves its ids on and counts what came."""

    graph: torch.cuda.CUDAGraph
    stream: torch.cuda.Stream
    counts: torch.Tensor  # int64[3]: right, void, wrong
    kept: tuple[torch.Tensor, ...]  # a graph holds addresses, not tensors
    gate: Callable[[], None] | None = None  # before each replay

    def replay(self) -> None:
        if self.gate is not None:
            self.gate()
        with torch.cuda.stream(self.stream):
            self.graph.replay()

    @property
    def right_void_wrong(self) -> tuple[int, int, int]:
        right, void, wrong = self.counts.tolist()
        return right, void, wrong


class Rig:
    """A table of random bytes in a file and on the GPU, and a link to it."""

    def __init__(
        self,
        folder: Path,
        sync: str,
        *,
        rows: int = 50_021,
        faults: Sequence[_core.Fault] = (),
        reader: str = "uring",
        read_timeout_s: float = 1.0,
        **options: object,
    ) -> None:
        rng = np.random.default_rng()
        # no row is all void bytes
        table = rng.integers(0, 256, (rows, ROW_BYTES), dtype=np.uint8)
        path = folder / "rows.bin"
        path.write_bytes(bytes(1000) + table.tobytes())
        self.rows = rows
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.table = torch.from_numpy(table).to(self.device)
        self.native = _core.DiskTable(
            [str(path)],
            [(ROW_BYTES, [(0, 1000, 0, rows)])],
            reader=reader,
            read_timeout_s=read_timeout_s,
            faults=list(faults),
        )
        self.link = DeviceLink(
            self.native,
            device=self.device,
            row_bytes=ROW_BYTES,
            groups=GROUPS,
            sync=sync,
            read_timeout_s=read_timeout_s,
            **options,  # type: ignore[arg-type]
        )

    def expected(self, ids: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        tokens = torch.arange(ids.shape[0], device=self.device)[:, None]
        there = (ids >= 0) & (tokens < live)
        return torch.where(there[..., None], self.table[ids.clamp(min=0)], 0)

    def judge(
        self, ids: torch.Tensor, live: torch.Tensor, out: torch.Tensor, counts: torch.Tensor
    ) -> None:
        right = (out == self.expected(ids, live)).all()
        void = (out == VOID).all()
        counts.add_(torch.stack([right, void & ~right, ~void & ~right]))

    def capture(self, tokens: int, *, padded: bool = False) -> Step:
        """A step of so many tokens; its ids are made on the device, some of them -1."""
        device = self.device
        counter = torch.randint(self.rows, (tokens, HEADS), device=device)
        live = torch.full((), tokens, dtype=torch.int32, device=device)
        out = torch.empty((tokens, HEADS, ROW_BYTES), dtype=torch.uint8, device=device)
        counts = torch.zeros(3, dtype=torch.int64, device=device)
        channels: list[Channel] = []

        def step(lookup: bool) -> None:
            counter.add_(7919).remainder_(self.rows)
            ids = torch.where(counter % 13 == 0, -1, counter)
            if padded:
                live.add_(1).remainder_(tokens + 1)
            out.fill_(0xEE)
            if lookup:
                stream = torch.cuda.current_stream().cuda_stream
                channels.append(self.link.for_graph(stream, tokens))
                channels[-1].post(stream, ids, tokens, live if padded else None)
                channels[-1].wait(stream)
                channels[-1].take(stream, out, tokens, Output(VOID))
            self.judge(ids, live, out, counts)

        stream = new_stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            step(lookup=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step(lookup=True)
        torch.cuda.synchronize()
        counts.zero_()
        torch.cuda.synchronize()
        gate = None
        if self.link.sync == "gate":
            channel = channels[0]

            def gate() -> None:
                # what an engine does whose tokens are on the host: here they are read back
                torch.cuda.synchronize()
                ids = (counter + 7919).remainder(self.rows)
                ids = torch.where(ids % 13 == 0, -1, ids)
                if padded:
                    ids[int((int(live) + 1) % (tokens + 1)) :] = -1
                self.link.fill(channel, ids.cpu().numpy())

        return Step(graph, stream, counts, (counter, live, out), gate)
