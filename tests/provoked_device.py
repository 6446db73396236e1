"""What a device's lookups and ranks refuse, as far as a machine without a GPU can show it.

Where a GPU would have answered, the answer is put in its place; the rest is in provoked_gpu.py.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import raw_tables
from checkpoints import write_tiny
from provocations import Provoke, met
from provoked_reads import option
from rowstream import ReadError, RowStore, UnavailableError, _core
from rowstream.device import dequantize, driver, sync
from rowstream.device.addressed import AddressedTable
from rowstream.device.channel import Channel
from rowstream.device.hosted import HostedRows
from rowstream.device.link import DeviceLink
from rowstream.device.lookup import Lookup, LookupOptions
from rowstream.device.places import FileMappings
from rowstream.device.streamed import Sent, StreamedRows
from rowstream.engines.transformers import load_model
from rowstream.manifest import Manifest
from streams import Stream

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CHOICES = "<option> needs one of <choices>, got <value>"


def store(act: Callable[[RowStore], object], **options: Any) -> Provoke:
    def provoke(folder: Path) -> object:
        write_tiny(folder)
        with RowStore.open(folder, **options) as opened:
            return act(opened)

    return provoke


# ranks

met("world needs 1 or more, got <n>", ValueError, option(world=0))
met("rank needs to be in [0, <world>), got <n>", ValueError, option(rank=2, world=2))
met(CHOICES, ValueError, option(shard_by="columns"))
met(
    "row ids of a shard by heads need a last axis of <n> heads, got shape <shape>",
    ValueError,
    store(lambda opened: opened.gather([0, 1, 2]), world=2),
)
met(
    "row id <id> at position <n> is outside [0, <rows>)",
    IndexError,
    store(lambda opened: opened.gather([0, 1, 2, 64]), world=2),
)

# arguments of lookups


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def look_up(ids: torch.Tensor, out: torch.Tensor) -> Provoke:
    return store(lambda opened: Lookup(opened)(ids, out))


def reference(codec: str, scale: float | None, contract: str = "scaled") -> Provoke:
    return lambda folder: dequantize.reference(
        bytes_of(1, 4), codec, scale, torch.float32, contract
    )


def two_planes(opened: RowStore) -> object:
    def twice(manifest: Manifest) -> Manifest:
        return dataclasses.replace(manifest, planes=manifest.planes * 2)

    with RowStore(twice(opened.manifest)) as other:
        return AddressedTable(other, CUDA, "pinned")


IDS = torch.zeros((2, 4), dtype=torch.int64)
met("ids need int64 or int32, got <dtype>", TypeError, look_up(IDS.float(), bytes_of(2, 4, 6)))
met(
    "out needs shape <shape> on <device>, got <shape> on <device>",
    ValueError,
    look_up(IDS, bytes_of(2, 4, 7)),
    look_up(IDS, bytes_of(2, 4, 6).to("meta")),
)
met("out needs to be contiguous", ValueError, look_up(IDS, bytes_of(2, 4, 12)[..., ::2]))
met("<place> needs a table of one plane, got <n>", ValueError, store(two_planes))
met(
    CHOICES,
    ValueError,
    lambda folder: LookupOptions(place="ram"),
    store(lambda opened: AddressedTable(opened, CUDA, "ram")),
    lambda folder: sync.choose("bell", 0),
    lambda folder: dequantize.lut(1.0, torch.float32, "down"),
    reference("bf16", None, "floats"),
)
met(
    "dtype needs bfloat16, float16 or float32, got <dtype>",
    TypeError,
    lambda folder: dequantize.lut(1.0, torch.float64),
)
met("codec needs one of <codecs>, got <codec>", ValueError, reference("q4", None))
met("<codec> needs <a or no> scale, got <scale>", ValueError, reference("bf16", 1.0))

# channels


def loop(act: Callable[[_core.Loop], object], *faults: _core.Fault, **options: Any) -> Provoke:
    def provoke(folder: Path) -> object:
        raw = raw_tables.write(folder, np.random.default_rng(0))
        table = raw.open("inline-buffered", faults=list(faults))
        opened = _core.Loop(table, **{"groups": [8, 8], "read_timeout_s": 0.2, **options})
        try:
            return act(opened)
        finally:
            opened.close()

    return provoke


def nothing(opened: _core.Loop) -> None:
    """Refused before it is there."""


def unanswered(opened: _core.Loop) -> None:
    assert Stream(opened.add(_core.Arena(1 << 20), 16, 160)).step(np.zeros((1, 16), int)) is None
    opened.raise_failure()


met("io_spin needs one of auto, always, never, got '<value>'", ValueError, loop(nothing, spin="on"))
met("read_timeout_s is <s>, needs to be in (0, 86400]", ValueError, loop(nothing, read_timeout_s=0))
met("groups have no heads", ValueError, loop(nothing, groups=[]))
met(
    "channel for <n> rows needs <n> bytes, arena has <n> left; raise channel_bytes",
    UnavailableError,
    loop(lambda opened: opened.add(_core.Arena(1 << 20), 8192, 160)),
)
met(
    "rowstream channels: <n> bytes: <reason>",
    OSError,
    lambda folder: _core.Arena(1 << 60),
)
met(
    "table: no answer for <n> s (errno 110)",
    ReadError,
    loop(unanswered, _core.Fault(0, 99, delay_ms=-1)),
)

met(CHOICES, ValueError, lambda folder: LookupOptions(rounding="up"))
met(
    "live needs one int32 on <device>, got <dtype> of shape <shape> on <device>",
    ValueError,
    store(lambda opened: Lookup(opened)(IDS, bytes_of(2, 4, 6), torch.tensor([1.0]))),
    store(lambda opened: Lookup(opened)(IDS, bytes_of(2, 4, 6), torch.ones(2, dtype=torch.int32))),
)


def finished_twice(folder: Path) -> None:
    link: Any = SimpleNamespace()
    sent = Sent(link, 1, 0, captured=False, posted=link, done=True)
    StreamedRows(link, link, np.asarray).finish(sent, bytes_of(1, 4, 6))


def captured_in_vain(folder: Path) -> None:
    channel: Any = Channel.__new__(Channel)
    channel.core = SimpleNamespace(hold=lambda: 1, unhold=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "retain_in_graph", lambda *arguments: False)
        channel.belong_to_graph(0)


def finished_in_a_capture(folder: Path) -> None:
    link: Any = SimpleNamespace()
    sent = Sent(link, 1, 0, captured=False, posted=link)
    link.abandoned = lambda: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        StreamedRows(link, link, np.asarray).finish(sent, bytes_of(1, 4, 6))


def captured_first(opened: RowStore) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        Lookup(opened).path(torch.device("cuda", 1))


def borrowed_after_its_end(folder: Path) -> None:
    link = DeviceLink.__new__(DeviceLink)
    link._closed = True
    link.borrow(0)


met("a started lookup has one finish, this is another", RuntimeError, finished_twice)
met(
    "a started lookup needs its finish in the same capture, or both outside of one",
    RuntimeError,
    finished_in_a_capture,
)
met(
    "lookup needs warm_up() on <device> before its first capture",
    RuntimeError,
    store(captured_first),
)
met("table is closed", ValueError, borrowed_after_its_end)
met("captured lookup: the capture was invalidated before it", RuntimeError, captured_in_vain)

# the driver


def captured_without_a_link(folder: Path) -> None:
    rows = HostedRows(lambda ids, live, out: None, "torch 2.13.0 sees no GPU", "table")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        rows.run(torch.zeros(1), None, torch.zeros(1))


met("captured lookup: <reason>", UnavailableError, captured_without_a_link)


def without_bindings(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cuda.bindings", None)
        driver.bindings.__wrapped__()


class Result(enum.IntEnum):
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_LAUNCH_FAILED = 719


def call(code: Result, text: bytes) -> Provoke:
    def provoke(folder: Path) -> None:
        bindings = SimpleNamespace(cuGetErrorString=lambda code: (0, text))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver, "bindings", lambda: bindings)
            driver.check((code,), "cuStreamSynchronize")

    return provoke


def device(cuda: str | None, gpus: bool, capability: tuple[int, int] = (9, 0)) -> Provoke:
    """A mode to wait that is asked for by name, where torch and the driver are such."""

    def provoke(folder: Path) -> None:
        found = SimpleNamespace(name="GPU", compute_capability=capability)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.version, "cuda", cuda)
            patch.setattr(torch.cuda, "is_available", lambda: gpus)
            patch.setattr(driver, "bindings", lambda: SimpleNamespace(cuInit=lambda flags: (0,)))
            patch.setattr(driver, "attributes", lambda index: found)
            sync.choose("doorbell", 0)

    return provoke


def one_mode(folder: Path) -> None:
    probed = {"doorbell": "ok", "kernel": "no answer within 30 s", "hostnode": "ok"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "available", lambda device: (True, "1 x GPU"))
        patch.setattr(sync, "probed", lambda device: probed)
        sync.choose("kernel", 0)


met(
    "cuda-bindings needs to be installed (pip install 'rowstream[cuda]'): <reason>",
    UnavailableError,
    without_bindings,
)
TEXT = b"operation not supported"
for kind, code in zip((UnavailableError, RuntimeError), Result, strict=True):
    met("<call>: CUDA_ERROR_<name> (<reason>)", kind, call(code, TEXT))
    met("<call>: CUDA_ERROR_<name>", kind, call(code, b""))
met("torch <version> is built without CUDA", UnavailableError, device(None, False))
met("torch <version> sees no GPU", UnavailableError, device("13.0", False))
met(
    "<gpu>: the kernels need compute capability 7.0, it has <n>",
    UnavailableError,
    device("13.0", True, (6, 1)),
)
met(
    "sync '<mode>' does not work on cuda:<n>: <reason>; auto would choose '<mode>'",
    UnavailableError,
    one_mode,
)

# models that are not on a GPU


def loaded(**options: Any) -> Provoke:
    def provoke(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver, "available", lambda: (False, "torch 2.13.0 sees no GPU"))
            load_model(folder, **options)

    return provoke


met(
    "<option> needs a model on a GPU (device cuda), its device is <device>",
    UnavailableError,
    loaded(table_backend="device"),
    loaded(lookup=LookupOptions(sync="kernel"), device="cpu"),
)
met("<option> needs a GPU: <reason>", UnavailableError, loaded(table_backend="file", device="cuda"))

# files that a GPU reads by itself


def mapped(act: Callable[[FileMappings, Path], object], *, works: bool = True) -> Provoke:
    def map_files(opened: RowStore) -> None:
        found = SimpleNamespace(name="GPU", pageable_uses_host_page_tables=works)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver, "attributes", lambda index: found)
            place = FileMappings(opened, CPU)
        act(place, opened.manifest.files[0].path)
        place.check(captured=True)

    return store(map_files)


met(
    "<table>: file needs a GPU that uses the host's page tables, <gpu> does not; "
    "use disk or pinned",
    UnavailableError,
    mapped(lambda place, path: None, works=False),
)
met(
    "<file>: file changed since it was opened (errno 116)",
    ReadError,
    mapped(lambda place, path: os.utime(path, ns=(1, 1))),
)
met("<file>: <reason> (errno <n>)", ReadError, mapped(lambda place, path: path.unlink()))
