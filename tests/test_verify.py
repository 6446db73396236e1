"""verify against checkpoints whose every byte is known, and against ones that lie in one place."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import checkpoints
from rowstream import RowStore, catalog
from rowstream.cli import main
from rowstream.errors import ManifestError, ReadError, UnavailableError
from rowstream.hashing import ngram_row_ids
from rowstream.manifest import Manifest
from rowstream.synth import write_checkpoint
from rowstream.verify import Check, Report, verify
from rowstream.verify.checksums import read_file
from rowstream.verify.second_hash import derive, token_rows
from rowstream.verify.second_path import SecondPath

Capture = pytest.CaptureFixture[str]
Table = NDArray[np.uint8]

MIB = 1 << 20


def found(report: Report, table: int = 0) -> dict[str, Check]:
    """The checks of a table by name; each has a name of its own."""
    checks = {check.name: check for check in report.tables[table].checks}
    assert len(checks) == len(report.tables[table].checks)
    return checks


def failed(report: Report) -> set[str]:
    checks = [check for table in report.tables for check in table.checks]
    names = {check.name for check in checks if check.status == "failed"}
    assert report.sound == (not names)
    assert all("\n" not in check.text for check in checks)
    return names


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def write_layout(
    folder: Path,
    table: Table,
    *,
    counts: Sequence[int] = (16, 16, 16, 16),
    dtype: str = "F8_E4M3",
    style: str = "shard_{}",
    files: int = 1,
    scale_after: bool = False,
    **options: Any,
) -> None:
    """Write a tiny checkpoint of a table in one of many layouts."""
    folder.mkdir(exist_ok=True)
    checkpoints.write_config(folder)
    arrays = checkpoints.shards(table, counts, dtype=dtype, style=style)
    extra = checkpoints.hash_buffers()
    if dtype == "F8_E4M3":
        extra.append(checkpoints.scale())
    # by name: shard_10 before shard_2
    arrays.sort(key=lambda array: array.name)
    arrays = [*arrays, *extra] if scale_after else [*extra, *arrays]
    per_file = -(-len(arrays) // files)
    for number in range(files):
        part = arrays[number * per_file : (number + 1) * per_file]
        checkpoints.write_file(folder / f"model-{number}.safetensors", part, **options)


def table_of(dtype: str, *, seed: int = 0) -> Table:
    """A table of 64 rows of six values, all finite."""
    width = checkpoints.TINY_WIDTH * checkpoints.ITEM_BYTES[dtype]
    table: Table = checkpoints.table_bytes(64, width, seed) & np.uint8(0x3F)
    return table


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Path, Table]:
    """A checkpoint of 64 rows of 6 bytes in four shards, and its table."""
    table = table_of("F8_E4M3")
    write_layout(tmp_path / "tiny", table)
    return tmp_path / "tiny", table


@pytest.fixture
def synth(tmp_path: Path) -> Path:
    """A synthetic checkpoint of 4,096 rows or so that a test may damage."""
    folder = tmp_path / "synth"
    write_checkpoint(folder, base=250)
    return folder


def change_manifests(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Manifest], Manifest]
) -> None:
    """Make rowstream's own reading of every checkpoint wrong."""
    real = catalog.tables
    monkeypatch.setattr(catalog, "tables", lambda path: [change(m) for m in real(path)])


# --- sound


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dots": {"style": "shards.{}"},
    "short last": {"counts": [21, 21, 21, 1]},
    "one shard": {"counts": [64]},
    "eleven shards by name": {"counts": [6] * 10 + [4], "files": 3, "scale_after": True},
    "odd offsets": {"padding": 3, "gap": 5, "separators": None, "metadata": {"format": "pt"}},
    "split": {"files": 4},
}


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "F16", "F32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_sound(tmp_path: Path, layout: str, dtype: str) -> None:
    table = table_of(dtype)
    write_layout(tmp_path, table, dtype=dtype, **LAYOUTS[layout])
    report = verify(tmp_path, full=True)
    checks = found(report)
    assert failed(report) == set()
    assert {name for name, check in checks.items() if check.status == "skipped"} == (
        set() if dtype == "F8_E4M3" else {"scale"}
    )
    assert not any(check.status == "warning" for check in checks.values())
    checksums = report.tables[0].checksums
    assert checksums is not None
    assert checksums.table == hashlib.sha256(table.tobytes()).hexdigest()
    counts = LAYOUTS[layout].get("counts", [16] * 4)
    borders = np.cumsum(counts)[:-1]
    assert checksums.shard_rows == tuple(counts)
    assert checksums.shards == tuple(
        hashlib.sha256(part.tobytes()).hexdigest() for part in np.split(table, borders)
    )
    assert checks["full"].text == f"64 rows, sha256 {checksums.table}"
    assert "3 stored buffers" in checks["constants"].text


def test_a_fused_table_is_sound_and_the_same(tiny: tuple[Path, Table], tmp_path: Path) -> None:
    folder, table = tiny
    fused = tmp_path / "fused"
    fused.mkdir()
    checkpoints.write_config(fused)
    name = f"{checkpoints.root()}.ngram_embedding.weight"
    whole = checkpoints.Array(name, "F8_E4M3", table.shape, table.tobytes())
    checkpoints.write_file(fused / "model.safetensors", [whole, checkpoints.scale()])
    report = verify(fused, against=folder, full=True)
    assert failed(report) == set()
    checks = found(report)
    assert "stores none" in checks["constants"].text
    assert checks["against full"].text.startswith("64 rows: ")


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("sparse", [False, True])
def test_synthetic_layouts_are_sound_and_hold_the_same_table(
    tmp_path: Path, dtype: str, sparse: bool
) -> None:
    for layout in ("qwen", "radixark"):
        folder = tmp_path / layout
        write_checkpoint(folder, base=250, dtype=dtype, layout=layout, sparse=sparse)
    report = verify(tmp_path / "qwen", against=tmp_path / "radixark", full=True)
    assert failed(report) == set()
    (table,) = report.tables
    stored = json.loads((tmp_path / "qwen" / "synth.json").read_text())
    checks = found(report)
    rows = f"{stored['num_rows']:,} rows: "
    for name in ("rows synth", "against rows", "full synth", "against full", "against hash"):
        assert checks[name].status == "ok"
    assert checks["full synth"].text.startswith(rows)
    assert checks["against full"].text.startswith(rows)
    assert checks["against identity"].text.startswith("10 files")
    other = verify(tmp_path / "radixark", full=True)
    assert table.checksums is not None
    assert table.checksums == other.tables[0].checksums


def test_every_table_is_verified_or_the_one_named(tmp_path: Path) -> None:
    checkpoints.write_config(tmp_path, ple_layer_ids=[6, 2])
    digests = {}
    for layer, rows in checkpoints.TINY_ROWS.items():
        table = checkpoints.table_bytes(rows, checkpoints.TINY_WIDTH, layer) & np.uint8(0x3F)
        arrays = [*checkpoints.shards(table, [rows], layer=layer), checkpoints.scale(layer)]
        arrays += checkpoints.hash_buffers(layer)
        checkpoints.write_file(tmp_path / f"layer-{layer}.safetensors", arrays)
        digests[f"layers.{layer}.ple"] = hashlib.sha256(table.tobytes()).hexdigest()
    report = verify(tmp_path, full=True, seed=1)
    assert failed(report) == set()
    assert {t.name: t.checksums and t.checksums.table for t in report.tables} == digests
    single = verify(tmp_path, full=True, seed=1, table="layers.5.ple")
    assert single.tables == report.tables[1:]
    with pytest.raises(ValueError, match=r"layers\.1\.ple, layers\.5\.ple, got 'x'"):
        verify(tmp_path, table="x")


def test_a_single_file_and_a_checkpoint_without_a_config(tiny: tuple[Path, Table]) -> None:
    folder, _ = tiny
    assert failed(verify(folder / "model-0.safetensors", full=True)) == set()
    (folder / "config.json").unlink()
    report = verify(folder)
    assert failed(report) == set()
    checks = found(report)
    assert checks["constants"].status == checks["tokens"].status == "skipped"
    assert "no config.json" in checks["tokens"].text
    assert report.count("skipped") == 2


def test_codes_that_are_nan_are_counted_and_only_warned_of(tmp_path: Path) -> None:
    table = table_of("F8_E4M3")
    table[3, 2], table[3, 4], table[9, 0] = 0x7F, 0xFF, 0x7F
    write_layout(tmp_path, table)
    report = verify(tmp_path)
    assert failed(report) == set()
    assert found(report)["values"] == Check("values", "warning", "3 NaN codes in 2 of 64 rows")


@pytest.mark.parametrize(
    ("dtype", "not_finite", "finite"),
    [
        ("BF16", [0x7F80, 0xFF80, 0x7FC1], [0x7F7F, 0x8000]),
        ("F16", [0x7C00, 0xFC00, 0x7C01], [0x7BFF, 0x8001]),
        ("F32", [0x7F800000, 0xFF800000, 0x7F800001], [0x7F7FFFFF, 0x80000000]),
    ],
)
def test_values_that_are_not_finite_are_counted(
    tmp_path: Path, dtype: str, not_finite: list[int], finite: list[int]
) -> None:
    table = table_of(dtype)
    values = table.view("<u4" if dtype == "F32" else "<u2")
    values[1, :3], values[2, :2] = not_finite, finite
    write_layout(tmp_path, table, dtype=dtype)
    values_check = found(verify(tmp_path))["values"]
    assert values_check.text == "3 values that are not finite in 1 of 64 rows"


# --- the second path


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


# --- not sound


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


# --- against


def against(folder: Path, other: Path) -> dict[str, Check]:
    report = verify(folder, against=other, full=True)
    checks = found(report)
    assert all(name.startswith("against") for name in failed(report))
    assert not report.sound
    return checks


def test_different_codecs_are_different(tmp_path: Path) -> None:
    write_layout(tmp_path / "a", table_of("F8_E4M3"))
    write_layout(tmp_path / "b", table_of("BF16"), dtype="BF16")
    checks = against(tmp_path / "a", tmp_path / "b")
    text = checks["against geometry"].text
    assert text.startswith("codec needs fp8_e4m3, the other has bf16: ")
    assert "against rows" not in checks
    assert "against full" not in checks


def test_another_scale_eos_or_size_is_different(tiny: tuple[Path, Table], tmp_path: Path) -> None:
    folder, table = tiny
    other = tmp_path / "other"
    write_layout(other, table)
    path = other / "model-0.safetensors"
    data = path.read_bytes().replace(struct.pack("<H", checkpoints.SCALE_BITS), b"\x52\x39")
    path.write_bytes(data)
    checks = against(folder, other)
    assert checks["against scale"].status == "failed"
    assert checks["against rows"].status == checks["against full"].status == "ok"

    write_layout(other, table)
    checkpoints.write_config(other, eos_token_id=9)
    assert against(folder, other)["against hash"].text == "eos needs 7, the other has 9"

    checkpoints.write_config(other, make_ngram_vocab_size_divisible_by=4)
    write_rows = [checkpoints.scale(), *checkpoints.shards(table[:60], [60])]
    checkpoints.write_file(path, [*write_rows, *checkpoints.hash_buffers()])
    checks = against(folder, other)
    assert checks["against geometry"].text == "rows needs 64, the other has 60"


def test_against_a_table_of_another_layer_or_without_a_config(
    tiny: tuple[Path, Table], tmp_path: Path
) -> None:
    folder, table = tiny
    other = tmp_path / "other"
    write_layout(other, table)
    (other / "config.json").unlink()
    report = verify(folder, against=other)
    assert failed(report) == set()
    assert found(report)["against hash"].status == "skipped"

    checkpoints.write_config(other, ple_layer_ids=[6])
    arrays = [*checkpoints.shards(table, [64], layer=5), checkpoints.scale(5)]
    for file in other.glob("*.safetensors"):
        file.unlink()
    checkpoints.write_config(other, ple_layer_ids=[6], ngram_vocab_size_base=11)
    checkpoints.write_file(other / "model.safetensors", arrays)
    checks = against(folder, other)
    assert checks["against"].text == "needs layers.1.ple, the other has layers.5.ple"


def test_the_other_changes_meanwhile(tiny: tuple[Path, Table]) -> None:
    folder, _ = tiny
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    path = other / "model-0.safetensors"
    report = verify(
        folder, against=other, full=True, progress=lambda done, total: os.utime(path, ns=(1, 1))
    )
    assert failed(report) == {"against identity"}


# --- which rows, which ways


def test_the_rows_sampled(synth: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    real = SecondPath.rows

    def rows(self: SecondPath, row_ids: Any) -> Table:
        seen.append(np.ravel(row_ids).tolist())
        return real(self, row_ids)

    monkeypatch.setattr(SecondPath, "rows", rows)
    (shard,) = {extent.num_rows for extent in catalog.tables(synth)[0].planes[0].extents}
    total = shard * 128
    for seed in (5, 5, 6):
        report = verify(synth, rows=500, seed=seed)
        assert report.seed == seed
    tokens, sampled = seen[0], seen[1]
    assert seen[2:4] == seen[:2]
    assert seen[5] != sampled
    assert len(tokens) == 256 * 16
    assert len(sampled) == len(set(sampled))
    borders = {b for n in range(129) for b in (n * shard - 1, n * shard) if 0 <= b < total}
    assert borders <= set(sampled)
    assert 256 < len(sampled) <= 756
    assert sampled != sorted(sampled)
    assert verify(synth).seed != verify(synth).seed
    seen.clear()
    verify(synth, rows=total)
    assert sorted(seen[1]) == list(range(total))


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        ({"backends": ["mmap"]}, ["mmap"]),
        ({"backends": ["mmap", "pinned"], "readers": ["pool"]}, ["mmap", "pinned"]),
        ({"readers": ["pool"]}, ["disk/pool"]),
        ({"backends": ["auto", "disk"], "readers": ["pool"]}, ["disk/pool"]),
    ],
)
def test_the_ways_asked_for(
    tiny: tuple[Path, Table], options: dict[str, Any], ways: list[str]
) -> None:
    checks = found(verify(tiny[0], **options))
    assert [name for name in checks if name.startswith("rows")] == [f"rows {w}" for w in ways]


@pytest.mark.parametrize("refused", [False, True])
def test_the_ways_chosen(
    tiny: tuple[Path, Table], monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    with RowStore.open(tiny[0]) as store:
        first = f"disk/{store.stats()['reader']}"
    if refused:
        from rowstream.verify import rows

        def open_store(manifest: Manifest, *, backend: str, reader: str) -> RowStore:
            return RowStore(manifest, backend=backend, reader="pool")

        monkeypatch.setattr(rows, "RowStore", open_store)
        first = "disk/pool"
    second = "mmap" if first == "disk/pool" else "disk/pool"
    checks = found(verify(tiny[0]))
    ways = [name for name in checks if name.startswith("rows")]
    assert ways == [f"rows {first}", f"rows {second}"]


# --- the command


def answer(capsys: Capture, *argv: str, status: int = 0) -> Any:
    assert main(["verify", *argv, "--json"]) == status
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def failure(capsys: Capture, *argv: str) -> str:
    """Run a command that must fail with one line and nothing on stdout."""
    assert main(["verify", *argv]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rowstream: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("rowstream: error: ").strip()


def test_json(tiny: tuple[Path, Table], capsys: Capture) -> None:
    folder, table = tiny
    result = answer(capsys, str(folder), "--seed", "7")
    assert set(result) == {"path", "against", "seed", "sound", "tables"}
    assert result["path"] == str(folder)
    assert (result["against"], result["seed"], result["sound"]) == (None, 7, True)
    (described,) = result["tables"]
    assert set(described) == {"name", "sound", "checks", "checksums"}
    assert (described["name"], described["sound"]) == ("layers.1.ple", True)
    assert described["checksums"] is None
    assert all(set(check) == {"name", "status", "text"} for check in described["checks"])
    names = [check["name"] for check in described["checks"]]
    assert names[:4] == ["constants", "geometry", "scale", "tokens"]
    assert names[-2:] == ["values", "identity"]
    result = answer(capsys, str(folder), "--full", "--against", str(folder))
    assert result["against"] == str(folder)
    checksums = result["tables"][0]["checksums"]
    assert set(checksums) == {"rows", "row_bytes", "sha256", "shards"}
    assert checksums["sha256"] == hashlib.sha256(table.tobytes()).hexdigest()
    assert [shard["rows"] for shard in checksums["shards"]] == [16] * 4
    assert set(checksums["shards"][0]) == {"rows", "sha256"}


def test_json_of_a_table_that_is_not_sound(synth: Path, capsys: Capture) -> None:
    recipe = json.loads((synth / "synth.json").read_text())
    (synth / "synth.json").write_text(json.dumps({**recipe, "seed": 1}))
    result = answer(capsys, str(synth), status=1)
    assert result["sound"] is False
    assert result["tables"][0]["sound"] is False


def test_text(tiny: tuple[Path, Table], capsys: Capture) -> None:
    folder, table = tiny
    assert main(["verify", str(folder), "--seed", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("layers.1.ple\n  constants")
    assert out.splitlines()[-1].startswith(f"{folder}: sound (1 table, 8 checks, --seed 3)")
    assert "sha256" not in out
    table[0, 0] = 0x7F
    write_layout(folder, table)
    assert main(["verify", str(folder), "--full"]) == 0
    out = capsys.readouterr().out
    assert hashlib.sha256(table[16:32].tobytes()).hexdigest() in out
    assert "1 warning" in out.splitlines()[-1]
    other = folder.with_name("other")
    write_layout(other, table_of("F8_E4M3", seed=9))
    assert main(["verify", str(folder), "--against", str(other)]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith(f"{folder}: not sound (1 table, ")
    assert "1 failed" in out.splitlines()[-1]


def test_a_checkpoint_that_cannot_be_opened_is_one_line(
    tiny: tuple[Path, Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    folder, table = tiny
    path = folder / "model-0.safetensors"
    assert "nothing" in failure(capsys, str(tmp_path / "absent"))
    assert "nothing" in failure(capsys, str(folder), "--against", str(tmp_path / "absent"))
    assert "layers.9" in failure(capsys, str(folder), "--table", "layers.9")
    os.truncate(path, path.stat().st_size - 1)
    assert "model-0.safetensors" in failure(capsys, str(folder))
    assert failure(capsys, str(folder), "--json")

    arrays = checkpoints.shards(table, [64])
    wrong = checkpoints.int64(f"{checkpoints.root()}.layer_multipliers", [1, 2, 3])
    checkpoints.write_file(path, [checkpoints.scale(), *arrays, wrong])
    assert "layer_multipliers [0] needs" in failure(capsys, str(folder))

    nan = checkpoints.scale()._replace(data=struct.pack("<H", 0x7FC0))
    checkpoints.write_file(path, [nan, *arrays])
    assert "finite positive scale" in failure(capsys, str(folder))

    write_layout(folder, table)

    def refused(*args: object, **options: object) -> None:
        raise UnavailableError("reader uring cannot run: refused")

    monkeypatch.setattr("rowstream.verify.rows.RowStore", refused)
    text = failure(capsys, str(folder), "--reader", "uring")
    assert text == "reader uring cannot run: refused"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["x", "--rows", "0"],
        ["x", "--rows", "many"],
        ["x", "--seed", "-1"],
        ["x", "--seed", "s"],
        ["x", "--backend", "tape"],
        ["x", "--reader", "slow"],
        ["x", "--checksums", "file"],
    ],
)
def test_wrong_usage_is_status_2(argv: list[str], capsys: Capture) -> None:
    assert main(["verify", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: rowstream verify")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_on_a_terminal_and_only_with_full(
    tiny: tuple[Path, Table], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    folder, _ = tiny
    assert main(["verify", str(folder), "--full"]) == 0
    assert capsys.readouterr().err == ""
    for argv, drawn in (([], False), (["--full"], True)):
        terminal = _Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        assert main(["verify", str(folder), *argv]) == 0
        assert ("100%  384 bytes of 384 bytes" in terminal.getvalue()) == drawn
        assert terminal.getvalue().endswith("\r\x1b[K") == drawn


def test_help_teaches(
    tmp_path: Path, synth: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "88")
    assert main(["verify", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 88
    monkeypatch.chdir(tmp_path)
    shutil.copytree(synth, "demo")
    shutil.copytree(synth, "copy")
    shown = [shlex.split(line)[1:] for line in lines if line.startswith("  rowstream verify ")]
    assert len(shown) == 4
    for argv in shown:
        assert main(argv) == 0, argv


def test_verify_imports_nothing_heavy(synth_checkpoint: Path) -> None:
    code = (
        "import sys; from rowstream.cli import main; status = main(sys.argv[1:]);"
        "print([n for n in ('torch', 'transformers', 'starlette') if n in sys.modules]);"
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", str(synth_checkpoint)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith("[]\n")
    assert done.stderr == ""


# --- kept checksums


def test_checksums_are_kept_and_compared(synth: Path, tmp_path: Path, capsys: Capture) -> None:
    kept = tmp_path / "kept" / "sums.json"
    assert "no such file" in failure(capsys, str(synth), "--full", "--checksums", str(kept))
    kept.parent.mkdir()
    options = ["--full", "--checksums", str(kept)]
    assert main(["verify", str(synth), *options]) == 0
    assert f"{kept}: checksums kept" in capsys.readouterr().out
    assert list(kept.parent.iterdir()) == [kept]
    before = kept.read_bytes()
    # another layout of the same table has the same checksum
    other = tmp_path / "other"
    write_checkpoint(other, base=250, layout="radixark")
    for folder in (synth, other):
        result = answer(capsys, str(folder), *options)
        checks = {check["name"]: check["status"] for check in result["tables"][0]["checks"]}
        assert checks["checksums"] == "ok"
    (synth / "synth.json").unlink()
    path = synth / "model-00020-of-00037.safetensors"
    flip(path, path.stat().st_size - 161)
    result = answer(capsys, str(synth), *options, status=1)
    (text,) = [c["text"] for c in result["tables"][0]["checks"] if c["name"] == "checksums"]
    assert text == "other bytes in shard 61"
    assert kept.read_bytes() == before


def test_checksums_of_a_table_that_is_not_sound_are_not_kept(
    synth: Path, tmp_path: Path, capsys: Capture
) -> None:
    recipe = json.loads((synth / "synth.json").read_text())
    (synth / "synth.json").write_text(json.dumps({**recipe, "seed": 1}))
    kept = tmp_path / "sums.json"
    answer(capsys, str(synth), "--full", "--checksums", str(kept), status=1)
    assert not kept.exists()


def test_checksums_say_what_differs(tiny: tuple[Path, Table], tmp_path: Path) -> None:
    folder, table = tiny
    first = verify(folder, full=True).tables[0].checksums
    assert first is not None
    longer = tmp_path / "fewer"
    write_layout(longer, table_of("F8_E4M3", seed=1), counts=[32, 32])
    report = verify(longer, full=True, checksums={"layers.1.ple": first})
    assert failed(report) == {"checksums"}
    digest = hashlib.sha256(table.tobytes()).hexdigest()
    assert found(report)["checksums"].text.startswith(f"needs sha256 {digest}, found ")
    write_layout(longer, table_of("F8_E4M3", seed=1))
    report = verify(longer, full=True, checksums={"layers.1.ple": first})
    assert found(report)["checksums"].text == "other bytes in shard 0, 1, 2, 3"
    report = verify(longer, full=True, checksums={"layers.2.ple": first})
    assert found(report)["checksums"].text == "layers.1.ple is not among those known"
    more = dataclasses.replace(first, num_rows=72, shard_rows=(16, 16, 16, 24))
    report = verify(longer, full=True, checksums={"layers.1.ple": more})
    assert found(report)["checksums"].text == "needs 72 rows, found 64"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"rowstream_checksums": 2}', '{"rowstream_checksums": 1, "tables": {"a": 1}}',
     '{"rowstream_checksums": 1, "tables": {"a": {"rows": 1, "row_bytes": 1, "sha256": "", '
     '"shards": []}}}'],
)  # fmt: skip
def test_a_file_that_holds_no_checksums_is_one_line(
    tiny: tuple[Path, Table], tmp_path: Path, capsys: Capture, content: str
) -> None:
    kept = tmp_path / "sums.json"
    kept.write_text(content)
    text = failure(capsys, str(tiny[0]), "--full", "--checksums", str(kept))
    assert text == "sums.json needs checksums as verify writes them, found something else"
    assert kept.read_text() == content


def test_a_file_too_long_for_checksums_is_not_read(
    tiny: tuple[Path, Table], tmp_path: Path, capsys: Capture
) -> None:
    kept = tmp_path / "sums.json"
    kept.touch()
    os.truncate(kept, 1 << 40)
    assert "sums.json" in failure(capsys, str(tiny[0]), "--full", "--checksums", str(kept))


def full_disk(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_full_disk_leaves_no_checksums(
    tiny: tuple[Path, Table],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    call: str,
) -> None:
    full_disk(call, monkeypatch)
    kept = tmp_path / "kept" / "sums.json"
    kept.parent.mkdir()
    assert main(["verify", str(tiny[0]), "--full", "--checksums", str(kept)]) == 1
    out, err = capsys.readouterr()
    assert err == f"rowstream: error: {kept}: no space left on device\n"
    assert "kept" not in out.splitlines()[-1]
    assert list(kept.parent.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one page, which a file of 128 checksums does not fit."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=4096", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(synth: Path, small_disk: Path, capsys: Capture) -> None:
    kept = small_disk / "sums.json"
    assert main(["verify", str(synth), "--full", "--checksums", str(kept)]) == 1
    assert capsys.readouterr().err == f"rowstream: error: {kept}: no space left on device\n"
    assert list(small_disk.iterdir()) == []


def test_kept_checksums_are_read_back(synth: Path, tmp_path: Path, capsys: Capture) -> None:
    kept = tmp_path / "sums.json"
    result = answer(capsys, str(synth), "--full", "--checksums", str(kept))
    stored = read_file(kept)
    assert set(stored) == {"layers.1.ple"}
    assert stored["layers.1.ple"].as_json() == result["tables"][0]["checksums"]


# --- memory


PEAK = """
import sys
from rowstream.cli import main
status = main(sys.argv[1:])
with open("/proc/self/status") as file:
    peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
print(peak * 1024, file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize(("gib", "options"), [(48.0, []), (0.25, ["--full"])])
def test_memory_is_bounded(tmp_path: Path, gib: float, options: list[str]) -> None:
    write_checkpoint(tmp_path / "model", table_gib=gib, sparse=True)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "verify", str(tmp_path / "model"), *options],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stderr) < 128 * MIB
