"""Tables in memory that a GPU addresses, where the host's addresses stand for the device's."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from checkpoints import write_tiny
from rowstream.device import addressed, driver, places
from rowstream.device.addressed import AddressedTable
from rowstream.device.channel import Output
from rowstream.errors import UnavailableError
from rowstream.store import RowStore


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses that are registered with a driver which maps them to themselves."""
    found: list[int] = []

    def pin(address: int, num_bytes: int) -> int:
        assert address not in found
        found.append(address)
        return address

    monkeypatch.setattr(driver, "pin", pin)
    monkeypatch.setattr(driver, "unpin", found.remove)
    of_device = SimpleNamespace(cuMemHostGetDevicePointer=lambda address, flags: (0, address))
    monkeypatch.setattr(driver, "bindings", lambda: of_device)
    return found


@pytest.mark.parametrize("backend", ["pinned", "disk"])
def test_a_pinned_table_is_registered_once_for_all_that_use_it(
    tmp_path: Path, pinned: list[int], backend: str
) -> None:
    table = write_tiny(tmp_path)
    with RowStore.open(tmp_path, backend=backend) as store:
        place = places.PinnedMemory(store, None)
        second = places.PinnedMemory(store, None)
        # a store of another backend is read anew for each; its own memory is there once
        assert len(pinned) == (1 if backend == "pinned" else 2)
        assert (place.base == second.base) == (backend == "pinned")
        second.free()
        assert pinned == [place.base]
        store.close()
        assert ctypes.string_at(place.base, table.nbytes) == table.tobytes()
        ids = torch.arange(3)[:, None]
        units = place.units(ids)
        assert units.ids is ids
        assert (units.per_row, units.bound) == (1, len(table))
        place.check(captured=True)
        place.free()
    assert pinned == []


def test_a_gpu_without_room_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path)

    def full(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    with RowStore.open(tmp_path) as store:
        monkeypatch.setattr(torch, "empty", full)
        with pytest.raises(UnavailableError, match=r"needs 384 bytes of GPU memory, 100 of 1000"):
            places.DeviceMemory(store, torch.device("cpu"), None)


def test_a_rank_beyond_the_rows_holds_nothing(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    with RowStore.open(tmp_path, rank=99, world=100, shard_by="rows") as store:
        place = places.DeviceMemory(store, torch.device("cpu"), None)
        assert place.num_bytes == 0
        place.free()
    assert 1 << 64 > place.base >= 0


def test_a_table_may_end_while_the_next_one_is_registered(
    tmp_path: Path, pinned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path)
    with RowStore.open(tmp_path) as store:
        first = places.PinnedMemory(store, None)
        pin = driver.pin

        def collecting(address: int, num_bytes: int) -> int:
            first.free()  # as a collection would in this thread
            return pin(address, num_bytes)

        monkeypatch.setattr(driver, "pin", collecting)
        second = places.PinnedMemory(store, None)
        assert pinned == [second.base]
        second.free()
    assert pinned == []


# --- tables that are collected ----------------------------------------------------------------

GPU = torch.device("cuda", 0)


class Device:
    """What a table asks of its GPU while it is made, looked up and freed."""

    def __init__(self, pinned: list[int]) -> None:
        self.pinned = pinned
        self.capturing = False
        self.current: int | None = None  # torch's device
        self.synchronized: list[int] = []  # how much was pinned then

    @contextlib.contextmanager
    def guard(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def on_current(self, index: int) -> Any:
        assert index == self.current, "stays current in the caller"
        return SimpleNamespace(rows=lambda *arguments: None)

    def synchronize(self, device: torch.device) -> None:
        assert device == GPU
        assert not self.capturing
        self.synchronized.append(len(self.pinned))


@pytest.fixture
def device(pinned: list[int], monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device(pinned)
    monkeypatch.setattr(addressed, "kernels", made.on_current)
    monkeypatch.setattr(addressed, "_KEPT", [])
    monkeypatch.setattr(places, "_registered", {})
    monkeypatch.setattr(driver, "use_primary_context", made.on_current)
    monkeypatch.setattr(torch.cuda, "device", made.guard)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return made


@pytest.mark.parametrize("closed", [True, False])
def test_a_table_that_nobody_has_is_given_back(
    tmp_path: Path, device: Device, closed: bool
) -> None:
    write_tiny(tmp_path)
    with RowStore.open(tmp_path, backend="pinned") as store:
        table = AddressedTable(store, GPU, "pinned")
        other = AddressedTable(store, GPU, "pinned")
        if closed:
            table.close()
            table.close()
        del table
        # once, with the memory still registered, and the other table has it still
        assert device.synchronized == [1]
        assert len(device.pinned) == 1
        del other
        assert device.synchronized == [1, 1]
    assert device.pinned == []
    assert places._registered == {}


def test_a_table_that_ends_in_a_capture_is_given_back_later(tmp_path: Path, device: Device) -> None:
    write_tiny(tmp_path)
    with RowStore.open(tmp_path) as store:
        table = AddressedTable(store, GPU, "pinned")
        device.capturing = True
        del table
        assert (len(device.pinned), device.synchronized) == (1, [])
        device.capturing = False
        later = AddressedTable(store, GPU, "pinned")
        assert (len(device.pinned), device.synchronized) == (1, [1])
        later.close()
    assert device.pinned == []


@pytest.mark.parametrize("closed", [True, False])
def test_what_a_graph_reads_is_never_given_back(
    tmp_path: Path, device: Device, closed: bool
) -> None:
    write_tiny(tmp_path)
    with RowStore.open(tmp_path, backend="pinned") as store:
        table = AddressedTable(store, GPU, "pinned")
        device.capturing = True
        ids = torch.zeros((1, store.heads), dtype=torch.int64)
        out = torch.empty((1, store.heads, store.row_bytes), dtype=torch.uint8)
        table.rows(5, ids, 1, None, out, Output(0))
        device.capturing = False
        if closed:
            table.close()
        end = table._end
        del table
        assert end.alive
        assert not end.atexit
        assert (len(device.pinned), device.synchronized) == (1, [])
        end.detach()


def test_a_table_that_cannot_be_made_is_not_left_registered(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    write_tiny(tmp_path)
    with RowStore.open(tmp_path, backend="pinned") as store:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "pin_memory", full)
            for _ in range(2):
                with pytest.raises(torch.OutOfMemoryError):
                    AddressedTable(store, GPU, "pinned")
        assert device.pinned == []
        assert places._registered == {}
        AddressedTable(store, GPU, "pinned").close()
    assert device.pinned == []


def test_a_forked_child_leaves_it_to_its_parent(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path)
    with RowStore.open(tmp_path, backend="pinned") as store:
        table = AddressedTable(store, GPU, "pinned")
        monkeypatch.setattr(os, "getpid", lambda: -1)
        del table
        assert (len(device.pinned), device.synchronized) == (1, [])
