"""One checkpoint against another one that should hold the same table."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import checkpoints
from rowstream.verify import Check, verify
from verify.layouts import Table, table_of, write_layout
from verify.reports import failed, found


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
