"""What a lookup asks of its paths to a GPU, which are faked: as far as it is Python's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from checkpoints import TINY_WIDTH
from lookup_tables import (
    HEADS,
    empty,
    expected,
    rounded,
    same,
    some_ids,
    stored,
    write,
)
from rowstream import RowStore
from rowstream.device import driver
from rowstream.device import lookup as lookups
from rowstream.device.addressed import AddressedTable
from rowstream.device.channel import Output
from rowstream.device.embedding import StreamedEmbedding
from rowstream.device.lookup import Lookup, LookupOptions, Started
from rowstream.device.outputs import Outputs
from rowstream.device.streamed import StreamedRows
from rowstream.errors import UnavailableError


@pytest.fixture
def fp8(tmp_path: Path) -> Iterator[RowStore]:
    write(tmp_path, "fp8_e4m3")
    with RowStore.open(tmp_path) as store:
        yield store


# and whether their graphs are still there
GATES = [("first", True), ("gone", False), ("last", True)]


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says otherwise."""

    is_cuda = True


class FakeRows(StreamedRows):
    """A path that writes down what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.gates: list[Any] = [
            SimpleNamespace(in_a_graph=there, name=name) for name, there in GATES
        ]

    def run(self, ids: Any, live: Any, out: Any) -> None:
        self.calls.append(("run", ids.tolist(), live, out))

    def start(self, ids: Any, live: Any) -> Any:
        self.calls.append(("start", ids.tolist(), live))
        return "sent"

    def finish(self, sent: Any, out: Any) -> None:
        self.calls.append(("finish", sent, out))

    def check(self) -> None:
        self.calls.append("check")

    def kick(self) -> None:
        self.calls.append("kick")

    def stats(self) -> dict[str, Any]:
        return {"sync": "kernel"}

    def close(self) -> None:
        self.calls.append("close")


class FakeTable(AddressedTable):
    """A table that writes down what it is asked for, and gives ones."""

    def __init__(self, *arguments: Any) -> None:
        self.made_of = arguments
        self.calls: list[Any] = []

    def rows(self, stream: int, ids: Any, tokens: int, live: Any, out: Any, output: Output) -> None:
        self.calls.append((stream, ids.tolist(), tokens, live, output))
        out.view(torch.uint8).fill_(1)

    def check(self) -> None:
        self.calls.append("check")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Have links and tables made of nothing; the arguments of links are returned."""
    links: list[dict[str, Any]] = []

    def link(native: Any, **options: Any) -> Any:
        links.append({"native": native, **options})
        return SimpleNamespace(gates=[])

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(driver, "available", lambda device: (True, "one GPU"))
    monkeypatch.setattr(lookups, "DeviceLink", link)
    monkeypatch.setattr(lookups, "AddressedTable", FakeTable)
    monkeypatch.setattr(lookups, "choose", lambda sync, index: (sync, f"probed cuda:{index}"))
    return links


def test_a_streamed_lookup_goes_to_its_path(fp8: RowStore, gpu: list[dict[str, Any]]) -> None:
    look = Lookup(fp8)
    path = look._paths[1] = FakeRows()
    ids = torch.from_numpy(some_ids(3)).as_subclass(OnGpu)
    out = empty(ids.shape, TINY_WIDTH)
    look(ids, out, live := torch.tensor([2], dtype=torch.int32))
    started = look.start(ids)
    look.finish(started, out)
    look.kick()
    look.check()
    look.sync_reason = "asked for"
    assert look.stats() == {"cuda:1": {"sync": "kernel", "sync_reason": "asked for"}}
    look.close()
    gates: list[Any] = look.gates
    assert [gate.name for gate in gates] == ["first", "last"]
    assert path.calls == [
        ("run", ids.tolist(), live, out),
        ("start", ids.tolist(), None),
        ("finish", "sent", out),
        *("kick", "check", "check", "close"),
    ]
    for wrong in (torch.zeros((3, 5), dtype=torch.int64), torch.tensor(1)):
        with pytest.raises(ValueError, match="ids on a GPU need a last axis of 4 heads, got shape"):
            look.start(wrong.as_subclass(OnGpu))
    with pytest.raises(ValueError, match="out needs shape"):
        look.finish(started, empty((2, HEADS), TINY_WIDTH))


def test_a_module_passes_the_tokens_that_count(fp8: RowStore, gpu: list[dict[str, Any]]) -> None:
    module = StreamedEmbedding(fp8, torch.float16)
    path = module.lookup._paths[1] = FakeRows()
    ids = torch.from_numpy(some_ids(3)).as_subclass(OnGpu)
    values = module(ids, live := torch.tensor([2], dtype=torch.int32))
    ((name, given, count, out),) = path.calls
    assert (name, given) == ("run", ids.tolist())
    assert count is live
    assert out is values
    assert (values.dtype, values.shape) == (torch.float16, (3, HEADS, TINY_WIDTH))


def test_ids_of_other_ranks_are_hidden_from_a_link(
    tmp_path: Path, gpu: list[dict[str, Any]]
) -> None:
    write(tmp_path, "fp8_e4m3")
    ids = torch.tensor([[0, 31, 32, 63], [64, 99, -1, 40]])
    for by, wanted in (
        ("rows", [[-1, -1, 32, 63], [64, 99, -1, 40]]),  # those past the table stay, to be told
        ("heads", ids.tolist()),  # the link has the columns that are its own
    ):
        with RowStore.open(tmp_path, rank=1, world=2, shard_by=by) as store:
            look = Lookup(store)
            path = look._paths[1] = FakeRows()
            look.start(ids.as_subclass(OnGpu))
            assert path.calls == [("start", wanted, None)]


def test_a_rank_without_heads_asks_nobody(tmp_path: Path, gpu: list[dict[str, Any]]) -> None:
    write(tmp_path, "fp8_e4m3")
    ids = torch.from_numpy(some_ids(3)).as_subclass(OnGpu)
    with RowStore.open(tmp_path, rank=4, world=5) as store:
        look = Lookup(store)
        for out in (empty(ids.shape, TINY_WIDTH), empty(ids.shape, TINY_WIDTH, torch.float32)):
            look(ids, out)
            assert not out.any()
            out.fill_(7)
            look.finish(look.start(ids), out)
            assert not out.any()
    assert gpu == []


def test_nothing_is_staged_for_a_gpu_that_has_the_table(fp8: RowStore) -> None:
    look = Lookup(fp8, LookupOptions(place="device"))
    with look.stage([(None, [3, 1, 4])]) as ticket:
        assert ticket.progress() == (0, 0, True)
    assert fp8.stats()["lookahead_reads"] == 0


@pytest.mark.parametrize(
    ("backend", "place", "kind"),
    [("disk", "auto", None), ("pinned", "auto", "pinned"), ("pinned", "streamed", None),
     ("disk", "device", "device"), ("disk", "file", "file"), ("mmap", "auto", None)],
)  # fmt: skip
def test_a_path_is_made_once_by_the_place(
    tmp_path: Path, gpu: list[dict[str, Any]], backend: str, place: str, kind: str | None
) -> None:
    write(tmp_path, "fp8_e4m3")
    with RowStore.open(tmp_path, backend=backend, rank=1, world=2) as store:
        look = Lookup(store, LookupOptions(place=place, sync="kernel", channel_bytes=1 << 20))
        path = look.path(torch.device("cuda"))
        assert look.path(torch.device("cuda", 1)) is path
        assert look.path(torch.device("cuda", 0)) is not path
        if kind is None:
            assert isinstance(path, StreamedRows)
            assert [link["device"].index for link in gpu] == [1, 0]
            assert gpu[0]["native"] is store.native
            assert gpu[0]["sync"] == "kernel"
            assert gpu[0]["channel_bytes"] == 1 << 20
            assert gpu[0]["owned"] == (1, 3)
            assert gpu[0]["row_bytes"] == TINY_WIDTH
            assert look.sync_reason == "probed cuda:0"
        else:
            assert isinstance(path, FakeTable)
            assert path.made_of == (store, torch.device("cuda", 1), kind)
            assert gpu == []


@pytest.mark.parametrize("codec", ["fp8_e4m3", "bf16"])
def test_an_addressed_table_is_asked_for_what_it_can_give(
    tmp_path: Path, gpu: list[dict[str, Any]], codec: str
) -> None:
    write(tmp_path, codec)
    with RowStore.open(tmp_path) as store:
        look = Lookup(store, LookupOptions(place="device", rounding="f32"))
        table = look._paths[1] = FakeTable()
        ids = torch.from_numpy(some_ids(2, 3)).as_subclass(OnGpu)
        out = empty(ids.shape, TINY_WIDTH, torch.float16)
        look(ids, out)
        (stream, given, tokens, live, output) = table.calls.pop()
        assert (stream, given, tokens, live) == (5, ids.tolist(), 6, None)
        ones = stored(np.full(store.row_bytes, 1, np.uint8), codec)
        if codec == "fp8_e4m3":
            # straight into the output, by a table of what codes are worth
            assert (output.value_bytes, output.void_value) == (2, 0x7E00)
            codes = np.arange(256, dtype=np.uint8)
            assert same(output.lut.view(torch.float16), expected(codes, codec, "float16", "f32"))
            assert (out.view(torch.int16) == 0x0101).all()
        else:
            # bytes into room of their own, and torch's conversion
            assert (output.value_bytes, output.void_value, output.lut) == (1, 0xFF, None)
            assert same(out, np.broadcast_to(rounded(ones, "float16"), out.shape))
        raw = empty(ids.shape, store.row_bytes)
        look.finish(Started(None, ids, None), raw)
        assert table.calls.pop()[-1] == Output(0x7F if codec == "fp8_e4m3" else 0xFF)
        assert (raw == 1).all()
        assert look.start(ids) == Started(None, ids, None)
        look.warm_up(torch.device("cpu"), [torch.float32])
        assert table.calls == ["check"]


def test_a_table_of_codes_is_made_before_a_capture(
    fp8: RowStore,
    gpu: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs = Outputs(fp8.manifest, "out")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr("rowstream.device.outputs._luts", {})
    with pytest.raises(RuntimeError, match=r"warm_up\(\) with torch.bfloat16"):
        outputs.of(torch.empty(1, dtype=torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made = outputs.of(torch.empty(1, dtype=torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    # and kept for good, for every table of that scale
    assert outputs.of(torch.empty(9, dtype=torch.bfloat16)) is made
    other = Outputs(fp8.manifest, "out").of(torch.empty(1, dtype=torch.bfloat16))
    assert other.lut_address == made.lut_address != 0


def test_what_a_path_cannot_be_made_of_is_tried_again(
    fp8: RowStore,
    gpu: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(wanted: str, index: int) -> Any:
        raise UnavailableError("no GPU")

    look = Lookup(fp8)
    with monkeypatch.context() as patch:
        patch.setattr(lookups, "choose", refuse)
        with pytest.raises(UnavailableError):
            look.path(torch.device("cuda", 0))
    assert isinstance(look.path(torch.device("cuda", 0)), StreamedRows)


def test_a_gpu_that_cannot_be_linked_is_served_by_the_host(
    fp8: RowStore, gpu: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "available", lambda device: (False, "no driver for it"))
    look = Lookup(fp8)
    ids = torch.from_numpy(some_ids(3)).as_subclass(OnGpu)
    out, expected = empty(ids.shape, TINY_WIDTH), empty(ids.shape, TINY_WIDTH)
    look(ids, out)
    look.finish(look.start(ids), other := empty(ids.shape, TINY_WIDTH))
    look(torch.tensor(ids.tolist()), expected)
    assert torch.equal(out, expected)
    assert torch.equal(other, expected)
    assert not gpu
    assert look.stats() == {"cuda:1": {"sync": "host", "sync_reason": "no driver for it"}}
    look.check()
    look.close()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnavailableError, match="captured lookup: no driver for it"):
        look(ids, out)
