"""`rowstream inspect` against what the headers of the files say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import checkpoints
from commands import Capture, answer, failure
from rowstream.cli import main
from stored_rows import ROW_BYTES, stored_shards


def test_inspect_json_says_what_the_headers_say(synth_checkpoint: Path, capsys: Capture) -> None:
    result = answer(capsys, "inspect", str(synth_checkpoint), "--json")
    assert set(result) == {"path", "tables"}
    (table,) = result["tables"]
    assert set(table) == {
        *("name", "tensor", "layer", "family", "format", "root", "codec", "scale"),
        *("num_rows", "row_bytes", "row_values", "table_bytes", "heads", "groups"),
        *("reads_per_token", "blocks_per_token", "read_bytes_per_token", "pages_per_token"),
        *("planes", "files", "shards", "hash", "auto"),
    }
    shards = stored_shards(synth_checkpoint)
    rows = sum(shard[3] for shard in shards)
    assert table["name"] == "layers.1.ple"
    assert table["tensor"].endswith("layers.1.ple.ple_embedding.ngram_embedding")
    assert (table["layer"], table["family"], table["format"]) == (1, "ple", "safetensors")
    assert (table["codec"], table["scale"]) == ("fp8_e4m3", checkpoints.SCALE)
    assert (table["num_rows"], table["row_bytes"], table["row_values"]) == (rows, ROW_BYTES, 160)
    assert table["table_bytes"] == rows * ROW_BYTES
    assert (table["heads"], table["groups"], table["reads_per_token"]) == (16, [8, 8], 16)
    assert table["shards"] == len(shards) == 128
    assert {file["path"] for file in table["files"]} == {str(shard[1]) for shard in shards}
    for file in table["files"]:
        assert set(file) == {
            *("path", "file_bytes", "stored_bytes", "shards"),
            *("direct", "alignment", "note"),
        }
        assert file["file_bytes"] == os.stat(file["path"]).st_size
        assert file["shards"] == sum(str(shard[1]) == file["path"] for shard in shards)
    config = json.loads((synth_checkpoint / "config.json").read_text())["text_config"]
    constants = table["hash"]
    assert set(constants) == {
        *("ngram_size", "heads_per_ngram", "vocab_size", "eos", "num_rows"),
        *("multipliers", "sizes", "offsets"),
    }
    assert constants["eos"] == config["eos_token_id"]
    assert constants["vocab_size"] == config["vocab_size"]
    assert constants["num_rows"] == sum(constants["sizes"]) <= rows
    assert set(table["auto"]) == {"backend", "reader", "reason"}


def test_inspect_counts_straddling_rows_as_a_walk_over_all_rows_does(
    synth_checkpoint: Path, capsys: Capture
) -> None:
    (table,) = answer(capsys, "inspect", str(synth_checkpoint), "--json")["tables"]
    (plane,) = table["planes"]
    block = table["files"][0]["alignment"]
    assert {file["alignment"] for file in table["files"]} == {block}
    starts = [
        offset + row * ROW_BYTES
        for _, _, offset, rows in stored_shards(synth_checkpoint)
        for row in range(rows)
    ]

    def touched(size: int) -> tuple[int, float]:
        counts = [(start + ROW_BYTES - 1) // size - start // size + 1 for start in starts]
        return sum(counts), sum(count > 1 for count in counts) / len(starts)

    assert set(plane) == {
        *("name", "row_bytes", "extents", "offsets_mod_512", "offsets_mod_4096"),
        *("blocks", "block_bytes_read", "pages", "straddling_rows", "straddling_share"),
        *("straddling_share_512", "straddling_share_4096"),
    }
    assert (plane["name"], plane["row_bytes"], plane["extents"]) == ("codes", ROW_BYTES, 128)
    blocks, share = touched(block)
    assert plane["blocks"] == blocks
    assert plane["straddling_share"] == share
    assert plane["straddling_rows"] == round(share * len(starts))
    assert plane["block_bytes_read"] == blocks * block
    assert plane["straddling_share_512"] == touched(512)[1]
    assert (plane["pages"], plane["straddling_share_4096"]) == touched(4096)
    offsets = {shard[2] for shard in stored_shards(synth_checkpoint)}
    assert plane["offsets_mod_512"] == sorted({offset % 512 for offset in offsets})
    assert plane["offsets_mod_4096"] == sorted({offset % 4096 for offset in offsets})
    assert table["blocks_per_token"] == pytest.approx(16 * blocks / len(starts))
    assert table["read_bytes_per_token"] == pytest.approx(16 * blocks * block / len(starts))
    assert table["pages_per_token"] == pytest.approx(16 * touched(4096)[0] / len(starts))


@pytest.mark.parametrize(
    ("offset", "row_bytes", "rows", "block"),
    [
        (8, 160, 5000, 512),
        (13, 160, 37, 512),
        (0, 4096, 9, 4096),
        (1, 5000, 4097, 4096),
        (3, 7, 512, 512),
    ],
)
def test_coverage_equals_a_walk(offset: int, row_bytes: int, rows: int, block: int) -> None:
    from rowstream.cli.inspect import _coverage

    blocks = split = 0
    for row in range(rows):
        first = offset + row * row_bytes
        touched = (first + row_bytes - 1) // block - first // block + 1
        blocks += touched
        split += touched > 1
    assert _coverage(offset, row_bytes, rows, block) == (blocks, split)


def test_inspect_text_names_what_a_newcomer_needs(synth_checkpoint: Path, capsys: Capture) -> None:
    assert main(["inspect", str(synth_checkpoint)]) == 0
    out = capsys.readouterr().out
    rows = sum(shard[3] for shard in stored_shards(synth_checkpoint))
    assert out.startswith("layers.1.ple\n")
    assert f"({rows * ROW_BYTES:,} bytes)" in out
    assert f"{rows:,} of 160 bytes: 160 values, fp8_e4m3, scale 0.000199317932" in out
    assert "128 shards in 33 files" in out
    assert "16 rows (8 + 8 heads) in 16 reads" in out
    assert "auto chooses" in out
    assert "holes" not in out


def test_inspect_without_a_config_says_that_tokens_cannot_be_hashed(
    tiny: tuple[Path, NDArray[np.uint8]], capsys: Capture
) -> None:
    folder, _ = tiny
    (folder / "config.json").unlink()
    assert answer(capsys, "inspect", str(folder), "--json")["tables"][0]["hash"] is None
    assert main(["inspect", str(folder)]) == 0
    assert "without config.json" in capsys.readouterr().out
    assert "config.json" in failure(capsys, "gather", str(folder), "--tokens", "1")


def test_inspect_names_holes(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "sparse"
    assert main(["synth", str(folder), "--table-gib", "0.5", "--sparse"]) == 0
    out, err = capsys.readouterr()
    assert "reads as zeroes" in out
    assert "no read reaches the device" in out
    assert err == ""
    assert main(["inspect", str(folder)]) == 0
    assert "holes: " in capsys.readouterr().out
