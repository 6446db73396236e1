"""`rowstream gather` against rows read straight from the files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import checkpoints
from commands import Capture, answer, failure
from rowstream.cli import main
from stored_rows import stored_row, stored_shards


def test_gather_rows_gives_the_bytes_of_the_file(synth_checkpoint: Path, capsys: Capture) -> None:
    last = sum(shard[3] for shard in stored_shards(synth_checkpoint)) - 1
    border = stored_shards(synth_checkpoint)[0][3]
    wanted = [0, border - 1, border, last, 0]
    text = ",".join(str(row) for row in wanted)
    result = answer(capsys, "gather", str(synth_checkpoint), "--rows", text, "--json")
    assert result == {
        "row_ids": [wanted],
        "rows_hex": [[stored_row(synth_checkpoint, row).hex() for row in wanted]],
    }
    assert main(["gather", str(synth_checkpoint), "--rows", text]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{row} {stored_row(synth_checkpoint, row).hex()}" for row in wanted
    ]


def test_gather_tokens_gives_a_list_for_each_token(synth_checkpoint: Path, capsys: Capture) -> None:
    result = answer(capsys, "gather", str(synth_checkpoint), "--tokens", "17,42,99", "--json")
    assert set(result) == {"row_ids", "rows_hex"}
    assert [len(rows) for rows in result["row_ids"]] == [16, 16, 16]
    (table,) = answer(capsys, "inspect", str(synth_checkpoint), "--json")["tables"]
    constants = table["hash"]
    history = [constants["eos"], constants["eos"], 17, 42, 99]
    for token, rows in enumerate(result["row_ids"]):
        window = history[token : token + 3][::-1]
        for head, row in enumerate(rows):
            mixed = 0
            for distance in range(2 + head // 8):
                mixed ^= window[distance] * constants["multipliers"][distance]
            assert row == mixed % constants["sizes"][head] + constants["offsets"][head]
            assert result["rows_hex"][token][head] == stored_row(synth_checkpoint, row).hex()


@pytest.mark.parametrize("backend", ["disk", "mmap", "pinned"])
@pytest.mark.parametrize("reader", ["auto", "pool"])
def test_gather_takes_backend_and_reader(
    tiny: tuple[Path, NDArray[np.uint8]], capsys: Capture, backend: str, reader: str
) -> None:
    folder, table = tiny
    options = ["--backend", backend, "--reader", reader, "--json"]
    result = answer(capsys, "gather", str(folder), "--rows=-1,63", *options)
    assert result["rows_hex"] == [["00" * 6, table[63].tobytes().hex()]]


def test_gather_values_are_the_decoded_codes(tmp_path: Path, capsys: Capture) -> None:
    table = np.zeros((64, 6), np.uint8)
    table[3] = [0x38, 0xB8, 0x40, 0x01, 0x7E, 0x7F]  # 1, -1, 2, 2**-9, 448, NaN
    checkpoints.write_config(tmp_path)
    arrays = [checkpoints.scale(), *checkpoints.shards(table, [64])]
    checkpoints.write_file(tmp_path / "model.safetensors", arrays)
    result = answer(capsys, "gather", str(tmp_path), "--rows", "3", "--values", "--json")
    expected = [np.float32(v) * np.float32(checkpoints.SCALE) for v in (1, -1, 2, 2**-9, 448)]
    assert result["values"] == [[[*map(float, expected), None]]]
    assert main(["gather", str(tmp_path), "--rows", "3", "--values"]) == 0
    row, *values = capsys.readouterr().out.split()
    assert row == "3"
    assert [np.float32(v) for v in values[:5]] == expected
    assert values[5] == "nan"


def test_gather_chooses_among_several_tables(tmp_path: Path, capsys: Capture) -> None:
    checkpoints.write_config(tmp_path, ple_layer_ids=[2, 6])
    arrays, expected = [], {}
    for layer, rows in checkpoints.TINY_ROWS.items():
        table = checkpoints.table_bytes(rows, checkpoints.TINY_WIDTH, layer)
        arrays += [checkpoints.scale(layer), *checkpoints.shards(table, [rows], layer=layer)]
        expected[f"layers.{layer}.ple"] = table[5].tobytes().hex()
    checkpoints.write_file(tmp_path / "model.safetensors", arrays)
    for name, row in expected.items():
        result = answer(capsys, "gather", str(tmp_path), "--rows", "5", "--table", name, "--json")
        assert result["rows_hex"] == [[row]]
    assert "layers.1.ple, layers.5.ple" in failure(capsys, "gather", str(tmp_path), "--rows", "5")
    named = failure(capsys, "gather", str(tmp_path), "--rows", "5", "--table", "layers.2.ple")
    assert "layers.2.ple" in named
    names = [t["name"] for t in answer(capsys, "inspect", str(tmp_path), "--json")["tables"]]
    assert names == list(expected)
