"""The released model, its rows left as holes: opened quickly, at its published places."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import INDEX, SCALE, Array, int64, root, scale, write_file, write_index
from rowstream.catalog import tables

# the released FP8 model: constants, sizes and file layout as published
RELEASED_CONFIG: dict[str, Any] = {
    "model_type": "qwen4_exp",
    "split_ngram_parts": 512,
    "text_config": {
        "model_type": "qwen4_exp_text",
        "vocab_size": 248_320,
        "hidden_size": 2560,
        "eos_token_id": 248_044,
        "ple_layer_ids": [2],
        "ple_embed_dim": 2560,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": 128,
    },
}
SHARD_ROWS = 2_500_012
SHARD_FILE_BYTES = [5200027199, 5200027202, 5200027198, 5200027189, *[5200027190] * 5, 4400023163]


def _write_released(folder: Path, dtype: str = "F8_E4M3") -> None:
    """Write the table files as one publisher packs them: 13 shards each, in lexicographic order."""
    (folder / "config.json").write_text(json.dumps(RELEASED_CONFIG))
    names = sorted(f"{root()}.ngram_embedding.shard_{shard}.weight" for shard in range(128))
    arrays = [Array(name, dtype, (SHARD_ROWS, 160)) for name in names]
    for file in range(10):
        held = arrays[13 * file : 13 * file + 13] + ([scale()] if file == 9 else [])
        path = folder / f"model-plefp8-{file:05}.safetensors"
        write_file(path, held, separators=None)
    write_file(
        folder / "model-bf16-00010.safetensors",
        [int64(f"{root()}.layer_multipliers", [23703573157769, 20109073645365, 8052911324071])],
    )


def _index_of_released(folder: Path, num_keys: int) -> None:
    files = {f"{root()}.ngram_embedding.weight_scale": "model-plefp8-00009.safetensors"}
    files[f"{root()}.layer_multipliers"] = "model-bf16-00010.safetensors"
    names = sorted(f"{root()}.ngram_embedding.shard_{shard}.weight" for shard in range(128))
    for position, name in enumerate(names):
        files[name] = f"model-plefp8-{position // 13:05}.safetensors"
    for key in range(num_keys - len(files)):
        name = f"model.language_model.layers.{key % 48}.mlp.experts.{key}.gate_proj.weight_scale_2"
        files[name] = f"model-{key % 206:05}-of-00206.safetensors"
    write_index(folder, dict(sorted(files.items())))


def _least(measure: Callable[[], float], repeats: int = 7) -> float:
    return min(measure() for _ in range(repeats))


def _cpu_s(path: Path) -> float:
    start = time.process_time()
    tables(path)
    return time.process_time() - start


def _peak_bytes(path: Path) -> int:
    tables(path)
    tracemalloc.start()
    try:
        tables(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("released")
    _write_released(folder)
    return folder


def test_the_released_table_is_found_at_its_published_places(released: Path) -> None:
    (manifest,) = tables(released)
    assert [os.path.getsize(path) for path in sorted(released.glob("*ple*"))] == SHARD_FILE_BYTES
    assert (manifest.num_rows, manifest.table_bytes) == (320_001_536, 51_200_245_760)
    assert (manifest.row_bytes, manifest.heads, manifest.groups) == (160, 16, (8, 8))
    assert manifest.scale == SCALE
    assert manifest.hash is not None
    # head 0 of token 1 at the start of a sequence
    row = 16_121_432
    (extent,) = (
        extent
        for extent in manifest.planes[0].extents
        if extent.first_row <= row < extent.first_row + extent.num_rows
    )
    assert manifest.files[extent.file].path.name == "model-plefp8-00006.safetensors"
    assert extent.first_row == 6 * SHARD_ROWS
    assert extent.offset + (row - extent.first_row) * 160 == 2_579_431_350


def test_a_table_of_128_shards_opens_quickly_and_small(released: Path) -> None:
    assert _least(lambda: _cpu_s(released)) < 0.1
    assert _peak_bytes(released) < 20_000_000


def test_an_index_of_300000_keys_opens_quickly_and_small(released: Path, tmp_path: Path) -> None:
    for path in released.iterdir():
        (tmp_path / path.name).symlink_to(path)
    _index_of_released(tmp_path, 300_000)
    assert os.path.getsize(tmp_path / INDEX) > 30_000_000
    (manifest,) = tables(tmp_path)
    assert len(manifest.files) == 10
    assert _least(lambda: _cpu_s(tmp_path)) < 0.25
    assert _peak_bytes(tmp_path) < 40_000_000


def test_a_folder_of_large_headers_without_an_index_is_scanned_unparsed(
    released: Path, tmp_path: Path
) -> None:
    for path in released.iterdir():
        (tmp_path / path.name).symlink_to(path)
    held = [
        Array(f"model.layers.{key % 48}.mlp.experts.{key}.gate_proj.weight", "U8", (0,), b"")
        for key in range(2000)
    ]
    write_file(tmp_path / "other-0.safetensors", held)
    for copy in range(1, 100):
        (tmp_path / f"other-{copy}.safetensors").symlink_to("other-0.safetensors")
    assert _least(lambda: _cpu_s(tmp_path)) < 0.25
    assert _peak_bytes(tmp_path) < 20_000_000
