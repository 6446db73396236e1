"""Tables found through an index, through headers alone, or in a single file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import (
    INDEX,
    SCALE,
    TINY_ROWS,
    TINY_WIDTH,
    Array,
    hash_buffers,
    int64,
    root,
    scale,
    shards,
    table_bytes,
    write_config,
    write_file,
    write_header,
    write_index,
    write_tiny,
)
from rowstream.catalog import tables
from rowstream.errors import ManifestError


def _split_tiny(folder: Path) -> dict[str, str]:
    """Write a tiny checkpoint over several files and return the file of each of its tensors."""
    table = table_bytes(TINY_ROWS[1], TINY_WIDTH)
    held = {
        "a.safetensors": [*shards(table, [16] * 4)[:2]],
        "b.safetensors": [*shards(table, [16] * 4)[2:]],
        "scale.safetensors": [scale()],
        "rest.safetensors": [*hash_buffers(), Array("lm_head.weight", "U8", (1,), b"x")],
    }
    write_config(folder)
    for name, arrays in held.items():
        write_file(folder / name, arrays)
    return {array.name: name for name, arrays in held.items() for array in arrays}


def test_a_file_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    write_index(tmp_path, _split_tiny(tmp_path))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ManifestError, match=f"named by {INDEX}, found nothing") as caught:
        tables(tmp_path)
    assert caught.value.file == "b.safetensors"
    (tmp_path / "b.safetensors").symlink_to("gone")
    with pytest.raises(ManifestError, match=r"b.safetensors needs a file, found nothing"):
        tables(tmp_path)


@pytest.mark.parametrize(
    "keep",
    [
        lambda name: True,
        lambda name: "shard_" in name,
        lambda name: "shard_0" in name,
        lambda name: "scale" in name,
        lambda name: "layer_multipliers" in name,
        lambda name: "lm_head" in name,
        None,
    ],
    ids=["all", "shards", "one shard", "scale", "buffer", "no part", "no index"],
)
def test_a_filtered_index_hides_nothing(tmp_path: Path, keep: Callable[[str], bool] | None) -> None:
    files = _split_tiny(tmp_path)
    (expected,) = tables(tmp_path)
    if keep is not None:
        write_index(tmp_path, {name: file for name, file in files.items() if keep(name)})
    (manifest,) = tables(tmp_path)
    assert manifest == expected
    assert manifest.scale == SCALE


def test_the_index_is_no_proof(tmp_path: Path) -> None:
    files = _split_tiny(tmp_path)
    write_index(tmp_path, dict.fromkeys(files, "rest.safetensors"))
    assert len(tables(tmp_path)) == 1


def test_a_complete_index_keeps_other_files_out(tmp_path: Path) -> None:
    write_index(tmp_path, _split_tiny(tmp_path))
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())
    (tmp_path / "broken.safetensors").write_bytes(b"")
    assert len(tables(tmp_path)) == 1
    (tmp_path / INDEX).unlink()
    with pytest.raises(ManifestError, match="needs one file"):
        tables(tmp_path)


def test_stored_constants_in_another_file_are_compared(tmp_path: Path) -> None:
    files = _split_tiny(tmp_path)
    write_file(
        tmp_path / "rest.safetensors",
        [int64(f"{root()}.ngram_heads_offsets", [0, 11, 24, 42])],
    )
    for written in (files, None):
        if written is None:
            (tmp_path / INDEX).unlink()
        else:
            write_index(tmp_path, written)
        with pytest.raises(ManifestError, match="needs 41, found 42"):
            tables(tmp_path)


def test_a_single_file_is_a_checkpoint(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / "broken.safetensors").write_bytes(b"")
    (from_file,) = tables(tmp_path / "model.safetensors")
    (from_folder,) = tables(tmp_path)
    assert from_file == from_folder
    assert from_file.hash is not None
    other = tmp_path / "other.safetensors"
    write_file(other, [Array("w", "U8", (1,), b"x")])
    with pytest.raises(ManifestError, match=r"other.safetensors needs tensors like .* found none"):
        tables(other)


def test_a_folder_without_a_table_says_what_was_looked_for(tmp_path: Path) -> None:
    message = (
        r"needs tensors like layers.<layer>.ple.ple_embedding.ngram_embedding.shard_<n>.weight"
    )
    with pytest.raises(ManifestError, match=message + ", found none in 0 .safetensors files"):
        tables(tmp_path)
    write_config(tmp_path, model_type="llama")
    write_file(tmp_path / "a.safetensors", [Array("w", "U8", (1,), b"x")])
    with pytest.raises(ManifestError, match=message + ", found none in 1 .safetensors file"):
        tables(tmp_path)
    # stripped of its table, a checkpoint may keep the constants and the scale
    write_config(tmp_path)
    write_file(tmp_path / "a.safetensors", [*hash_buffers(), scale()])
    with pytest.raises(ManifestError, match=message):
        tables(tmp_path)


def test_a_broken_file_is_named_when_the_others_make_no_table(tmp_path: Path) -> None:
    _split_tiny(tmp_path)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / "b.safetensors").write_bytes(pointer)
    message = r"rows needs 64, found 32; b.safetensors needs tensors, found a Git LFS pointer"
    with pytest.raises(ManifestError, match=message):
        tables(tmp_path)
    for name in ("a", "scale", "rest"):
        (tmp_path / f"{name}.safetensors").write_bytes(pointer)
    with pytest.raises(ManifestError, match=r"found none .*; a.safetensors .* a Git LFS pointer"):
        tables(tmp_path)


def test_files_without_a_part_of_a_table_are_not_parsed(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    write_header(tmp_path / "other.safetensors", b'{"w": nonsense')
    assert len(tables(tmp_path)) == 1
    write_header(tmp_path / "other.safetensors", b'{"x.ple_embedding.y": nonsense')
    with pytest.raises(ManifestError, match=r"other.safetensors needs a JSON object"):
        tables(tmp_path)
