"""Tables in memory that a GPU addresses, where the host's addresses stand for the device's."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from checkpoints import write_tiny
from rowstream.device import driver, places
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
    assert np.iinfo(np.int64).max > place.base >= 0
