from __future__ import annotations

import contextlib
import json
import math
import random
import struct
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from checkpoints import (
    ITEM_BYTES,
    SCALE,
    TINY_CONFIG,
    TINY_MULTIPLIERS,
    TINY_OFFSETS,
    TINY_ROWS,
    TINY_SIZES,
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
    write_index,
    write_tiny,
)
from rowstream.catalog import tables
from rowstream.errors import ManifestError
from rowstream.manifest import Manifest

CODEC_OF = {"F8_E4M3": "fp8_e4m3", "BF16": "bf16", "F16": "f16", "F32": "f32"}
FILE = "model.safetensors"


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


def _tiny_shards(**keywords: Any) -> list[Array]:
    return shards(table_bytes(TINY_ROWS[1], TINY_WIDTH), [16] * 4, **keywords)


def _refused(folder: Path, message: str) -> ManifestError:
    with pytest.raises(ManifestError, match=message) as caught:
        tables(folder)
    assert "\n" not in str(caught.value)
    return caught.value


# what a checkpoint looks like


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
    arrays = [scale(), *_tiny_shards(), *hash_buffers()]
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
    write_file(tmp_path / FILE, [scale(), *_tiny_shards(), *stored])
    (manifest,) = tables(tmp_path)
    assert manifest.hash is None
    assert (manifest.heads, manifest.groups) == ((4, (4,)) if stored else (1, (1,)))
    assert manifest.num_rows == 64


# what is refused: tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held[1:], "F8_E4M3 needs .*weight_scale, found nothing"),
        (lambda held: held[:1] + held[2:], "needs shard 0, found shard 1 next"),
        (lambda held: held[:2] + held[3:], "needs shard 1, found shard 2 next"),
        (lambda held: held[:4] + held[5:], "rows needs 64, found 48"),
        (lambda held: [*held, _shard(4, 16)], "rows needs 64, found 80"),
        (lambda held: [*held[:4], _shard(3, 8)], "rows needs 64, found 56"),
        (lambda held: [*held[:4], _shard(3, 17)], "rows needs 16 at most, found 17"),
        (lambda held: [*held[:4], _shard(3, 0)], "shape needs rows and row width"),
        (lambda held: [held[0], _shard(0, 15), *held[2:]], "rows needs 15, found 16"),
        (lambda held: [*held[:2], _shard(1, 15), *held[3:]], "rows needs 16, found 15"),
        (lambda held: [*held, _shard(3, 16, style="shards.{}")], "one tensor for a shard"),
        (lambda held: [*held, _shard(3, 16, style="shard_0{}")], "one tensor for a shard"),
        (lambda held: [*held, _fused((64, 6))], "either shards or one tensor"),
        (lambda held: [held[0], _fused((63, 6))], "rows needs 64, found 63"),
        (lambda held: [held[0], _fused((64, 5))], "row width needs 6, found 5"),
        (lambda held: [held[0], _fused((384,))], "shape needs rows and row width"),
        (lambda held: [*held[:4], _shard(3, 16, width=5)], "row width needs 6, found 5"),
        (lambda held: [*held[:4], _shard(3, 16, dtype="BF16")], "dtype needs F8_E4M3 as the first"),
        (
            lambda held: [_fused((64, 6), "U8")],
            "dtype needs F8_E4M3 or BF16 or F16 or F32, found U8",
        ),
        (
            lambda held: [held[0], _fused((64, 6), "BF16")],
            "needs F8_E4M3 codes beside it, found BF16",
        ),
        (lambda held: [*held, _named("shard_0.weight_scale")], "one scale for the whole table"),
        (lambda held: [*held, _named("shards.0.weight_scale_2")], "one scale for the whole table"),
        (lambda held: [*held, _named("biases")], "a part of an unknown packing"),
        (lambda held: [*held, _named("weight_scale_inv")], "a part of an unknown packing"),
        (lambda held: [*held, _other_prefix(held[1])], "needs one table for layer 1"),
        (lambda held: [*held, _other_layer(held[1])], "needs 3 in ple_layer_ids"),
    ],
)
def test_tables_that_are_not_whole_are_refused(
    tmp_path: Path, change: Callable[[list[Array]], list[Array]], message: str
) -> None:
    write_config(tmp_path)
    write_file(tmp_path / FILE, change([scale(), *_tiny_shards()]))
    error = _refused(tmp_path, message)
    assert error.tensor is not None
    assert error.tensor in str(error)


def _named(part: str, dtype: str = "F8_E4M3", shape: tuple[int, ...] = (1,)) -> Array:
    return Array(f"{root()}.ngram_embedding.{part}", dtype, shape)


def _shard(
    shard: int, rows: int, *, width: int = 6, dtype: str = "F8_E4M3", style: str = "shard_{}"
) -> Array:
    return _named(f"{style.format(shard)}.weight", dtype, (rows, width))


def _fused(shape: tuple[int, ...], dtype: str = "F8_E4M3") -> Array:
    return _named("weight", dtype, shape)


def _other_prefix(array: Array) -> Array:
    return array._replace(name=array.name.replace("model.language_model.", "model."))


def _other_layer(array: Array) -> Array:
    return array._replace(name=array.name.replace("layers.1.", "layers.2."))


@pytest.mark.parametrize("which", [0, 1, 5], ids=["scale", "shard", "buffer"])
def test_a_tensor_in_two_files_is_refused(tmp_path: Path, which: int) -> None:
    arrays = [scale(), *_tiny_shards(), *hash_buffers()]
    write_config(tmp_path)
    write_file(tmp_path / "a.safetensors", arrays)
    write_file(tmp_path / "b.safetensors", [arrays[which]])
    error = _refused(tmp_path, "needs one file, found also a.safetensors")
    assert (error.file, error.tensor) == ("b.safetensors", arrays[which].name)


def test_a_layer_that_the_config_names_must_have_its_table(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    write_config(tmp_path, ple_layer_ids=[2, 6])
    _refused(tmp_path, r"config.json: ple_layer_ids 6 needs a table in layer 5, found .*\[1\]")


# what is refused: the scale


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "value"),
    [
        ("BF16", (1,), b"\x51\x39", SCALE),
        ("BF16", (), b"\x51\x39", SCALE),
        ("F16", (1,), b"\x88\x0a", 0.00019931793212890625),
        ("F32", (), struct.pack("<f", 0.1), 0.10000000149011612),
        ("F32", (1,), struct.pack("<I", 1), 2.0**-149),
    ],
)
def test_the_scale_is_exact(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], data: bytes, value: float
) -> None:
    write_config(tmp_path)
    stored = scale()._replace(dtype=dtype, shape=shape, data=data)
    write_file(tmp_path / FILE, [*_tiny_shards(), stored])
    (manifest,) = tables(tmp_path)
    assert manifest.scale == value


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "message"),
    [
        ("F32", (1,), struct.pack("<f", math.nan), "a finite positive scale, found nan"),
        ("F32", (1,), struct.pack("<f", math.inf), "a finite positive scale, found inf"),
        ("BF16", (1,), b"\x80\x7f", "a finite positive scale, found inf"),
        ("F32", (), bytes(4), "a finite positive scale, found 0.0"),
        ("F32", (1,), struct.pack("<f", -1.0), "a finite positive scale, found -1.0"),
        ("F32", (64,), bytes(256), r"found \[64\] \(a scale for each row\)"),
        ("F32", (64, 1), bytes(256), r"found \[64, 1\] \(a scale for each row\)"),
        ("F32", (4,), bytes(16), r"needs \[\] or \[1\], found \[4\]"),
        ("F32", (0,), b"", r"needs \[\] or \[1\], found \[0\]"),
        ("F32", (1, 1), bytes(4), r"needs \[\] or \[1\]"),
        ("F8_E4M3", (1,), b"\x38", "dtype needs BF16 or F16 or F32, found F8_E4M3"),
        ("I64", (1,), bytes(8), "dtype needs BF16 or F16 or F32, found I64"),
    ],
)
def test_scales_of_another_kind_are_refused(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], data: bytes, message: str
) -> None:
    write_config(tmp_path)
    stored = scale()._replace(dtype=dtype, shape=shape, data=data)
    write_file(tmp_path / FILE, [stored, *_tiny_shards()])
    error = _refused(tmp_path, message)
    assert (error.file, error.tensor) == (FILE, stored.name)


# what is refused: hash constants


@pytest.mark.parametrize("buffer", [0, 1, 2])
def test_stored_constants_that_disagree_are_refused(tmp_path: Path, buffer: int) -> None:
    write_config(tmp_path)
    stored = hash_buffers()
    values = np.frombuffer(stored[buffer].data or b"", "<i8").tolist()
    values[-1] += 2
    stored[buffer] = int64(stored[buffer].name, values)
    write_file(tmp_path / FILE, [scale(), *_tiny_shards(), *stored])
    error = _refused(tmp_path, rf"\[{len(values) - 1}\] needs {values[-1] - 2}, found {values[-1]}")
    assert error.tensor == stored[buffer].name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (int64("", [11, 13, 17]), "values needs 4, found 3"),
        (Array("", "I64", (2, 2), bytes(32)), "shape needs"),
        (Array("", "I64", (), bytes(8)), "shape needs"),
        (Array("", "I64", (0,), b""), "shape needs"),
        (Array("", "I64", (10**6,)), "shape needs"),
        (Array("", "F32", (4,), bytes(16)), "dtype needs I64, found F32"),
    ],
)
def test_stored_constants_of_another_shape_are_refused(
    tmp_path: Path, values: Array, message: str
) -> None:
    write_config(tmp_path)
    stored = values._replace(name=f"{root()}.ngram_heads_vocab_sizes")
    write_file(tmp_path / FILE, [scale(), *_tiny_shards(), stored])
    _refused(tmp_path, message)


@pytest.mark.parametrize("values", [[11, 13, 17, 24], [0, 13], [-5, 13], [2**62, 2**62]])
def test_without_a_config_stored_sizes_must_fit_the_rows(tmp_path: Path, values: list[int]) -> None:
    stored = int64(f"{root()}.ngram_heads_vocab_sizes", values)
    write_file(tmp_path / FILE, [scale(), *_tiny_shards(), stored])
    _refused(tmp_path, "needs sizes that fit 64 rows")


# what is refused: the config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "qwen3"),
        ("model_type", None),
        ("model_type", ["qwen4_exp"]),
        ("ngram_size", 1),
        ("ngram_size", 9),
        ("ngram_size", True),
        ("ngram_size", 3.0),
        ("ngram_size", "3"),
        ("ngram_size", None),
        ("heads_per_ngram", 0),
        ("heads_per_ngram", -2),
        ("heads_per_ngram", 10**30),
        ("heads_per_ngram", 513),
        ("vocab_size", 0),
        ("vocab_size", 2**31 + 1),
        ("vocab_size", False),
        ("ngram_vocab_size_base", 0),
        ("ngram_vocab_size_base", 2**40 + 1),
        ("ngram_vocab_size_base", 1e9),
        ("make_ngram_vocab_size_divisible_by", 0),
        ("make_ngram_vocab_size_divisible_by", -8),
        ("make_ngram_vocab_size_divisible_by", 2**64),
        ("seed", 1.5),
        ("seed", None),
        ("seed", 2**63),
        ("ple_embed_dim", 26),
        ("ple_embed_dim", 0),
        ("ple_embed_dim", True),
        ("ple_embed_dim", 2**60),
        ("eos_token_id", ...),
        ("eos_token_id", None),
        ("eos_token_id", []),
        ("eos_token_id", [None, 7]),
        ("eos_token_id", "7"),
        ("eos_token_id", -1),
        ("eos_token_id", 50),
        ("eos_token_id", True),
        ("ple_layer_ids", ...),
        ("ple_layer_ids", None),
        ("ple_layer_ids", []),
        ("ple_layer_ids", 2),
        ("ple_layer_ids", [0]),
        ("ple_layer_ids", [True]),
        ("ple_layer_ids", [2.0]),
        ("ple_layer_ids", [2, 10**9]),
        ("ple_layer_ids", [[2]]),
        ("ple_layer_ids", list(range(1, 4000))),
        ("text_config", 3),
        ("text_config", None),
    ],
)
def test_nonsense_in_the_config_is_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    write_tiny(tmp_path)
    write_config(tmp_path, **{field: value})
    error = _refused(tmp_path, f"config.json: {field} needs ")
    assert error.file == "config.json"


def test_a_width_taken_from_hidden_size_is_named_so(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    write_config(tmp_path, ple_embed_dim=None, hidden_size=26)
    _refused(tmp_path, "config.json: hidden_size needs a multiple of 4 heads, found 26")


@pytest.mark.parametrize("dim", [None, ...])
def test_the_width_defaults_to_hidden_size(tmp_path: Path, dim: Any) -> None:
    write_tiny(tmp_path)
    write_config(tmp_path, ple_embed_dim=dim)
    assert len(tables(tmp_path)) == 1


def test_a_text_config_hides_what_the_top_level_repeats(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    document = {
        "model_type": "qwen4_exp",
        "ngram_size": 5,
        "eos_token_id": 3,
        "split_ngram_parts": 512,
        "text_config": {**TINY_CONFIG, "split_ngram_parts": 99},
    }
    (tmp_path / "config.json").write_text(json.dumps(document))
    (manifest,) = tables(tmp_path)
    assert manifest.hash is not None
    assert (manifest.hash.eos, manifest.hash.ngram_size) == (7, 3)
    del document["text_config"]["eos_token_id"]  # type: ignore[attr-defined]
    (tmp_path / "config.json").write_text(json.dumps(document))
    _refused(tmp_path, "eos_token_id needs")


def test_the_model_type_may_stand_at_the_top_level_alone(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    text = {key: value for key, value in TINY_CONFIG.items() if key != "model_type"}
    document = {"model_type": "qwen4_exp", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert len(tables(tmp_path)) == 1


def test_of_several_eos_the_first_is_hashed(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    write_config(tmp_path, eos_token_id=[9, 7, 3])
    (manifest,) = tables(tmp_path)
    assert manifest.hash is not None
    assert manifest.hash.eos == 9


def test_another_seed_is_caught_by_the_stored_multipliers(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    write_config(tmp_path, seed=1235)
    _refused(tmp_path, r"layer_multipliers \[0\] needs \d+, found 106616942423619041")


def test_the_defaults_of_the_config_are_those_of_the_released_model(tmp_path: Path) -> None:
    # every field but these is left out; the numbers are the released model's
    document = {
        "model_type": "qwen4_exp_text",
        "hidden_size": 2560,
        "ple_layer_ids": [2],
        "eos_token_id": 248_044,
    }
    (tmp_path / "config.json").write_text(json.dumps(document))
    arrays = [scale(), _fused((320_001_536, 160))]
    write_file(tmp_path / FILE, arrays)
    (manifest,) = tables(tmp_path)
    assert manifest.num_rows == 320_001_536
    assert (manifest.heads, manifest.row_values) == (16, 160)
    assert manifest.hash is not None
    assert manifest.hash.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert manifest.hash.vocab_size == 248_320


# damage


def _soundly(manifest: Manifest) -> tuple[object, ...]:
    return (
        manifest.planes,
        manifest.codec,
        manifest.scale,
        manifest.num_rows,
        manifest.hash,
        manifest.tensor,
    )


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_header_bytes_open_the_same_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    if not folder.exists():
        folder.mkdir()
    write_tiny(folder)
    (sound,) = tables(folder)
    path = folder / FILE
    content = bytearray(path.read_bytes())
    base = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, base - 1))
        length = data.draw(st.integers(0, 3))
        digits = st.sampled_from([b"0", b"9", b"1", b'"', b"{", b"}", b",", b"-", b"e"])
        content[at : at + length] = data.draw(digits | st.binary(max_size=3))
    path.write_bytes(content)
    try:
        (found,) = tables(folder)
    except ManifestError:
        return
    assert _soundly(found) == _soundly(sound)


_HOSTILE: list[Any] = [None, True, -1, 0, 1, 2**62, 2**63, 10**100, 1.5, 1e308, "", "x", [], {}]
_HOSTILE += [[2**62] * 9, [-1], [0, 0], [[[[]]]], {"dtype": "U8"}, "\ud800", "../x", "\x00"]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_hostile_values_in_a_header_open_the_same_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile"
    if not folder.exists():
        folder.mkdir()
    write_tiny(folder)
    (sound,) = tables(folder)
    path = folder / FILE
    content = path.read_bytes()
    base = 8 + struct.unpack("<Q", content[:8])[0]
    document = json.loads(content[8:base])
    node: Any = document
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(st.sampled_from(_HOSTILE))
    text = json.dumps(document, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[base:])
    try:
        (found,) = tables(folder)
    except ManifestError:
        return
    moved = len(text) + 8 - base  # the header has another length, so the data start elsewhere
    assert [extent.offset - moved for extent in found.planes[0].extents] == [
        extent.offset for extent in sound.planes[0].extents
    ]
    assert _soundly(found)[1:] == _soundly(sound)[1:]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_hostile_values_in_a_config_raise_manifest_errors_only(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "config"
    if not folder.exists():
        folder.mkdir()
        write_tiny(folder)
    fields = st.dictionaries(
        st.sampled_from(sorted(TINY_CONFIG)), st.sampled_from(_HOSTILE), max_size=3
    )
    changes = data.draw(fields)
    write_config(folder, **changes)
    with contextlib.suppress(ManifestError):
        tables(folder)
