"""How ids become places of mapped files, and windows those of a device; the host stands for it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from rowstream.device import driver, places
from rowstream.errors import ReadError, UnavailableError
from rowstream.store import RowStore
from rowstream.synth import write_checkpoint

CPU = torch.device("cpu")


def attributes(works: bool) -> Any:
    return lambda index: SimpleNamespace(pageable_uses_host_page_tables=works, name="GPU")


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("layout", ["qwen", "radixark"])
def test_units_are_the_bytes_of_their_rows(
    dtype: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "checkpoint", base=1000, dtype=dtype, layout=layout)
    monkeypatch.setattr(driver, "attributes", attributes(True))
    with RowStore.open(tmp_path / "checkpoint") as store:
        place = places.FileMappings(store, CPU)
        n = store.num_rows
        firsts = [extent.first_row for extent in store.manifest.planes[0].extents]
        ids = np.concatenate(
            [
                firsts,
                np.array(firsts[1:]) - 1,
                np.random.default_rng(1).integers(0, n, 500),
                [n - 1],
            ]
        )
        units = place.units(torch.from_numpy(ids)[:, None])
        unit_bytes = store.row_bytes // units.per_row
        assert units.per_row == place.per_row
        assert int(units.ids.max()) < units.bound
        found = b"".join(
            ctypes.string_at(place.base + unit * unit_bytes, unit_bytes)
            for unit in units.ids.flatten().tolist()
        )
        assert found == store.gather(ids).tobytes()

        outside = [-1, -(2**40), n, n + 77, 2**51]
        for kind in (torch.int64, torch.int32):
            some = [i for i in outside if kind == torch.int64 or abs(i) < 2**31]
            there = place.units(torch.tensor(some, dtype=kind)[:, None]).ids
            for row, of_row in zip(some, there.reshape(len(some), -1).tolist(), strict=True):
                if row < 0:
                    assert max(of_row) < 0
                else:
                    assert min(of_row) >= units.bound
                    assert {places.row_of(unit) for unit in of_row} == {row}


def test_files_that_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "checkpoint", base=1000)
    monkeypatch.setattr(driver, "attributes", attributes(True))
    with RowStore.open(tmp_path / "checkpoint") as store:
        place = places.FileMappings(store, CPU)
        path = store.manifest.files[0].path
        path.write_bytes(path.read_bytes()[:-1])
        place.check(captured=False)  # looked at a moment ago
        with pytest.raises(ReadError, match="file changed"):
            place.check(captured=True)
        path.unlink()
        with pytest.raises(ReadError, match="No such file"):
            place.check(captured=True)


def test_a_gpu_without_the_hosts_page_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "checkpoint", base=1000)
    monkeypatch.setattr(driver, "attributes", attributes(False))
    with (
        RowStore.open(tmp_path / "checkpoint") as store,
        pytest.raises(UnavailableError, match=r"GPU does not; use disk or pinned"),
    ):
        places.FileMappings(store, CPU)


class HostStream:
    cuda_stream = 0

    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record(self, stream: HostStream) -> None:
        pass


@pytest.mark.parametrize("near", [False, True], ids=["far", "near"])
def test_windows_bring_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, near: bool
) -> None:
    write_checkpoint(tmp_path / "checkpoint", base=1000)
    pinned: set[int] = set()
    events: list[Any] = []
    # memory at so low an address that row 0 would lie before all addresses
    room = np.zeros(5_000_000, np.uint8)
    low = 4096
    start = room.ctypes.data if near else 0

    def pin(address: int, num_bytes: int) -> int:
        pinned.add(address)
        return address

    def copy(stream: int, to: int, source: int, num_bytes: int) -> None:
        assert 0 <= to < 1 << 64
        events.append("copy")
        if near:
            assert low <= to <= low + room.nbytes - num_bytes
            to += start - low
        ctypes.memmove(to, source, num_bytes)

    monkeypatch.setattr(driver, "pin", pin)
    monkeypatch.setattr(driver, "unpin", pinned.remove)
    monkeypatch.setattr(driver, "copy_async", copy)
    monkeypatch.setattr(torch.cuda, "Stream", HostStream)
    monkeypatch.setattr(torch.cuda, "Event", HostStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(HostStream, "wait_stream", lambda self, other: events.append(other))
    monkeypatch.setattr(places, "_WINDOW_BYTES", 33_333)
    monkeypatch.setattr(places, "_TELL_EVERY_S", 0.0)
    told: list[tuple[int, int]] = []
    with RowStore.open(tmp_path / "checkpoint", rank=1, world=3, shard_by="rows") as store:
        with monkeypatch.context() as patch:
            if near:
                memory = SimpleNamespace(data_ptr=lambda: low)
                patch.setattr(torch, "empty", lambda *size, **options: memory)
            place = places.DeviceMemory(store, CPU, lambda *counts: told.append(counts))
        rows = store.owned.rows
        assert (rows.start * 160 > low) or not near
        first = (place.base + rows.start * 160) % (1 << 64)
        assert first == low or not near
        found = ctypes.string_at(start or first, len(rows) * 160)
        assert found == store.gather(np.array(rows)).tobytes()
        assert place.num_bytes == len(found)
    assert told[-1] == (len(found), len(found))
    assert len(told) == -(-len(rows) // (33_333 // 160))
    # what used that memory before has ended
    assert events == ["current"] + ["copy"] * len(told)
    assert not pinned
