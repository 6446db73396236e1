"""The derivation and the reader that share nothing with what they check."""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import checkpoints
from rowstream import catalog
from rowstream.errors import ManifestError
from rowstream.verify import Check, verify
from rowstream.verify.second_hash import derive, token_rows
from rowstream.verify.second_path import SecondPath
from verify.layouts import LAYOUTS, Table, table_of, write_layout
from verify.reports import failed


def test_the_second_derivation_gives_the_released_constants() -> None:
    # the buffers of the released checkpoint
    config = {"model_type": "qwen4_exp", "eos_token_id": 1, "text_config": {
        "eos_token_id": [248_044, 248_046], "ple_layer_ids": [2], "ple_embed_dim": 2560,
    }}  # fmt: skip
    constants = derive(config, "model.language_model.layers.1.ple.ple_embedding.ngram_embedding")
    assert constants.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert constants.sizes[:4] == (20000003, 20000023, 20000033, 20000047)
    assert constants.sizes[-1] == 20000171
    assert constants.offsets[-1] == 300001275
    assert (constants.num_rows, constants.row_values) == (320_001_536, 160)
    rows = token_rows(constants, [248_044, 248_044, 1, 2])
    assert (rows[0], rows[8], rows[15]) == (15220011, 170367010, 311569748)
    ended = token_rows(constants, [10, 11, 248_044, 12])
    assert (ended[0], ended[8]) == (10272144, 166704986)
    # nothing before the start reads as the end
    assert token_rows(constants, [1, 2]) == rows


@pytest.mark.parametrize("layer", [1, 5])
def test_the_second_derivation_gives_the_tiny_constants(layer: int) -> None:
    config = {**checkpoints.TINY_CONFIG, "ple_layer_ids": [6, 2, 2]}
    constants = derive(config, f"{checkpoints.root(layer)}.ngram_embedding")
    assert list(constants.multipliers) == checkpoints.TINY_MULTIPLIERS[layer]
    assert list(constants.sizes) == checkpoints.TINY_SIZES[layer]
    assert list(constants.offsets) == checkpoints.TINY_OFFSETS[layer]
    assert constants.num_rows == checkpoints.TINY_ROWS[layer]


def test_the_second_path_reads_single_rows_and_spans(tmp_path: Path) -> None:
    table = table_of("F8_E4M3")
    write_layout(tmp_path, table, **LAYOUTS["eleven shards by name"])
    with SecondPath(tmp_path, f"{checkpoints.root()}.ngram_embedding") as second:
        assert (second.num_rows, second.num_files, second.row_bytes) == (64, 3, 6)
        assert second.scale == checkpoints.SCALE
        ids = [63, 0, 6, 5, 60, 59, 0]
        assert np.array_equal(second.rows(ids), table[ids])
        for first, count in [(0, 64), (5, 2), (11, 40), (63, 1)]:
            assert np.array_equal(second.span(first, count), table[first : first + count])


def test_the_second_path_follows_a_whole_index_and_looks_past_a_filtered_one(
    tmp_path: Path,
) -> None:
    table = table_of("F8_E4M3")
    write_layout(tmp_path, table, files=2)
    prefix = f"{checkpoints.root()}.ngram_embedding"
    (tmp_path / "junk.safetensors").write_bytes(b"\xff" * 20)
    (tmp_path / "short.safetensors").write_bytes(b"12")
    checkpoints.write_index(tmp_path, {f"{prefix}.shard_0.weight": "model-0.safetensors"})
    with SecondPath(tmp_path, prefix) as second:
        assert np.array_equal(second.span(0, 64), table)
    # a second copy of everything is no doubt where the index names one
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / "model-0.safetensors").read_bytes())
    with pytest.raises(ManifestError, match="also in"):
        SecondPath(tmp_path, prefix)
    names = [f"{prefix}.shard_{shard}.weight" for shard in range(4)]
    places = {name: f"model-{int(shard > 0)}.safetensors" for shard, name in enumerate(names)}
    checkpoints.write_index(tmp_path, places)
    with SecondPath(tmp_path, prefix) as second:
        assert np.array_equal(second.span(0, 64), table)
    assert failed(verify(tmp_path)) == set()


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ([0, 2], r"shards needs 0, 1, 2, \.\.\., found \[0, 2\]"),
        ([], "shards needs"),
    ],
)
def test_the_second_path_refuses_what_is_incomplete(
    tmp_path: Path, arrays: list[int], text: str
) -> None:
    shards = checkpoints.shards(table_of("F8_E4M3"), [16] * 4)
    kept = [shards[i] for i in arrays]
    checkpoints.write_file(tmp_path / "model.safetensors", [checkpoints.scale(), *kept])
    with pytest.raises(ManifestError, match=text):
        SecondPath(tmp_path, f"{checkpoints.root()}.ngram_embedding")


def refused(tmp_path: Path, arrays: Sequence[checkpoints.Array], text: str) -> None:
    checkpoints.write_file(tmp_path / "model.safetensors", arrays)
    with pytest.raises(ManifestError, match=text):
        SecondPath(tmp_path, f"{checkpoints.root()}.ngram_embedding")


def test_the_second_path_refuses_what_does_not_fit_together(tmp_path: Path) -> None:
    scale = checkpoints.scale()
    first, second = checkpoints.shards(table_of("F8_E4M3"), [32, 32])
    dots = checkpoints.shards(table_of("F8_E4M3"), [32, 32], style="shards.{}")
    refused(tmp_path, [scale, first, second, dots[1]], "one tensor for shard 1")
    refused(tmp_path, [scale, first, second._replace(dtype="U8")], r"F8_E4M3 \[rows, 6\]")
    refused(tmp_path, [scale, first, second._replace(shape=(64, 3))], r"F8_E4M3 \[rows, 6\]")
    refused(tmp_path, [scale, first._replace(dtype="U8")], "a known type, found U8")
    odd = first._replace(name=first.name.replace("shard_0", "part_0"))
    refused(tmp_path, [scale, odd], "a number")
    bytes_of_scale = scale._replace(dtype="U8", data=b"1")
    refused(tmp_path, [bytes_of_scale, first, second], "a scale or constants")
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ManifestError, match="shards"):
        SecondPath(tmp_path, f"{checkpoints.root()}.ngram_embedding")


def test_a_scale_that_is_not_finite(tiny: tuple[Path, Table]) -> None:
    from rowstream.verify.checks import scale

    folder, table = tiny
    (manifest,) = catalog.tables(folder)
    infinite = checkpoints.scale()._replace(data=struct.pack("<H", 0x7F80))
    path = folder / "model-0.safetensors"
    checkpoints.write_file(path, [infinite, *checkpoints.shards(table, [64])])
    with SecondPath(folder, manifest.tensor) as second:
        check = scale(dataclasses.replace(manifest, scale=float("inf")), second)
    assert check == Check("scale", "failed", "scale needs to be finite and positive, found inf")


def test_the_second_path_refuses_a_wrong_length_and_a_missing_scale(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    shards = checkpoints.shards(table_of("F8_E4M3"), [64])
    prefix = f"{checkpoints.root()}.ngram_embedding"
    checkpoints.write_file(path, shards)
    with pytest.raises(ManifestError, match="scale"):
        SecondPath(path, prefix)
    checkpoints.write_file(path, [checkpoints.scale(), *shards])
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(ManifestError, match=f"needs {size} bytes, found {size + 1}"):
        SecondPath(path, prefix)
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(ManifestError, match="header"):
        SecondPath(path, prefix)
