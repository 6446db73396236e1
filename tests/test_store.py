"""RowStore: shapes and types at the door, every backend behind it, and what it says of itself."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import checkpoints
import rowstream
from looks import between_looks
from rowstream import ManifestError, RowStore, UnavailableError
from rowstream.backends import ReadOptions, open_table

BACKENDS = ("auto", "disk", "mmap", "pinned")
every_backend = pytest.mark.parametrize("backend", BACKENDS)
HEADS = 4


@pytest.fixture
def table(tmp_path: Path) -> NDArray[np.uint8]:
    return checkpoints.write_tiny(tmp_path, seed=int.from_bytes(os.urandom(4), "little"))


def expected(table: NDArray[np.uint8], ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    rows = table[np.where(ids < 0, 0, ids)]
    rows[ids < 0] = 0
    return rows


@every_backend
@pytest.mark.parametrize("shape", [(), (1,), (0,), (5,), (3, HEADS), (2, 3, HEADS), (2, 0, HEADS)])
def test_gather_any_shape(
    backend: str, shape: tuple[int, ...], table: NDArray[np.uint8], tmp_path: Path
) -> None:
    ids = np.random.default_rng().integers(-1, len(table), shape, np.int64)
    with RowStore.open(tmp_path, backend=backend) as store:
        out = np.full((*shape, store.row_bytes), 0xEE, np.uint8)
        returned = store.gather(ids, out)
        assert returned is out
        assert np.array_equal(out, expected(table, np.asarray(ids)))
        assert np.array_equal(store.gather(ids), out)


@every_backend
def test_gather_takes_other_integers_and_strides(
    backend: str, table: NDArray[np.uint8], tmp_path: Path
) -> None:
    with RowStore.open(tmp_path, backend=backend) as store:
        ids = np.arange(24).reshape(6, 4)
        for given in (ids.astype(np.int32), ids.astype(np.uint16), ids[:, ::-1], ids.tolist()):
            assert np.array_equal(store.gather(given), expected(table, np.asarray(given, np.int64)))


@every_backend
@pytest.mark.parametrize("width", [HEADS, 3])
def test_gather_takes_any_array_of_integers_with_an_out(
    backend: str, width: int, table: NDArray[np.uint8], tmp_path: Path
) -> None:
    ids = np.random.default_rng().integers(-1, len(table), (6, width))
    odd = np.zeros(ids.nbytes + 1, np.uint8)[1:].view(np.int64).reshape(ids.shape)
    odd[:] = ids
    assert not odd.flags.aligned
    with RowStore.open(tmp_path, backend=backend) as store:
        for given in (ids, ids.astype(">i8"), ids.astype(np.int8), ids.T.copy().T, odd):
            out = np.full((6, width, store.row_bytes), 0xEE, np.uint8)
            assert store.gather(given, out) is out
            assert np.array_equal(out, expected(table, ids))
        assert store.stats()["gathers"] == 5


@every_backend
def test_gather_tokens(backend: str, table: NDArray[np.uint8], tmp_path: Path) -> None:
    # rows of the tiny checkpoint's constants, worked out with the published rule
    with RowStore.open(tmp_path, backend=backend) as store:
        whole = store.row_ids(None, [1, 2, 7, 3, 4, 5])
        assert whole.shape == (6, HEADS)
        runs = [([7, 7], [1, 2]), ([1, 2], [7, 3]), ([7, 3], [4, 5])]
        out = np.full((6, HEADS, store.row_bytes), 0xEE, np.uint8)
        assert store.gather_tokens(runs, out) is out
        assert np.array_equal(out, expected(table, whole))
        assert store.gather_tokens([]).shape == (0, HEADS, store.row_bytes)


def test_row_ids_by_the_published_rule(table: NDArray[np.uint8], tmp_path: Path) -> None:
    multipliers = checkpoints.TINY_MULTIPLIERS[1]
    sizes, offsets = checkpoints.TINY_SIZES[1], checkpoints.TINY_OFFSETS[1]
    history = [7, 7, 1, 2, 7, 3, 4]
    want = []
    for p in range(2, len(history)):
        before = history[p - 1]
        second = 7 if before == 7 else history[p - 2]
        mixed = history[p] * multipliers[0] ^ before * multipliers[1]
        row = [mixed % sizes[h] + offsets[h] for h in (0, 1)]
        mixed ^= second * multipliers[2]
        want.append(row + [mixed % sizes[h] + offsets[h] for h in (2, 3)])
    with RowStore.open(tmp_path) as store:
        assert store.row_ids(None, history[2:]).tolist() == want


def test_values(table: NDArray[np.uint8], tmp_path: Path) -> None:
    with RowStore.open(tmp_path) as store:
        rows = store.gather([[0, 1, 2, 63]])
        values = store.values(rows)
        assert values.dtype == np.float32
        assert values.shape == (1, 4, checkpoints.TINY_WIDTH)
        # E4M3: 0x38 is 1.0, 0xB8 is -1.0, 0x01 is 2 ** -9
        known = np.array([[0x38, 0xB8, 0x01, 0x00, 0x7E, 0x40]], np.uint8)
        scale = np.float32(checkpoints.SCALE)
        want = np.array([[1, -1, 2**-9, 0, 448, 2]], np.float32) * scale
        assert np.array_equal(store.values(known), want)
        with pytest.raises(ValueError, match="last axis of 6 bytes"):
            store.values(rows[..., :5])


def test_out_is_checked(table: NDArray[np.uint8], tmp_path: Path) -> None:
    with RowStore.open(tmp_path) as store:
        good = np.zeros((2, 6), np.uint8)
        frozen = good.copy()
        frozen.flags.writeable = False
        for bad, error in (
            (np.zeros((2, 5), np.uint8), ValueError),
            (np.zeros((2, 6), np.int8), TypeError),
            (np.zeros((6, 2), np.uint8).T, ValueError),
            (frozen, ValueError),
            ([[0] * 6] * 2, TypeError),
        ):
            with pytest.raises(error, match="out needs"):
                store.gather([0, 1], bad)  # type: ignore[arg-type]


def test_ids_are_checked(table: NDArray[np.uint8], tmp_path: Path) -> None:
    with RowStore.open(tmp_path) as store:
        for ids in ([0.0], [True], np.array([2**63], np.uint64), ["a"]):
            with pytest.raises(TypeError, match="row_ids need integers"):
                store.gather(ids)
        for row in (64, -2):
            with pytest.raises(IndexError, match=f"row id {row}"):
                store.gather([0, row])
        for token in (-1, 50):
            with pytest.raises(ValueError, match=f"token id {token} at position 1"):
                store.gather_tokens([(None, [1, token])])
        with pytest.raises(ValueError, match="context has 3 ids, needs 2"):
            store.gather_tokens([([1, 2, 3], [1])])
        with pytest.raises(ValueError, match="tokens need one axis"):
            store.gather_tokens([(None, [[1]])])
        assert store.stats()["reads"] == 0


def test_stats(table: NDArray[np.uint8], tmp_path: Path) -> None:
    with RowStore.open(tmp_path) as store:
        store.gather_tokens([(None, [1, 1, 1, 1, 1])])
        stats = store.stats()
    assert stats["table"] == "layers.1.ple"
    assert stats["table_bytes"] == table.size
    assert stats["backend"] == "disk"
    assert stats["reader"] in stats["reason"]
    assert (stats["gathers"], stats["rows"]) == (1, 5 * HEADS)
    # the third to the fifth token see the same two predecessors
    assert stats["duplicate_rows"] >= 2 * HEADS
    assert 0 < stats["reads"] <= 2 * HEADS
    assert 0 < stats["plan_s"] < stats["gather_s"]


def test_backends_say_what_they_are(table: NDArray[np.uint8], tmp_path: Path) -> None:
    for backend in ("mmap", "pinned"):
        with RowStore.open(tmp_path, backend=backend) as store:
            assert (store.backend, store.reason) == (backend, "asked for")
            assert store.stats()["reader"] is None
    with RowStore.open(tmp_path, backend="pinned") as store:
        assert store.stats()["memory_bytes"] >= table.size
    with RowStore.open(tmp_path, backend="disk", reader="pool") as store:
        assert store.stats()["reader"] == "pool"
        assert store.reason.startswith("asked for; pool: asked for")


def test_wrong_choices(table: NDArray[np.uint8], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs one of auto, disk, mmap, pinned, got 'ram'"):
        RowStore.open(tmp_path, backend="ram")
    with pytest.raises(ValueError, match="needs one of auto, uring, pool, inline, got 'aio'"):
        RowStore.open(tmp_path, reader="aio")
    with pytest.raises(ValueError, match=r"table needs one of layers.1.ple, got 'layers.2.ple'"):
        RowStore.open(tmp_path, table="layers.2.ple")


def test_zero_rows_is_chosen_by_nobody_but_the_caller(
    table: NDArray[np.uint8], tmp_path: Path
) -> None:
    with RowStore.open(tmp_path) as store:
        assert store.stats()["on_read_error"] == "raise"
    with pytest.raises(ValueError, match="needs one of raise, zero-rows, got 'zeroes'"):
        RowStore.open(tmp_path, on_read_error="zeroes")


@between_looks
def test_zero_rows_are_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints.write_tiny(tmp_path)
    caplog.clear()
    with RowStore.open(tmp_path, on_read_error="zero-rows") as store:
        good = store.gather(np.arange(64))
        assert not caplog.records
        # the end of the file is gone, and with it the last rows
        path = store.manifest.files[0].path
        last = store.manifest.planes[0].extents[-1]
        os.truncate(path, last.offset + (last.num_rows - 2) * store.row_bytes)
        found = store.gather(np.arange(64))
        lost = int((found != good).any(axis=1).sum())
        assert lost >= 2
        assert store.stats()["zeroed_rows"] >= lost
    assert "rows could not be read and are zeroes" in caplog.text


def test_a_file_replaced_after_its_header_was_read(
    table: NDArray[np.uint8], tmp_path: Path
) -> None:
    (manifest,) = rowstream.tables(tmp_path)
    path = manifest.files[0].path
    path.with_suffix(".new").write_bytes(path.read_bytes())
    os.replace(path.with_suffix(".new"), path)
    for backend in BACKENDS:
        with pytest.raises(ManifestError, match=r"model.safetensors: identity needs"):
            open_table(manifest, backend, ReadOptions())


def test_several_tables_need_a_name(tmp_path: Path) -> None:
    tables = {
        layer: checkpoints.table_bytes(rows, 6, layer)
        for layer, rows in checkpoints.TINY_ROWS.items()
    }
    checkpoints.write_config(tmp_path, ple_layer_ids=[2, 6])
    arrays = []
    for layer, data in tables.items():
        arrays += [
            checkpoints.scale(layer),
            *checkpoints.shards(data, [len(data)], layer=layer),
            *checkpoints.hash_buffers(layer),
        ]
    checkpoints.write_file(tmp_path / "model.safetensors", arrays)
    with pytest.raises(ValueError, match=r"has 2 tables, name one: layers.1.ple, layers.5.ple"):
        RowStore.open(tmp_path)
    for layer, data in tables.items():
        with RowStore.open(tmp_path, table=f"layers.{layer}.ple") as store:
            assert np.array_equal(store.gather(np.arange(len(data))), data)


def test_without_a_config_rows_can_be_gathered(tmp_path: Path) -> None:
    table = checkpoints.write_tiny(tmp_path)
    (tmp_path / "config.json").unlink()
    with RowStore.open(tmp_path) as store:
        assert np.array_equal(store.gather([[3, 1, 2, 0]]), table[[[3, 1, 2, 0]]])
        with pytest.raises(UnavailableError, match=r"no config.json"):
            store.gather_tokens([(None, [1])])


def test_closed(table: NDArray[np.uint8], tmp_path: Path) -> None:
    for backend in BACKENDS:
        store = RowStore.open(tmp_path, backend=backend)
        store.close()
        store.close()
        with pytest.raises(ValueError, match="closed"):
            store.gather([0])


def gather_until_closed(
    store: RowStore, ids: NDArray[np.int64], want: NDArray[np.uint8], wrong: list[str]
) -> None:
    try:
        while True:
            if not np.array_equal(store.gather(ids), want):
                wrong.append(store.backend)
    except ValueError:
        pass


@every_backend
def test_close_waits_for_gathers(backend: str, table: NDArray[np.uint8], tmp_path: Path) -> None:
    store = RowStore.open(tmp_path, backend=backend)
    ids = np.random.default_rng().integers(0, len(table), (4000, HEADS))
    wrong: list[str] = []
    arguments = (store, ids, expected(table, ids), wrong)
    threads = [threading.Thread(target=gather_until_closed, args=arguments) for _ in range(4)]
    for thread in threads:
        thread.start()
    store.gather(ids)
    store.close()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_manifest_travels_between_processes(table: NDArray[np.uint8], tmp_path: Path) -> None:
    (manifest,) = rowstream.tables(tmp_path)
    with RowStore(pickle.loads(pickle.dumps(manifest))) as store:
        assert np.array_equal(store.gather(np.arange(64)), table)
