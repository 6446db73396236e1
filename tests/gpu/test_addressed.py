"""Whole tables that the GPU addresses, against the disk backend's gathers and NumPy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from gpu.words import POISON, on_device, poisoned
from rowstream.device import driver, places
from rowstream.device.addressed import ADDRESSED, AddressedTable
from rowstream.device.channel import Output
from rowstream.device.dequantize import lut, reference, void_bits, void_byte
from rowstream.errors import ReadError, UnavailableError
from rowstream.store import RowStore
from rowstream.synth import write_checkpoint

TOKENS = 60
EVERYWHERE = [(kind, dtype) for kind in ADDRESSED for dtype in ("fp8", "bf16")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for dtype in ("fp8", "bf16"):
        found[dtype] = tmp_path_factory.mktemp(dtype) / "checkpoint"
        write_checkpoint(found[dtype], base=2000, dtype=dtype)
    return found


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that reads mapped files: their bytes are in registered memory instead."""

    def in_registered_memory(path: Path) -> places.Mapped:
        data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).pin_memory()
        return places.Mapped(data, data.data_ptr())

    real = driver.attributes
    monkeypatch.setattr(places, "map_file", in_registered_memory)
    monkeypatch.setattr(
        driver,
        "attributes",
        lambda index: real(index)._replace(pageable_uses_host_page_tables=True),
    )


@pytest.fixture(params=EVERYWHERE, ids="-".join)
def opened(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], mapped: None
) -> Iterator[tuple[RowStore, AddressedTable]]:
    kind, dtype = request.param
    backend = "pinned" if kind == "pinned" else "disk"
    with RowStore.open(checkpoints[dtype], backend=backend) as store:
        table = AddressedTable(store, torch.device("cuda"), kind)
        yield store, table
        table.close()


def some_ids(store: RowStore, dtype: Any = np.int64, seed: int = 0) -> np.ndarray[Any, Any]:
    ids = np.random.default_rng(seed).integers(0, store.num_rows, (TOKENS, store.heads))
    # the edges of shards, of the table, and no row at all
    firsts = [extent.first_row for extent in store.manifest.planes[0].extents]
    edges = [0, store.num_rows - 1, -1, *firsts, *(first - 1 for first in firsts[1:])]
    ids[:4].reshape(-1)[: len(edges)] = edges[: 4 * store.heads]
    return ids.astype(dtype)


def raw_output(store: RowStore) -> Output:
    return Output(void_byte(store.manifest.codec))


def look_up(
    table: AddressedTable,
    ids: torch.Tensor,
    out: torch.Tensor,
    output: Output,
    live: torch.Tensor | None = None,
) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    table.rows(stream, ids, len(ids), live, out, output)


Opened = tuple[RowStore, AddressedTable]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_bytes_are_those_of_the_disk(opened: Opened, dtype: Any, checkpoints: Any) -> None:
    store, table = opened
    ids = some_ids(store, dtype)
    out = poisoned(TOKENS + 1, store.heads, store.row_bytes)
    look_up(table, on_device(ids), out[:TOKENS], raw_output(store))
    torch.cuda.synchronize()
    with RowStore(store.manifest, backend="disk") as disk:
        expected = disk.gather(ids.astype(np.int64))
    assert np.array_equal(out[:TOKENS].cpu().numpy(), expected)
    assert (out[TOKENS] == POISON).all()
    table.check()


def test_only_live_tokens_have_rows(opened: Opened) -> None:
    store, table = opened
    ids = some_ids(store)
    for count in (0, 7, TOKENS, TOKENS + 9):
        live = torch.tensor([count], dtype=torch.int32, device="cuda")
        out = poisoned(TOKENS, store.heads, store.row_bytes)
        look_up(table, on_device(ids), out, raw_output(store), live)
        torch.cuda.synchronize()
        expected = store.gather(ids)
        expected[count:] = 0
        assert np.array_equal(out.cpu().numpy(), expected)


@pytest.mark.parametrize("kind", ADDRESSED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_those_of_the_cpu(
    kind: str, dtype: torch.dtype, checkpoints: Any, mapped: None
) -> None:
    with RowStore.open(checkpoints["fp8"], backend="disk") as store:
        table = AddressedTable(store, torch.device("cuda"), kind)
        scale = store.manifest.scale
        assert scale is not None
        ids = some_ids(store)
        there = lut(scale, dtype).cuda()
        output = Output(void_bits(dtype), dtype.itemsize, there)
        out = poisoned(TOKENS, store.heads, store.row_values, dtype=dtype)
        look_up(table, on_device(ids), out, output)
        torch.cuda.synchronize()
        rows = torch.from_numpy(store.gather(ids))
        expected = reference(rows, "fp8_e4m3", scale, dtype, "scaled")
        assert torch.equal(out.cpu().view(torch.uint8), expected.view(torch.uint8))
        table.close()


def test_an_id_past_the_table_is_told_once(opened: Opened) -> None:
    store, table = opened
    ids = some_ids(store)
    expected = store.gather(ids)
    for bad in (store.num_rows, store.num_rows + 12345, 2**40):
        ids[5, 3] = bad
        expected[5, 3] = void_byte(store.manifest.codec)
        out = poisoned(TOKENS, store.heads, store.row_bytes)
        look_up(table, on_device(ids), out, raw_output(store))
        torch.cuda.synchronize()
        assert np.array_equal(out.cpu().numpy(), expected)
        with pytest.raises(IndexError, match=rf"row id {bad} is outside \[0, {store.num_rows}\)"):
            table.check()
        table.check()


def test_captured_rows_follow_their_ids_and_outlive_the_table(opened: Opened) -> None:
    store, table = opened
    ids = on_device(some_ids(store))
    live = torch.tensor([TOKENS], dtype=torch.int32, device="cuda")
    out = poisoned(TOKENS, store.heads, store.row_bytes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        look_up(table, ids, out, raw_output(store), live)
    torch.cuda.synchronize()
    expected = []
    for seed in range(3):
        expected.append((some_ids(store, seed=seed), TOKENS - seed))
    rows = [store.gather(wanted) for wanted, _ in expected]
    table.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        look_up(table, ids, out, raw_output(store))
    for (wanted, count), want in zip(expected, rows, strict=True):
        ids.copy_(torch.from_numpy(wanted))
        live.fill_(count)
        graph.replay()
        torch.cuda.synchronize()
        want[count:] = 0
        assert np.array_equal(out.cpu().numpy(), want)
    assert table.stats()["captured_lookups"] == 1


@pytest.mark.parametrize("kind", ADDRESSED)
@pytest.mark.parametrize(("world", "by"), [(2, "heads"), (3, "heads"), (20, "heads"), (3, "rows")])
def test_ranks_add_up_to_the_table(
    kind: str, world: int, by: str, checkpoints: Any, mapped: None
) -> None:
    total: Any = None
    for rank in range(world):
        with RowStore.open(
            checkpoints["fp8"], backend="disk", rank=rank, world=world, shard_by=by
        ) as store:
            table = AddressedTable(store, torch.device("cuda"), kind)
            ids = some_ids(store)
            out = poisoned(TOKENS, store.heads, store.row_bytes)
            look_up(table, on_device(ids), out, raw_output(store))
            torch.cuda.synchronize()
            found = out.cpu().numpy()
            assert np.array_equal(found, store.gather(ids))
            total = found if total is None else total | found
            if kind == "device" and by == "rows":
                assert table.stats()["addressed_bytes"] == len(store.owned.rows) * store.row_bytes
            table.close()
    with RowStore.open(checkpoints["fp8"], backend="disk") as store:
        assert np.array_equal(total, store.gather(ids))


# --- places -----------------------------------------------------------------------------------


def test_two_tables_share_one_registration(checkpoints: Any) -> None:
    with RowStore.open(checkpoints["fp8"], backend="pinned") as store:
        first, second = (AddressedTable(store, torch.device("cuda"), "pinned") for _ in range(2))
        first.close()
        first.close()
        ids = some_ids(store)
        out = poisoned(TOKENS, store.heads, store.row_bytes)
        look_up(second, on_device(ids), out, raw_output(store))
        torch.cuda.synchronize()
        assert np.array_equal(out.cpu().numpy(), store.gather(ids))
        second.close()


def test_a_table_is_filled_in_windows(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_WINDOW_BYTES", 100_000)
    monkeypatch.setattr(places, "_TELL_EVERY_S", 0.0)
    told: list[tuple[int, int]] = []
    with RowStore.open(checkpoints["fp8"], backend="disk") as store:
        table = AddressedTable(
            store,
            torch.device("cuda"),
            "device",
            progress=lambda done, total: told.append((done, total)),
        )
        ids = np.arange(store.num_rows // store.heads * store.heads).reshape(-1, store.heads)
        out = poisoned(*ids.shape, store.row_bytes)
        look_up(table, on_device(ids), out, raw_output(store))
        torch.cuda.synchronize()
        assert np.array_equal(out.cpu().numpy(), store.gather(ids))
        total = store.manifest.table_bytes
        assert told[-1] == (total, total)
        assert len(told) == -(-store.num_rows // (100_000 // 160))
        table.close()


def test_a_gpu_that_cannot_read_files(checkpoints: Any) -> None:
    if driver.attributes(0).pageable_uses_host_page_tables:
        pytest.skip("this one can")
    with (
        RowStore.open(checkpoints["fp8"], backend="disk") as store,
        pytest.raises(UnavailableError, match=r"page tables.*use disk or pinned"),
    ):
        AddressedTable(store, torch.device("cuda"), "file")


def test_a_file_that_changed_is_not_captured(tmp_path: Path, mapped: None) -> None:
    write_checkpoint(tmp_path / "checkpoint", base=2000)
    with RowStore.open(tmp_path / "checkpoint", backend="disk") as store:
        table = AddressedTable(store, torch.device("cuda"), "file")
        ids = on_device(some_ids(store))
        out = poisoned(TOKENS, store.heads, store.row_bytes)
        look_up(table, ids, out, raw_output(store))
        torch.cuda.synchronize()
        path = store.manifest.files[-1].path
        os.truncate(path, path.stat().st_size - 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out.zero_()  # torch warns of an empty graph
            with pytest.raises(ReadError, match="file changed"):
                look_up(table, ids, out, raw_output(store))
        table.close()


def test_wrong_arguments(checkpoints: Any) -> None:
    with (
        RowStore.open(checkpoints["fp8"], backend="disk") as store,
        pytest.raises(ValueError, match="kind needs one of pinned, device, file, got 'ram'"),
    ):
        AddressedTable(store, torch.device("cuda"), "ram")
