"""Tables as a family's config and tensors describe them: every row is found where it lies."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from checkpoints import (
    FILE,
    ITEM_BYTES,
    SCALE,
    TINY_MULTIPLIERS,
    TINY_OFFSETS,
    TINY_ROWS,
    TINY_SIZES,
    TINY_WIDTH,
    Array,
    hash_buffers,
    root,
    scale,
    shards,
    table_bytes,
    write_config,
    write_file,
    write_index,
    write_tiny,
)
from ple_checkpoints import tiny_shards
from rowstream.catalog import tables
from rowstream.manifest import Manifest

CODEC_OF = {"F8_E4M3": "fp8_e4m3", "BF16": "bf16", "F16": "f16", "F32": "f32"}


def _rows(manifest: Manifest) -> NDArray[np.uint8]:
    """Read every row where the manifest says that it lies."""
    rows = np.zeros((manifest.num_rows, manifest.row_bytes), np.uint8)
    for extent in manifest.planes[0].extents:
        with manifest.files[extent.file].path.open("rb") as file:
            for row in range(extent.num_rows):
                file.seek(extent.offset + row * manifest.row_bytes)
                data = file.read(manifest.row_bytes)
                rows[extent.first_row + row] = np.frombuffer(data, np.uint8)
    return rows


def test_a_sound_checkpoint_is_described_in_full(tmp_path: Path) -> None:
    table = write_tiny(tmp_path)
    (manifest,) = tables(tmp_path)
    assert manifest.name == "layers.1.ple"
    assert manifest.tensor == ("model.language_model.layers.1.ple.ple_embedding.ngram_embedding")
    assert (manifest.layer, manifest.family, manifest.format) == (1, "ple", "safetensors")
    assert manifest.root == tmp_path
    assert (manifest.codec, manifest.scale) == ("fp8_e4m3", SCALE)
    assert (manifest.num_rows, manifest.row_values, manifest.row_bytes) == (64, 6, 6)
    assert (manifest.heads, manifest.groups) == (4, (2, 2))
    assert [plane.name for plane in manifest.planes] == ["codes"]
    assert [file.path for file in manifest.files] == [tmp_path / FILE]
    assert manifest.hash is not None
    assert list(manifest.hash.multipliers) == TINY_MULTIPLIERS[1]
    assert list(manifest.hash.sizes) == TINY_SIZES[1]
    assert list(manifest.hash.offsets) == TINY_OFFSETS[1]
    assert (manifest.hash.vocab_size, manifest.hash.eos) == (50, 7)
    assert np.array_equal(_rows(manifest), table)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_row_is_found_where_the_writer_put_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("layout")
    dtype = data.draw(st.sampled_from(sorted(CODEC_OF)), "dtype")
    width = data.draw(st.integers(1, 9), "width")
    layers = data.draw(st.sampled_from([[1], [1, 5]]), "layers")
    style = data.draw(st.sampled_from(["shard_{}", "shards.{}", "fused"]), "style")
    shuffle = random.Random(data.draw(st.integers(0, 2**32), "order")).shuffle
    row_bytes = width * ITEM_BYTES[dtype]

    written, arrays = {}, []
    for layer in layers:
        total = TINY_ROWS[layer]
        written[layer] = table_bytes(total, row_bytes, seed=layer)
        per_shard = -(-total // data.draw(st.integers(1, total), "parts"))
        counts = [per_shard] * (total // per_shard)
        counts += [total % per_shard] if total % per_shard else []
        if style == "fused":
            name = f"{root(layer)}.ngram_embedding.weight"
            arrays.append(Array(name, dtype, (total, width), written[layer].tobytes()))
        else:
            arrays += shards(written[layer], counts, dtype=dtype, style=style, layer=layer)
        arrays += [scale(layer)] if dtype == "F8_E4M3" else []
        arrays += hash_buffers(layer) if data.draw(st.booleans(), "buffers") else []
    arrays += [Array("lm_head.weight", "BF16", (3, 1), bytes(6))]

    shuffle(arrays)
    by_file: defaultdict[str, list[Array]] = defaultdict(list)
    for array in arrays:
        by_file[f"part-{data.draw(st.integers(0, 3))}.safetensors"].append(array)
    places: dict[str, tuple[str, int]] = {}
    for file, held in by_file.items():
        listed = list(range(len(held)))
        shuffle(listed)
        padding, gap = data.draw(st.integers(0, 40)), data.draw(st.sampled_from([0, 0, 1, 5]))
        at = write_file(folder / file, held, listed=listed, padding=padding, gap=gap)
        places.update({name: (file, offset) for name, offset in at.items()})
    keep = data.draw(st.sampled_from(["none", "all", "shards", "some"]), "index")
    if keep != "none":
        names = [name for name in places if keep != "shards" or ".ngram_embedding.s" in name]
        shuffle(names)
        names = names[: len(names) // 2] if keep == "some" else names
        write_index(folder, {name: places[name][0] for name in names})
    write_config(
        folder, ple_embed_dim=4 * width, ple_layer_ids=[layer + 1 for layer in reversed(layers)]
    )

    found = tables(folder)
    assert [manifest.layer for manifest in found] == layers
    for manifest in found:
        assert np.array_equal(_rows(manifest), written[manifest.layer])
        assert manifest.codec == CODEC_OF[dtype]
        assert manifest.scale == (SCALE if dtype == "F8_E4M3" else None)
        assert manifest.row_bytes == row_bytes
        for extent in manifest.planes[0].extents:
            at_start = (manifest.files[extent.file].path.name, extent.offset)
            held_by = [name for name, place in places.items() if place == at_start]
            assert any(name.startswith(manifest.tensor) for name in held_by)


def test_later_layers_go_on_with_the_primes_and_have_multipliers_of_their_own(
    tmp_path: Path,
) -> None:
    write_config(tmp_path, ple_layer_ids=[6, 2, 6, 2])
    for layer in (5, 1):
        table = table_bytes(TINY_ROWS[layer], TINY_WIDTH, seed=layer)
        arrays = [scale(layer), *shards(table, [table.shape[0]], layer=layer)]
        write_file(tmp_path / f"{layer}.safetensors", [*arrays, *hash_buffers(layer)])
    found = tables(tmp_path)
    assert [manifest.name for manifest in found] == ["layers.1.ple", "layers.5.ple"]
    for manifest in found:
        assert manifest.hash is not None
        assert list(manifest.hash.multipliers) == TINY_MULTIPLIERS[manifest.layer]
        assert list(manifest.hash.sizes) == TINY_SIZES[manifest.layer]
        assert manifest.num_rows == TINY_ROWS[manifest.layer]


def test_the_last_shard_may_be_shorter_as_transformers_writes_it(tmp_path: Path) -> None:
    table = table_bytes(64, TINY_WIDTH)
    write_config(tmp_path)
    write_file(tmp_path / FILE, [scale(), *shards(table, [13, 13, 13, 13, 12])])
    (manifest,) = tables(tmp_path)
    assert [extent.num_rows for extent in manifest.planes[0].extents] == [13, 13, 13, 13, 12]
    assert np.array_equal(_rows(manifest), table)


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model.", "a.b.layers.3.c."])
def test_any_prefix_before_the_layers_will_do(tmp_path: Path, prefix: str) -> None:
    write_config(tmp_path)
    arrays = [scale(), *tiny_shards(), *hash_buffers()]
    write_file(
        tmp_path / FILE,
        [
            array._replace(name=array.name.replace("model.language_model.", prefix))
            for array in arrays
        ],
    )
    (manifest,) = tables(tmp_path)
    assert manifest.tensor == f"{prefix}layers.1.ple.ple_embedding.ngram_embedding"


@pytest.mark.parametrize("folder_holds", ["nothing", "sizes"])
def test_without_a_config_rows_are_described_and_tokens_are_not(
    tmp_path: Path, folder_holds: str
) -> None:
    stored = hash_buffers() if folder_holds == "sizes" else []
    write_file(tmp_path / FILE, [scale(), *tiny_shards(), *stored])
    (manifest,) = tables(tmp_path)
    assert manifest.hash is None
    assert (manifest.heads, manifest.groups) == ((4, (4,)) if stored else (1, (1,)))
    assert manifest.num_rows == 64
