"""The fields of config.json that describe a table: what is refused, what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints import FILE, TINY_CONFIG, scale, write_config, write_file, write_tiny
from ple_checkpoints import fused, refused
from rowstream.catalog import tables


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
    error = refused(tmp_path, f"config.json: {field} needs ")
    assert error.file == "config.json"


def test_a_width_taken_from_hidden_size_is_named_so(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    write_config(tmp_path, ple_embed_dim=None, hidden_size=26)
    refused(tmp_path, "config.json: hidden_size needs a multiple of 4 heads, found 26")


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
    refused(tmp_path, "eos_token_id needs")


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
    refused(tmp_path, r"layer_multipliers \[0\] needs \d+, found 106616942423619041")


def test_the_defaults_of_the_config_are_those_of_the_released_model(tmp_path: Path) -> None:
    # every field but these is left out; the numbers are the released model's
    document = {
        "model_type": "qwen4_exp_text",
        "hidden_size": 2560,
        "ple_layer_ids": [2],
        "eos_token_id": 248_044,
    }
    (tmp_path / "config.json").write_text(json.dumps(document))
    arrays = [scale(), fused((320_001_536, 160))]
    write_file(tmp_path / FILE, arrays)
    (manifest,) = tables(tmp_path)
    assert manifest.num_rows == 320_001_536
    assert (manifest.heads, manifest.row_values) == (16, 160)
    assert manifest.hash is not None
    assert manifest.hash.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert manifest.hash.vocab_size == 248_320
