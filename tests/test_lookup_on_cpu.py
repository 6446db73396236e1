"""`Lookup` and its torch operator on tensors of the CPU, against values that NumPy computed."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch")

import torch

from checkpoints import TINY_WIDTH
from lookup_tables import (
    CODECS,
    FLOATS,
    HEADS,
    NUM_ROWS,
    empty,
    expected,
    same,
    some_ids,
    write,
)
from rowstream import RowStore, tables
from rowstream.device.embedding import StreamedEmbedding
from rowstream.device.lookup import Lookup, LookupOptions


@pytest.fixture
def fp8(tmp_path: Path) -> Iterator[tuple[RowStore, NDArray[np.uint8]]]:
    table = write(tmp_path, "fp8_e4m3")
    with RowStore.open(tmp_path) as store:
        yield store, table


# --- the lookup ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["f32", "out"])
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_becomes_every_dtype(tmp_path: Path, codec: str, rounding: str) -> None:
    table = write(tmp_path, codec)
    ids = np.arange(NUM_ROWS).reshape(-1, HEADS)
    with RowStore.open(tmp_path) as store:
        look = Lookup(store, LookupOptions(rounding=rounding))
        for name in FLOATS:
            out = empty(ids.shape, TINY_WIDTH, getattr(torch, name))
            look(torch.from_numpy(ids), out)
            assert same(out, expected(table[ids], codec, name, rounding)), name
        raw = empty(ids.shape, store.row_bytes)
        look(torch.from_numpy(ids), raw)
        assert np.array_equal(raw.numpy(), table[ids])


def test_roundings_differ_where_the_scale_is_not_of_the_dtype(tmp_path: Path) -> None:
    table = write(tmp_path, "fp8_e4m3")
    ids = np.arange(NUM_ROWS).reshape(-1, HEADS)
    (manifest,) = tables(tmp_path)
    scale = float(np.float32(0.0123))
    with RowStore(dataclasses.replace(manifest, scale=scale)) as store:
        for name in ("bfloat16", "float16"):
            found = []
            for rounding in ("f32", "out"):
                out = empty(ids.shape, TINY_WIDTH, getattr(torch, name))
                Lookup(store, LookupOptions(rounding=rounding))(torch.from_numpy(ids), out)
                assert same(out, expected(table[ids], "fp8_e4m3", name, rounding, scale))
                found.append(out.nan_to_num())
            assert not torch.equal(*found)


def test_codes_stay_codes_where_they_are_asked_for(
    fp8: tuple[RowStore, NDArray[np.uint8]],
) -> None:
    store, table = fp8
    ids = some_ids(5)
    out = empty(ids.shape, TINY_WIDTH).view(torch.float8_e4m3fn)
    Lookup(store)(torch.from_numpy(ids), out)
    assert np.array_equal(out.view(torch.uint8).numpy(), table[ids])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (0,), (2, 0, 3)])
def test_ids_have_any_shape(
    fp8: tuple[RowStore, NDArray[np.uint8]], shape: tuple[int, ...], dtype: str
) -> None:
    store, table = fp8
    ids = some_ids(*shape)
    out = empty(ids.shape, TINY_WIDTH)
    Lookup(store)(torch.from_numpy(ids).to(getattr(torch, dtype)), out)
    assert np.array_equal(out.numpy(), table[ids])


def test_ids_of_any_stride(fp8: tuple[RowStore, NDArray[np.uint8]]) -> None:
    store, table = fp8
    ids = some_ids(6, 5)
    out = empty((5, 6, HEADS), TINY_WIDTH)
    Lookup(store)(torch.from_numpy(ids).transpose(0, 1), out)
    assert np.array_equal(out.numpy(), table[ids.transpose(1, 0, 2)])


@pytest.mark.parametrize("live", [-2, 0, 1, 5, 6, 99])
def test_tokens_that_do_not_count_are_zeroes(
    fp8: tuple[RowStore, NDArray[np.uint8]], live: int
) -> None:
    store, table = fp8
    ids = some_ids(2, 3)
    ids[0, 0, 2] = -1
    wanted = table[ids].reshape(6, HEADS, TINY_WIDTH)
    wanted[0, 2] = 0
    wanted[max(live, 0) :] = 0
    ids.reshape(6, HEADS)[max(live, 0) :] = NUM_ROWS + 7  # nobody looks at them
    given = torch.from_numpy(ids)
    kept = given.clone()
    out = empty(ids.shape, TINY_WIDTH)
    Lookup(store)(given, out, torch.tensor([live], dtype=torch.int32))
    assert np.array_equal(out.numpy().reshape(wanted.shape), wanted)
    assert torch.equal(given, kept)


@pytest.mark.parametrize("by", ["heads", "rows"])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_what_ranks_look_up_adds_up(tmp_path: Path, by: str, world: int) -> None:
    table = write(tmp_path, "fp8_e4m3")
    ids = some_ids(9)
    raw, values = [], []
    for rank in range(world):
        with RowStore.open(tmp_path, rank=rank, world=world, shard_by=by) as store:
            look = Lookup(store)
            raw.append(empty(ids.shape, TINY_WIDTH))
            values.append(empty(ids.shape, TINY_WIDTH, torch.float32))
            for out in (raw[-1], values[-1]):
                look(torch.from_numpy(ids), out)
    assert np.array_equal(sum(raw).numpy(), table[ids])
    wanted = expected(table[ids], "fp8_e4m3", "float32", "out")
    assert np.array_equal(sum(values).numpy(), wanted, equal_nan=True)
    # and no rank did it alone
    assert not any(np.array_equal(part.numpy(), table[ids]) for part in raw)


# --- what cannot be -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "out", "error", "message"),
    [
        (
            ((2, 4), "int16"),
            ((2, 4, 6), "uint8"),
            TypeError,
            "ids need int64 or int32, got torch.i",
        ),
        (
            ((2, 4), "float32"),
            ((2, 4, 6), "uint8"),
            TypeError,
            "ids need int64 or int32, got torch",
        ),
        (
            ((2, 4), "int64"),
            ((2, 4, 7), "uint8"),
            ValueError,
            r"out needs shape \(2, 4, 6\) on cpu",
        ),
        (((2, 4), "int64"), ((8, 6), "float32"), ValueError, r"got \(8, 6\) on cpu"),
        (((2, 4), "int64"), ((4, 2, 6), "float32"), ValueError, r"got \(4, 2, 6\) on cpu"),
    ],
)
def test_arguments_that_do_not_fit(
    fp8: tuple[RowStore, NDArray[np.uint8]],
    ids: tuple[tuple[int, ...], str],
    out: tuple[tuple[int, ...], str],
    error: type[Exception],
    message: str,
) -> None:
    given, into = (torch.zeros(shape, dtype=getattr(torch, name)) for shape, name in (ids, out))
    with pytest.raises(error, match=message):
        Lookup(fp8[0])(given, into)


def test_an_output_elsewhere_or_with_gaps(fp8: tuple[RowStore, NDArray[np.uint8]]) -> None:
    look = Lookup(fp8[0])
    ids = torch.zeros((2, HEADS), dtype=torch.int64)
    with pytest.raises(ValueError, match=r"on cpu, got \(2, 4, 6\) on meta"):
        look(ids, torch.empty((2, HEADS, 6), device="meta"))
    with pytest.raises(ValueError, match="out needs to be contiguous"):
        look(ids, torch.empty((2, HEADS, 12))[..., ::2])


@pytest.mark.parametrize("outside", [NUM_ROWS, -2, 2**40])
def test_an_id_outside_the_table(fp8: tuple[RowStore, NDArray[np.uint8]], outside: int) -> None:
    ids = torch.from_numpy(some_ids(3))
    ids[1, 2] = outside
    with pytest.raises(IndexError, match=str(outside)):
        Lookup(fp8[0])(ids, empty(ids.shape, TINY_WIDTH))


def test_the_module_rounds_as_its_lookup(tmp_path: Path) -> None:
    table = write(tmp_path, "fp8_e4m3")
    ids = np.arange(NUM_ROWS).reshape(-1, HEADS)
    (manifest,) = tables(tmp_path)
    scale = float(np.float32(0.0123))
    with RowStore(dataclasses.replace(manifest, scale=scale)) as store:
        for rounding in ("f32", "out"):
            module = StreamedEmbedding(store, torch.bfloat16, LookupOptions(rounding=rounding))
            found = module(torch.from_numpy(ids))
            assert same(found, expected(table[ids], "fp8_e4m3", "bfloat16", rounding, scale))


def test_options_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="rounding needs one of f32, out, got 'up'"):
        LookupOptions(rounding="up")


def test_a_place_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="place needs one of auto, streamed, pinned, device, file"):
        LookupOptions(place="disk")


# --- torch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("live", [None, 2])
def test_compiled_code_has_it_as_one_operator(
    fp8: tuple[RowStore, NDArray[np.uint8]], backend: str, live: int | None
) -> None:
    store, table = fp8
    look = Lookup(store, LookupOptions(rounding="f32"))
    count = None if live is None else torch.tensor([live], dtype=torch.int32)

    def model(ids: Any) -> Any:
        out = torch.empty((*ids.shape, TINY_WIDTH), dtype=torch.float32)
        look(ids % NUM_ROWS, out, count)
        return out * 2

    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (3, 5):
        ids = some_ids(tokens) + NUM_ROWS
        wanted = expected(table[ids % NUM_ROWS], "fp8_e4m3", "float32", "f32") * 2
        wanted[tokens if live is None else live :] = 0
        found = compiled(torch.from_numpy(ids))
        assert np.array_equal(found.numpy(), wanted, equal_nan=True)


def test_the_operator_is_what_torch_expects_of_one(
    fp8: tuple[RowStore, NDArray[np.uint8]],
) -> None:
    look = Lookup(fp8[0])
    ids = torch.from_numpy(some_ids(3))
    out = empty(ids.shape, TINY_WIDTH)
    torch.library.opcheck(torch.ops.rowstream.lookup, (look.handle, ids, None, out))


def test_a_handle_keeps_nothing_alive(fp8: tuple[RowStore, NDArray[np.uint8]]) -> None:
    look = Lookup(fp8[0])
    handle = look.handle
    ids = torch.from_numpy(some_ids(3))
    del look
    gc.collect()
    with pytest.raises(KeyError):
        torch.ops.rowstream.lookup(handle, ids, None, empty(ids.shape, TINY_WIDTH))


def test_copies_share_the_lookup_and_pickling_is_refused(
    fp8: tuple[RowStore, NDArray[np.uint8]],
) -> None:
    store, table = fp8
    module = StreamedEmbedding(store, torch.bfloat16)
    (twin,) = copy.deepcopy(torch.nn.Sequential(module))
    assert isinstance(twin, StreamedEmbedding)
    assert twin is not module
    assert twin.lookup is module.lookup
    assert twin.lookup.store is store
    ids = some_ids(2)
    assert same(twin(torch.from_numpy(ids)), expected(table[ids], "fp8_e4m3", "bfloat16", "out"))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(module)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_module_gives_what_transformers_would(tmp_path: Path, codec: str, name: str) -> None:
    table = write(tmp_path, codec)
    ids = np.arange(NUM_ROWS).reshape(-1, 2, HEADS)
    seen: list[tuple[int, float]] = []
    with RowStore.open(tmp_path) as store:
        module = StreamedEmbedding(store, getattr(torch, name))
        module.observe = lambda tokens, waited_s: seen.append((tokens, waited_s))
        # code and scale are of the model's dtype there
        assert same(module(torch.from_numpy(ids)), expected(table[ids], codec, name, "out"))
    assert [tokens for tokens, _ in seen] == [NUM_ROWS // HEADS]


# --- the host path ------------------------------------------------------------------------------

RUNS = [(None, [3, 1, 4]), ([1, 4], [1, 5])]


class RecordingGate:
    """A gate that keeps what it is filled with."""

    def __init__(self) -> None:
        self.filled: list[NDArray[np.int64]] = []

    def fill(self, row_ids: NDArray[np.int64]) -> None:
        self.filled.append(row_ids)


def test_rows_that_were_staged_are_not_read_again(
    fp8: tuple[RowStore, NDArray[np.uint8]],
) -> None:
    store, table = fp8
    look = Lookup(store)
    ids = np.concatenate([store.row_ids(*run) for run in RUNS])
    out = empty(ids.shape, TINY_WIDTH)
    with look.stage(RUNS) as ticket:
        until_s = time.monotonic() + 60
        while not ticket.progress().over:
            assert time.monotonic() < until_s
        look(torch.from_numpy(ids), out)
    assert np.array_equal(out.numpy(), table[ids])
    stats = store.stats()
    assert (stats["ahead_rows"], stats["reads"]) == (ids.size, 0)


def test_a_staged_forward_fills_its_gate_before_it_runs(
    fp8: tuple[RowStore, NDArray[np.uint8]],
) -> None:
    store, table = fp8
    look = Lookup(store)
    ids = np.concatenate([store.row_ids(*run) for run in RUNS])
    out = empty(ids.shape, TINY_WIDTH)
    gate: Any = RecordingGate()
    with look.staged(RUNS, gate):
        assert [filled.tolist() for filled in gate.filled] == [ids.tolist()]
        look(torch.from_numpy(ids), out)
    assert np.array_equal(out.numpy(), table[ids])
    with look.staged(RUNS):
        pass
    assert len(gate.filled) == 1


def test_without_a_gpu_there_is_nothing_to_check_or_to_fill(
    fp8: tuple[RowStore, NDArray[np.uint8]],
) -> None:
    store, table = fp8
    look = Lookup(store)
    look.check()
    look.kick()
    assert look.stats() == {}
    assert look.gates == []
    look.close()
    ids = some_ids(1)
    out = empty(ids.shape, TINY_WIDTH)
    look(torch.from_numpy(ids), out)  # the store stays open
    assert np.array_equal(out.numpy(), table[ids])
