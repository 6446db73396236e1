"""verify against checkpoints, readers and hashes that lie in one place: the check of it fails."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import checkpoints
from rowstream import RowStore, catalog
from rowstream.errors import ReadError
from rowstream.hashing import ngram_row_ids
from rowstream.manifest import Manifest
from rowstream.verify import verify
from rowstream.verify.second_path import SecondPath
from verify.layouts import Table, flip, write_layout
from verify.reports import failed, found


def change_manifests(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Manifest], Manifest]
) -> None:
    """Make rowstream's own reading of every checkpoint wrong."""
    real = catalog.tables
    monkeypatch.setattr(catalog, "tables", lambda path: [change(m) for m in real(path)])


def test_one_flipped_byte_in_a_sampled_row_of_a_copy(tiny: tuple[Path, Table]) -> None:
    folder, table = tiny
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    size = (copy / "model-0.safetensors").stat().st_size
    row, byte = 37, 4
    flip(copy / "model-0.safetensors", size - (64 - row) * 6 + byte)
    assert failed(verify(copy)) == set()  # alone it cannot be known
    report = verify(folder, against=copy)
    assert failed(report) == {"against rows"}
    was = int(table[row, byte])
    assert found(report)["against rows"].text == (
        "the other differs from this one in 1 of 64 rows,"
        f" first in row 37 at byte 4, {was ^ 0x10:02x} against {was:02x}"
    )


def test_one_flipped_byte_anywhere_is_found_by_full(synth: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(synth, copy)
    path = copy / "model-00020-of-00037.safetensors"
    flip(path, path.stat().st_size - 160 * 3 - 1)  # no shard's first or last row
    # the copy's only random row is the same: a sample must be lucky
    assert failed(verify(synth, against=copy, rows=1, seed=1)) == set()
    report = verify(synth, against=copy, rows=1, seed=1, full=True)
    assert failed(report) == {"against full"}
    assert " in 1 of " in found(report)["against full"].text
    assert failed(verify(copy, rows=1, seed=1)) == set()
    assert failed(verify(copy, rows=1, seed=1, full=True)) == {"full synth"}


def test_swapped_shards_in_a_copy(tiny: tuple[Path, Table]) -> None:
    folder, table = tiny
    swapped = folder.with_name("swapped")
    write_layout(swapped, np.concatenate((table[:16], table[32:48], table[16:32], table[48:])))
    report = verify(folder, against=swapped, full=True)
    assert failed(report) == {"against rows", "against full"}
    assert "32 of 64 rows, first in row" in found(report)["against rows"].text
    assert "first in row 16 at byte" in found(report)["against full"].text


def test_shards_read_in_the_wrong_order(
    tiny: tuple[Path, Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    def swap(manifest: Manifest) -> Manifest:
        (plane,) = manifest.planes
        a, b, c, d = plane.extents
        b, c = (
            dataclasses.replace(b, offset=c.offset),
            dataclasses.replace(c, offset=b.offset),
        )
        return dataclasses.replace(
            manifest, planes=(dataclasses.replace(plane, extents=(a, b, c, d)),)
        )

    folder, _ = tiny
    change_manifests(monkeypatch, swap)
    report = verify(folder, full=True, backends=["disk", "mmap"])
    ways = {name for name in found(report) if name.startswith(("rows", "full "))}
    assert len(ways) == 3
    assert failed(report) == {"geometry", "tokens", *ways}
    assert "shard 1" in found(report)["geometry"].text


def test_rows_missed(tiny: tuple[Path, Table], monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(manifest: Manifest) -> Manifest:
        (plane,) = manifest.planes
        plane = dataclasses.replace(plane, extents=plane.extents[:-1])
        return dataclasses.replace(manifest, num_rows=48, planes=(plane,), hash=None)

    folder, _ = tiny
    change_manifests(monkeypatch, cut)
    report = verify(folder, full=True)
    assert failed(report) == {"geometry"}
    assert found(report)["geometry"].text == "rows needs 64, found 48"
    assert not any(name.startswith("rows") for name in found(report))


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("multipliers", (3, 5, 7), "multipliers[0] needs 106616942423619041, found 3"),
        ("offsets", (0, 11, 24, 42), "offsets[3] needs 41, found 42"),
        ("eos", 8, "eos needs 7, found 8"),
    ],
)
def test_constants_in_use_that_are_wrong(
    tiny: tuple[Path, Table], monkeypatch: pytest.MonkeyPatch, field: str, value: Any, text: str
) -> None:
    def wrong(manifest: Manifest) -> Manifest:
        assert manifest.hash is not None
        changed = dataclasses.replace(manifest.hash, **{field: value})
        return dataclasses.replace(manifest, hash=changed)

    folder, _ = tiny
    change_manifests(monkeypatch, wrong)
    report = verify(folder)
    assert failed(report) == {"constants", "tokens"}
    assert found(report)["constants"].text.startswith(text)


def test_stored_constants_that_differ_from_those_in_use(
    tiny: tuple[Path, Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = tiny
    real = SecondPath.__init__

    def init(self: SecondPath, path: Path, tensor: str) -> None:
        real(self, path, tensor)
        self.buffers["ngram_heads_vocab_sizes"] = (11, 13, 19, 17)

    monkeypatch.setattr(SecondPath, "__init__", init)
    report = verify(folder)
    assert failed(report) == {"constants"}
    assert found(report)["constants"].text == "ngram_heads_vocab_sizes[2] needs 17, found 19"


def test_a_scale_read_wrong(tiny: tuple[Path, Table], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = tiny
    change_manifests(monkeypatch, lambda manifest: dataclasses.replace(manifest, scale=0.5))
    report = verify(folder)
    assert failed(report) == {"scale"}
    assert found(report)["scale"].text == f"scale needs {checkpoints.SCALE}, found 0.5"


@pytest.mark.parametrize("backend", ["disk", "mmap", "pinned"])
def test_a_store_that_gives_wrong_bytes(
    tiny: tuple[Path, Table], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    folder, _ = tiny
    real = RowStore.gather

    def gather(self: RowStore, row_ids: Any, out: Any = None) -> Table:
        rows = real(self, row_ids, out)
        if self.backend == backend:
            rows[np.asarray(row_ids) == 20, 5] ^= 1
        return rows

    monkeypatch.setattr(RowStore, "gather", gather)
    report = verify(folder, backends=["disk", "mmap", "pinned"], full=backend == "disk")
    broken = {name for name in failed(report) if name != "tokens"}
    assert broken
    assert all(name.split(" ")[1].startswith(backend) for name in broken)
    assert all("row 20 at byte 5" in found(report)[name].text for name in broken)
    assert any(name.startswith("full") for name in broken) == (backend == "disk")


@pytest.mark.parametrize("way", ["native", "NumPy"])
def test_a_hash_that_gives_wrong_rows(
    tiny: tuple[Path, Table], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    folder, _ = tiny
    if way == "native":
        real = RowStore.row_ids

        def native(self: RowStore, context: Any, tokens: Any) -> NDArray[np.int64]:
            rows = real(self, context, tokens)
            rows[5, 3] ^= 1
            return rows

        monkeypatch.setattr(RowStore, "row_ids", native)
    else:

        def numpy(constants: Any, context: Any, tokens: Any) -> NDArray[np.int64]:
            # forgets that n-grams stop at an end
            none = dataclasses.replace(constants, eos=constants.vocab_size)
            return ngram_row_ids(none, context if context is not None else [7, 7], tokens)

        monkeypatch.setattr("rowstream.verify.checks.ngram_row_ids", numpy)
    report = verify(folder)
    assert failed(report) == {"tokens"}
    assert found(report)["tokens"].text.startswith(f"the {way} hash gives row ")


def test_another_seed_than_the_recipe_says(synth: Path, tmp_path: Path) -> None:
    recipe = json.loads((synth / "synth.json").read_text())
    (synth / "synth.json").write_text(json.dumps({**recipe, "seed": 1}))
    report = verify(synth, full=True)
    assert failed(report) == {"rows synth", "full synth"}
    others: list[Any] = [
        {**recipe, "num_rows": 5},
        {**recipe, "seed": -1},
        {**recipe, "seed": "0"},
        {**recipe, "dtype": "bf16"},
        {**recipe, "generator": "dice"},
        {"generator": recipe["generator"]},
        [],
    ]
    for content in others:
        (synth / "synth.json").write_text(json.dumps(content))
        report = verify(synth, full=True)
        assert failed(report) == {"synth"}, content
        assert found(report)["synth"].text.startswith("synth.json")


def test_a_file_that_changes_while_it_is_verified(synth: Path) -> None:
    path = synth / "model-00020-of-00037.safetensors"
    report = verify(synth, full=True, progress=lambda done, total: os.utime(path, ns=(1, done)))
    assert "identity" in failed(report)
    text = found(report)["identity"].text
    assert text == f"{path.name} has changed since verification began"


def test_a_file_that_is_cut_short_while_it_is_verified(synth: Path) -> None:
    path = synth / "model-00020-of-00037.safetensors"
    report = verify(synth, full=True, progress=lambda done, total: os.truncate(path, 5000))
    assert {"full", "identity"} <= failed(report)
    assert report.tables[0].checksums is None
    assert path.name in found(report)["full"].text


def test_a_file_that_vanishes_while_it_is_verified(synth: Path) -> None:
    path = synth / "model-00020-of-00037.safetensors"
    report = verify(synth, full=True, progress=lambda done, total: path.unlink(missing_ok=True))
    assert "identity" in failed(report)
    assert path.name in found(report)["identity"].text


def test_a_table_that_cannot_be_opened_twice(
    tiny: tuple[Path, Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise ReadError(errno.EIO, "input/output error", "file")

    monkeypatch.setattr("rowstream.verify.rows.RowStore", broken)
    report = verify(tiny[0], full=True)
    assert failed(report) == {"rows"}
    assert found(report)["rows"].text == "file: input/output error (errno 5)"
    monkeypatch.setattr("rowstream.verify.verification.SecondPath", broken)
    report = verify(tiny[0], full=True)
    assert failed(report) == {"second path"}
    assert list(found(report)) == ["second path", "identity"]
