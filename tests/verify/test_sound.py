"""verify against checkpoints whose every byte is known, in every layout: they are sound."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import checkpoints
from rowstream.synth import write_checkpoint
from rowstream.verify import Check, verify
from verify.layouts import LAYOUTS, Table, table_of, write_layout
from verify.reports import failed, found


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
