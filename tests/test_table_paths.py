"""Tables on other drives than their model: shards found by name, and held against the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import checkpoints
from checkpoints import Array, hash_buffers, scale, shards, write_file
from rowstream import ManifestError, RowStore, tables
from rowstream.cli import main
from rowstream.families import FAMILIES
from rowstream.formats.index import indexed_tensors

WEIGHT = Array("lm_head.weight", "F32", (4,), bytes(16))
IDS = np.arange(64)


class Split:
    """A model of one file of weights and four of a shard each; `model` has all of them."""

    def __init__(self, root: Path) -> None:
        self.model, self.a, self.b = root / "model", root / "a", root / "b"
        for folder in (self.model, self.a, self.b):
            folder.mkdir()
        self.table = checkpoints.table_bytes(64, checkpoints.TINY_WIDTH, seed=5)
        self.shards = shards(self.table, [16] * 4)
        checkpoints.write_config(self.model)
        self.constants = [scale(), *hash_buffers()]
        self.files = {"w.safetensors": [WEIGHT, *self.constants]}
        self.files |= {f"s{n}.safetensors": [shard] for n, shard in enumerate(self.shards)}
        for name, arrays in self.files.items():
            write_file(self.model / name, arrays)
        checkpoints.write_index(
            self.model,
            {array.name: name for name, arrays in self.files.items() for array in arrays},
        )

    def move(self, number: int, to: Path) -> Path:
        return Path(shutil.move(self.model / f"s{number}.safetensors", to))

    def rows(self, *table_paths: Path) -> NDArray[np.uint8]:
        with RowStore.open(self.model, table_paths=table_paths) as store:
            assert store.row_ids(None, [1, 2]).shape == (2, 4)
            return store.gather(IDS)

    def fails(self, match: str, *table_paths: Path) -> None:
        with pytest.raises(ManifestError, match=match):
            tables(self.model, table_paths=table_paths)


@pytest.fixture
def split(tmp_path: Path) -> Split:
    return Split(tmp_path)


def folders(manifest: Any) -> list[str]:
    return [file.path.parent.name for file in manifest.files]


def test_shards_that_the_model_lacks(split: Split) -> None:
    for number in range(4):
        split.move(number, split.a)
    assert np.array_equal(split.rows(split.a), split.table)
    (manifest,) = tables(split.model, table_paths=[split.a])
    assert folders(manifest) == ["a"] * 4
    assert manifest.root == split.model
    assert manifest.scale == checkpoints.SCALE
    assert manifest.hash is not None
    split.fails("s0.safetensors needs to exist")  # without the path


def test_shards_on_several_drives_and_the_rest_at_home(split: Split) -> None:
    split.move(3, split.b)
    split.move(1, split.a)
    (manifest,) = tables(split.model, table_paths=[split.a, str(split.b)])
    assert folders(manifest) == ["model", "a", "model", "b"]
    assert np.array_equal(split.rows(split.a, split.b), split.table)
    # whole files may be named instead of folders
    files = [next(folder.iterdir()) for folder in (split.b, split.a)]
    assert np.array_equal(split.rows(*files), split.table)


def test_a_copy_is_read_instead_of_the_model_s_own(split: Split) -> None:
    # the copy has other rows: only so it can be told which one was read
    other = checkpoints.table_bytes(64, checkpoints.TINY_WIDTH, seed=6)
    write_file(split.a / "one.safetensors", [*shards(other, [16] * 4), *split.constants], gap=7)
    assert np.array_equal(split.rows(split.a), other)
    assert np.array_equal(split.rows(), split.table)


def test_a_part_of_a_copy(split: Split) -> None:
    other = checkpoints.table_bytes(64, checkpoints.TINY_WIDTH, seed=6)
    write_file(split.a / "some.safetensors", shards(other, [16] * 4)[1:3])
    expected = np.concatenate([split.table[:16], other[16:48], split.table[48:]])
    assert np.array_equal(split.rows(split.a), expected)


def test_the_whole_model_s_copy_will_do(split: Split) -> None:
    shutil.copytree(split.model, split.a, dirs_exist_ok=True)
    for number in range(4):
        (split.model / f"s{number}.safetensors").unlink()
    assert np.array_equal(split.rows(split.a), split.table)


def test_the_model_itself_as_a_table_path(split: Split) -> None:
    assert np.array_equal(split.rows(split.model), split.table)


def test_a_model_without_index_or_table(split: Split) -> None:
    (split.model / "model.safetensors.index.json").unlink()
    for number in range(4):
        split.move(number, split.a)
    assert np.array_equal(split.rows(split.a), split.table)
    # the scale may come along
    write_file(split.model / "w.safetensors", [WEIGHT])
    write_file(split.a / "c.safetensors", split.constants)
    assert np.array_equal(split.rows(split.a), split.table)


def test_a_single_file_as_model(split: Split) -> None:
    write_file(split.model / "all.safetensors", [*split.shards, *split.constants])
    other = checkpoints.table_bytes(64, checkpoints.TINY_WIDTH, seed=6)
    write_file(split.a / "rows.safetensors", shards(other, [16] * 4))
    with RowStore.open(split.model / "all.safetensors", table_paths=[split.a]) as store:
        assert np.array_equal(store.gather(IDS), other)


def test_pointers_in_the_place_of_shards(split: Split) -> None:
    for number in range(4):
        split.move(number, split.a)
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
        (split.model / f"s{number}.safetensors").write_bytes(pointer)
    assert np.array_equal(split.rows(split.a), split.table)
    (split.a / "s2.safetensors").unlink()
    split.fails(r"shard_2\.weight needs to be in s2\.safetensors .*Git LFS pointer", split.a)


# --- refused


def test_a_shard_that_is_nowhere(split: Split) -> None:
    for number in range(4):
        split.move(number, split.a)
    (split.a / "s1.safetensors").unlink()
    split.fails(
        r"shard_1\.weight needs to be in s1\.safetensors or in a table path, as "
        r"model\.safetensors\.index\.json has it, found nowhere",
        split.a,
    )


@pytest.mark.parametrize("place", ["absent", "empty", "weights"])
def test_a_path_without_rows(split: Split, tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    if place != "absent":
        path.mkdir()
    if place == "weights":
        write_file(path / "w.safetensors", [WEIGHT, *split.constants])
    need = "a folder" if place == "absent" else "tensors like layers.<layer>.ple"
    split.fails(f"{place} needs {need}", path)


def test_the_same_file_twice(split: Split) -> None:
    shutil.copy(split.model / "s0.safetensors", split.a)
    (split.b / "s.safetensors").symlink_to(split.a / "s0.safetensors")
    match = r"shard_0\.weight needs a file of its own for each copy, found also .*/a/s0"
    split.fails(match, split.a, split.a)
    split.fails(match, split.a, split.b)


def test_constants_may_come_twice_when_they_agree(split: Split) -> None:
    for number, folder in ((0, split.a), (1, split.b)):
        write_file(folder / "part.safetensors", [split.shards[number], *split.constants])
    assert np.array_equal(split.rows(split.a, split.b), split.table)


def test_another_type_of_rows(split: Split) -> None:
    table = checkpoints.table_bytes(16, checkpoints.TINY_WIDTH * 2)
    write_file(split.a / "s.safetensors", shards(table, [16], dtype="BF16"))
    split.fails(r"shard_0\.weight dtype needs F8_E4M3 as in .*/model/s0\.safetensors", split.a)


def test_another_cut_of_the_rows(split: Split) -> None:
    write_file(split.a / "s.safetensors", shards(split.table, [32, 32]))
    split.fails(r"shard_0\.weight shape needs \[16, 6\] as in .*, found \[32, 6\]", split.a)


@pytest.mark.parametrize("number", range(4))
def test_other_constants(split: Split, number: int) -> None:
    changed = list(split.constants)
    data = bytearray(changed[number].data or b"")
    data[0] ^= 1
    changed[number] = changed[number]._replace(data=bytes(data))
    write_file(split.a / "part.safetensors", [split.shards[0], *changed])
    name = changed[number].name.rsplit(".", 1)[1]
    split.fails(f"{name} value needs [0-9a-f]+ as in .*, found [0-9a-f]+", split.a)


def test_a_table_of_another_size_without_the_model_s_own(split: Split) -> None:
    # the index has no names to compare with: the config has the rows
    checkpoints.write_index(split.model, {WEIGHT.name: "w.safetensors"})
    for number in range(4):
        split.move(number, split.b)
    write_file(split.a / "s.safetensors", shards(split.table[:48], [16] * 3))
    split.fails("rows needs 64, found 48", split.a)


def test_what_a_table_must_not_have_is_refused_there_too(split: Split) -> None:
    odd = Array(f"{checkpoints.root()}.ngram_embedding.shard_0.weight_scale", "F32", (1,), bytes(4))
    write_file(split.a / "s.safetensors", [split.shards[0], odd])
    split.fails("one scale for the whole table", split.a)


def test_the_index_tells_which_of_two_copies_in_a_folder_counts(split: Split) -> None:
    other = checkpoints.table_bytes(64, checkpoints.TINY_WIDTH, seed=6)
    write_file(split.model / "consolidated.safetensors", shards(other, [16] * 4))
    write_file(split.a / "s0.safetensors", [split.shards[0]])
    assert np.array_equal(split.rows(split.a), split.table)
    write_file(split.a / "again.safetensors", [split.shards[0]])
    split.fails(r"needs one file, found also again\.safetensors", split.a)


# --- names and roles


def test_roles_of_names() -> None:
    (family,) = FAMILIES
    root = checkpoints.root()
    rows = ["ngram_embedding.shard_0.weight", "ngram_embedding.shards.12.weight"]
    for part in (*rows, "ngram_embedding.weight"):
        assert family.role(f"{root}.{part}") == "rows"
    constants = ["layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes"]
    for part in (*constants, "ngram_embedding.weight_scale"):
        assert family.role(f"{root}.{part}") == "constant"
    for name in (f"{root}.other", "lm_head.weight", f"{root}.ngram_embedding.shard_x.weight"):
        assert family.role(name) is None


def test_names_in_an_index(split: Split) -> None:
    found = indexed_tensors(split.model, FAMILIES[0].marker)
    assert found == {
        array.name: name
        for name, arrays in split.files.items()
        for array in arrays
        if array is not WEIGHT
    }


# --- the commands and the model


def test_inspect(split: Split, capsys: pytest.CaptureFixture[str]) -> None:
    split.move(2, split.a)
    split.move(3, split.b)
    options = ["--table-path", str(split.a), "--table-path", str(split.b)]
    assert main(["inspect", str(split.model), *options]) == 0
    out = capsys.readouterr().out
    for text in (
        f"2 shards in 2 files of {split.model}\n",
        f"1 shard in 1 file of {split.a}\n",
        f"1 shard in 1 file of {split.b}\n",
    ):
        assert text in out
    assert main(["inspect", str(split.model), *options, "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["root"] == str(split.model)
    assert [Path(file["path"]).parent.name for file in table["files"]] == [
        *("model", "model", "a", "b")
    ]


def test_a_model_whose_table_lies_elsewhere(
    synth_checkpoint: Path, synth_model: Any, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    from rowstream.engines.transformers import close, load_model, stores

    model, drive = tmp_path / "model", tmp_path / "drive"
    shutil.copytree(synth_checkpoint, model)
    drive.mkdir()
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    names: dict[str, list[str]] = {}
    for tensor, name in index.items():
        names.setdefault(name, []).append(tensor)
    moved = [n for n, held in names.items() if all("ngram_embedding.shard" in t for t in held)]
    assert len(moved) > 20
    for name in moved:
        shutil.move(model / name, drive / name)
    loaded = load_model(model, table_paths=[drive])
    try:
        assert loaded.name_or_path == loaded.config.name_or_path == str(model)
        paths = {file.path.parent for file in stores(loaded)[0].manifest.files}
        assert drive in paths
        tokens = torch.tensor([[5, 6, 7, 8, 5, 6, 9]])
        with torch.no_grad():
            assert torch.equal(loaded(tokens).logits, synth_model(tokens).logits)
    finally:
        close(loaded)
    # a file that holds more than the table cannot be done without
    weights = next(n for n, held in names.items() if "lm_head.weight" in held)
    shutil.move(model / weights, drive / weights)
    with pytest.raises(ManifestError, match=rf"{weights} needs a file.*lm_head\.weight, which is"):
        load_model(model, table_paths=[drive])


def test_a_model_with_all_its_files_is_loaded_from_where_it_is(split: Split) -> None:
    from rowstream.engines.loadable import loadable

    with loadable(split.model) as folder:
        assert folder == split.model
    # of one file, without an index
    (split.model / "model.safetensors.index.json").unlink()
    split.move(0, split.a)
    with loadable(split.model) as folder:
        assert folder == split.model
