"""Shards that several table paths have: which are copies, what they must agree in, how stores and
commands read them.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints
from checkpoints import Array, hash_buffers, scale, shards, write_file
from rowstream import ManifestError, RowStore, tables
from rowstream.backends import open_loader
from rowstream.cli import main


class Split:
    """A model without its table, of four shards of 16 rows, which lie in other places."""

    def __init__(self, root: Path) -> None:
        self.model, self.a, self.b = root / "model", root / "a", root / "b"
        for folder in (self.model, self.a, self.b):
            folder.mkdir()
        self.table = checkpoints.table_bytes(64, checkpoints.TINY_WIDTH, seed=5)
        self.shards = shards(self.table, [16] * 4)
        self.constants = [scale(), *hash_buffers()]
        checkpoints.write_config(self.model)
        write_file(self.model / "w.safetensors", self.constants)
        for number, shard in enumerate(self.shards):
            write_file(self.a / f"s{number}.safetensors", [shard])

    def open(self, *places: Path, **options: Any) -> RowStore:
        options = {"backend": "disk", **options}
        return RowStore.open(self.model, table_paths=places or (self.a, self.b), **options)

    def refused(self, match: str) -> None:
        with pytest.raises(ManifestError, match=match):
            tables(self.model, table_paths=[self.a, self.b])


@pytest.fixture
def split(tmp_path: Path) -> Split:
    return Split(tmp_path)


@pytest.mark.parametrize("backend", ["disk", "mmap", "pinned", "auto"])
def test_copies_in_the_same_files_and_in_others(split: Split, backend: str) -> None:
    shutil.copytree(split.a, split.b, dirs_exist_ok=True)
    third = split.b.parent / "all.safetensors"
    write_file(third, [*split.constants, *reversed(split.shards)], gap=13)
    ids = np.arange(64).repeat(3)
    for places in ((split.a, split.b), (third, split.b), (split.a, third, split.b)):
        with split.open(*places, backend=backend) as store:
            assert np.array_equal(store.gather(ids), split.table[ids])
            assert ("copies" in store.reason) == (store.backend == "disk")


def test_which_files_are_copies(split: Split) -> None:
    # the model's own table is none, unless it is named as well
    write_file(split.model / "own.safetensors", split.shards)
    write_file(split.b / "two.safetensors", split.shards[1:3])
    (manifest,) = tables(split.model, table_paths=[split.a, split.b])
    assert [file.path.name for file in manifest.files] == [f"s{n}.safetensors" for n in range(4)]
    assert [file.path.name for file in manifest.copies] == ["two.safetensors"]
    (plane,) = manifest.planes
    assert [(copy.file, copy.first_row, copy.num_rows) for copy in plane.copies] == [
        (4, 16, 16),
        (4, 32, 16),
    ]
    (manifest,) = tables(split.model, table_paths=[split.a, split.model])
    assert [file.path.name for file in manifest.copies] == ["own.safetensors"]
    # a file may hold what is read of one shard and the copy of another
    shutil.move(split.a / "s0.safetensors", split.a.parent)
    write_file(split.b / "two.safetensors", split.shards[:2])
    (manifest,) = tables(split.model, table_paths=[split.a, split.b])
    assert not manifest.copies
    assert [copy.file for copy in manifest.planes[0].copies] == [0]
    with split.open() as store:
        assert np.array_equal(store.gather(np.arange(64)), split.table)


def test_reads_of_a_store_go_to_both(split: Split) -> None:
    other = checkpoints.table_bytes(64, checkpoints.TINY_WIDTH, seed=6)
    write_file(split.b / "one.safetensors", shards(other, [16] * 4), gap=7)
    with split.open() as store:
        first = [store.gather(np.array([row])) for row in range(64)]
    of_other = sum(np.array_equal(rows[0], other[row]) for row, rows in enumerate(first))
    of_table = sum(np.array_equal(rows[0], split.table[row]) for row, rows in enumerate(first))
    assert (of_table, of_other) == (32, 32)


@pytest.mark.parametrize("options", [{"cache_bytes": 1 << 20}, {"world": 2, "rank": 1}])
def test_a_store_with_copies(split: Split, options: dict[str, Any]) -> None:
    write_file(split.b / "one.safetensors", split.shards, gap=3)
    tokens = np.arange(40) % 50
    with split.open(**options) as store, split.open(split.a, **options) as single:
        store.prefetch([(None, tokens)])
        for _ in range(2):
            rows = store.gather_tokens([(None, tokens)])
            assert np.array_equal(rows, single.gather_tokens([(None, tokens)]))


def test_the_loader_reads_the_first_copy(split: Split) -> None:
    write_file(split.b / "one.safetensors", split.shards)
    (manifest,) = tables(split.model, table_paths=[split.a, split.b])
    out = np.zeros((64, checkpoints.TINY_WIDTH), np.uint8)
    loader = open_loader(manifest)
    loader.load(0, out)
    assert np.array_equal(out, split.table)
    assert len(loader.files()) == 4


def test_inspect_shows_copies(split: Split, capsys: pytest.CaptureFixture[str]) -> None:
    write_file(split.b / "one.safetensors", split.shards[:3])
    options = ["--table-path", str(split.a), "--table-path", str(split.b)]
    assert main(["inspect", str(split.model), *options]) == 0
    assert f"4 shards in 4 files of {split.a}\n" in capsys.readouterr().out


def test_a_copy_of_another_shape(split: Split) -> None:
    write_file(split.b / "s.safetensors", shards(split.table, [32, 32]))
    split.refused(r"s\.safetensors: .*shape needs \[16, 6\] as in .*/a/s0\.s.*found \[32, 6\]")


def test_a_copy_of_another_type(split: Split) -> None:
    twice = np.concatenate([split.table, split.table], axis=1)
    write_file(split.b / "s.safetensors", shards(twice, [16] * 4, dtype="BF16"))
    split.refused(r"s\.safetensors: .* dtype needs F8_E4M3 as in .*/a/s0\.s.*, found BF16")


@pytest.mark.parametrize("number", range(4))
def test_a_copy_with_other_constants(split: Split, number: int) -> None:
    write_file(split.a / "c.safetensors", split.constants)
    changed: list[Array] = list(split.constants)
    data = changed[number].data or b""
    changed[number] = changed[number]._replace(data=bytes([data[0] ^ 1, *data[1:]]))
    write_file(split.b / "s.safetensors", [*split.shards, *changed])
    split.refused(r"s\.safetensors: .* value needs [0-9a-f]+ as in .*/a/c\.s.*, found [0-9a-f]+")


def test_a_copy_that_ends_early(split: Split) -> None:
    write_file(split.b / "s.safetensors", split.shards)
    os.truncate(split.b / "s.safetensors", os.path.getsize(split.b / "s.safetensors") - 1)
    split.refused(r"s\.safetensors")


def test_a_copy_replaced_before_it_is_opened(split: Split) -> None:
    write_file(split.b / "s.safetensors", split.shards)
    (manifest,) = tables(split.model, table_paths=[split.a, split.b])
    (split.b / "s.safetensors").rename(split.b / "gone")
    write_file(split.b / "s.safetensors", split.shards)
    with pytest.raises(ManifestError, match=r"s\.safetensors: identity needs"):
        RowStore(manifest, backend="disk")
    RowStore(manifest, backend="mmap").close()  # reads no copies


@pytest.mark.parametrize("wrong", ["rows", "file", "size"])
def test_manifests_check_copies(split: Split, wrong: str) -> None:
    write_file(split.b / "s.safetensors", split.shards)
    (manifest,) = tables(split.model, table_paths=[split.a, split.b])
    (plane,) = manifest.planes
    copy, *others = plane.copies
    changed, match = {
        "rows": (
            replace(copy, num_rows=15),
            "codes copy needs the rows of an extent, found 15 from 0",
        ),
        "file": (replace(copy, file=5), "file needs below 5, found 5"),
        "size": (replace(copy, offset=10_000), "s.safetensors: .* needs 96 bytes at 10000"),
    }[wrong]
    with pytest.raises(ManifestError, match=match):
        replace(manifest, planes=(replace(plane, copies=(changed, *others)),))
