"""Tries one way to wait on one GPU and prints "ok" or why not: python -m rowstream.device.probe.

Runs in a process of its own, which whoever started it kills when it says nothing: see sync.py.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from rowstream import _core
from rowstream.device import dequantize
from rowstream.device.channel import Output
from rowstream.device.link import DeviceLink

_ROWS, _ROW_BYTES, _HEADS, _TOKENS = 997, 32, 4, 8
_REPLAYS = 64  # in batches of 8 that nobody waits for


@contextlib.contextmanager
def _table() -> Iterator[tuple[_core.DiskTable, torch.Tensor]]:
    rows = np.random.default_rng().integers(0, 256, (_ROWS, _ROW_BYTES), dtype=np.uint8)
    with tempfile.TemporaryDirectory(prefix="rowstream-probe-") as folder:
        path = Path(folder) / "rows.bin"
        path.write_bytes(rows.tobytes())
        planes = [(_ROW_BYTES, [(0, 0, 0, _ROWS)])]
        yield _core.DiskTable([str(path)], planes, reader="inline"), torch.from_numpy(rows)


def _try(mode: str, device: torch.device) -> str:
    torch.cuda.set_device(device)
    with _table() as (table, rows):
        link = DeviceLink(
            table,
            device=device,
            row_bytes=_ROW_BYTES,
            groups=[_HEADS],
            sync=mode,
            channel_bytes=1 << 20,
            read_timeout_s=2.0,
        )
        whole = rows.to(device)
        ids = torch.randint(_ROWS, (_TOKENS, _HEADS), device=device)
        out = torch.empty((_TOKENS, _HEADS, _ROW_BYTES), dtype=torch.uint8, device=device)
        wrong = torch.zeros(1, dtype=torch.int64, device=device)
        output = Output(dequantize.void_byte("bf16"))

        def step() -> None:
            ids.add_(7).remainder_(_ROWS)
            wrong.add_((whole[ids] != out).sum())

        step()  # every kernel has run before the first wait
        torch.cuda.synchronize(device)
        wrong.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ids.add_(7).remainder_(_ROWS)
            out.fill_(0xEE)
            stream = torch.cuda.current_stream(device).cuda_stream
            channel = link.for_graph(stream, _TOKENS)
            channel.post(stream, ids, _TOKENS, None)
            channel.wait(stream)
            channel.take(stream, out, _TOKENS, output)
            wrong.add_((whole[ids] != out).sum())
        for replay in range(_REPLAYS):
            graph.replay()
            if replay % 8 == 7:
                torch.cuda.synchronize(device)
        link.check()
        if int(wrong) > 0:
            return f"{int(wrong)} wrong bytes in {_REPLAYS} steps"
        rings = link.stats()["rings"]
        return "ok" if rings == _REPLAYS else f"{rings} rings of {_REPLAYS} were seen"


def main() -> int:
    """Print one line; the exit status is 0 where the mode was tried at all."""
    mode, device = sys.argv[1], torch.device("cuda", int(sys.argv[2]))
    try:
        line = _try(mode, device)
    except Exception as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())
    print(line, flush=True)
    sys.stdout.flush()
    os._exit(0)  # a stream may still wait


if __name__ == "__main__":
    sys.exit(main())
