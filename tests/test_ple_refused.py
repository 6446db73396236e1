"""Tables that are refused: for their tensors, their scale or their hash constants."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from checkpoints import (
    FILE,
    SCALE,
    Array,
    hash_buffers,
    int64,
    root,
    scale,
    write_config,
    write_file,
    write_tiny,
)
from ple_checkpoints import fused, named, refused, tiny_shards
from rowstream.catalog import tables

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
        (lambda held: [*held, fused((64, 6))], "either shards or one tensor"),
        (lambda held: [held[0], fused((63, 6))], "rows needs 64, found 63"),
        (lambda held: [held[0], fused((64, 5))], "row width needs 6, found 5"),
        (lambda held: [held[0], fused((384,))], "shape needs rows and row width"),
        (lambda held: [*held[:4], _shard(3, 16, width=5)], "row width needs 6, found 5"),
        (lambda held: [*held[:4], _shard(3, 16, dtype="BF16")], "dtype needs F8_E4M3 as the first"),
        (
            lambda held: [fused((64, 6), "U8")],
            "dtype needs F8_E4M3 or BF16 or F16 or F32, found U8",
        ),
        (
            lambda held: [held[0], fused((64, 6), "BF16")],
            "needs F8_E4M3 codes beside it, found BF16",
        ),
        (lambda held: [*held, named("shard_0.weight_scale")], "one scale for the whole table"),
        (lambda held: [*held, named("shards.0.weight_scale_2")], "one scale for the whole table"),
        (lambda held: [*held, named("biases")], "a part of an unknown packing"),
        (lambda held: [*held, named("weight_scale_inv")], "a part of an unknown packing"),
        (lambda held: [*held, _other_prefix(held[1])], "needs one table for layer 1"),
        (lambda held: [*held, _other_layer(held[1])], "needs 3 in ple_layer_ids"),
    ],
)
def test_tables_that_are_not_whole_are_refused(
    tmp_path: Path, change: Callable[[list[Array]], list[Array]], message: str
) -> None:
    write_config(tmp_path)
    write_file(tmp_path / FILE, change([scale(), *tiny_shards()]))
    error = refused(tmp_path, message)
    assert error.tensor is not None
    assert error.tensor in str(error)


def _shard(
    shard: int, rows: int, *, width: int = 6, dtype: str = "F8_E4M3", style: str = "shard_{}"
) -> Array:
    return named(f"{style.format(shard)}.weight", dtype, (rows, width))


def _other_prefix(array: Array) -> Array:
    return array._replace(name=array.name.replace("model.language_model.", "model."))


def _other_layer(array: Array) -> Array:
    return array._replace(name=array.name.replace("layers.1.", "layers.2."))


@pytest.mark.parametrize("which", [0, 1, 5], ids=["scale", "shard", "buffer"])
def test_a_tensor_in_two_files_is_refused(tmp_path: Path, which: int) -> None:
    arrays = [scale(), *tiny_shards(), *hash_buffers()]
    write_config(tmp_path)
    write_file(tmp_path / "a.safetensors", arrays)
    write_file(tmp_path / "b.safetensors", [arrays[which]])
    error = refused(tmp_path, "needs one file, found also a.safetensors")
    assert (error.file, error.tensor) == ("b.safetensors", arrays[which].name)


def test_a_layer_that_the_config_names_must_have_its_table(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    write_config(tmp_path, ple_layer_ids=[2, 6])
    refused(tmp_path, r"config.json: ple_layer_ids 6 needs a table in layer 5, found .*\[1\]")


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
    write_file(tmp_path / FILE, [*tiny_shards(), stored])
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
    write_file(tmp_path / FILE, [stored, *tiny_shards()])
    error = refused(tmp_path, message)
    assert (error.file, error.tensor) == (FILE, stored.name)


# what is refused: hash constants


@pytest.mark.parametrize("buffer", [0, 1, 2])
def test_stored_constants_that_disagree_are_refused(tmp_path: Path, buffer: int) -> None:
    write_config(tmp_path)
    stored = hash_buffers()
    values = np.frombuffer(stored[buffer].data or b"", "<i8").tolist()
    values[-1] += 2
    stored[buffer] = int64(stored[buffer].name, values)
    write_file(tmp_path / FILE, [scale(), *tiny_shards(), *stored])
    error = refused(tmp_path, rf"\[{len(values) - 1}\] needs {values[-1] - 2}, found {values[-1]}")
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
    write_file(tmp_path / FILE, [scale(), *tiny_shards(), stored])
    refused(tmp_path, message)


@pytest.mark.parametrize("values", [[11, 13, 17, 24], [0, 13], [-5, 13], [2**62, 2**62]])
def test_without_a_config_stored_sizes_must_fit_the_rows(tmp_path: Path, values: list[int]) -> None:
    stored = int64(f"{root()}.ngram_heads_vocab_sizes", values)
    write_file(tmp_path / FILE, [scale(), *tiny_shards(), stored])
    refused(tmp_path, "needs sizes that fit 64 rows")
