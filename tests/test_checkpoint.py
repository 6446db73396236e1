from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import (
    SCALE,
    TINY_ROWS,
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
    write_header,
    write_index,
    write_tiny,
)
from rowstream.catalog import tables
from rowstream.checkpoint import locate, open_regular, read_config
from rowstream.errors import ManifestError
from rowstream.formats import index
from rowstream.formats.index import indexed_files

INDEX = "model.safetensors.index.json"
MARKER = b".ple_embedding."
HUB_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME")

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


def _split_tiny(folder: Path) -> dict[str, str]:
    """Write a tiny checkpoint over several files and return the file of each of its tensors."""
    table = table_bytes(TINY_ROWS[1], TINY_WIDTH)
    held = {
        "a.safetensors": [*shards(table, [16] * 4)[:2]],
        "b.safetensors": [*shards(table, [16] * 4)[2:]],
        "scale.safetensors": [scale()],
        "rest.safetensors": [*hash_buffers(), Array("lm_head.weight", "U8", (1,), b"x")],
    }
    write_config(folder)
    for name, arrays in held.items():
        write_file(folder / name, arrays)
    return {array.name: name for name, arrays in held.items() for array in arrays}


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


# where a checkpoint lies


def _write_hub(hub: Path, repository: str, revision: str = "0a1b2c") -> Path:
    folder = hub / repository
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision + "\n")
    return snapshot


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for variable in HUB_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def test_a_folder_and_a_file_in_it_are_the_folder(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").touch()
    assert locate(tmp_path) == tmp_path
    assert locate(str(tmp_path)) == tmp_path
    assert locate(tmp_path / "x.safetensors") == tmp_path


@pytest.mark.parametrize(
    ("variable", "value", "hub"),
    [
        ("HF_HUB_CACHE", "h", "h"),
        ("HUGGINGFACE_HUB_CACHE", "h", "h"),
        ("HF_HOME", "h", "h/hub"),
        ("XDG_CACHE_HOME", "h", "h/huggingface/hub"),
        ("HOME", "h", "h/.cache/huggingface/hub"),
    ],
)
def test_an_id_is_found_in_the_local_hub_cache(
    no_hub: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, hub: str
) -> None:
    monkeypatch.setenv(variable, str(no_hub / value))
    snapshot = _write_hub(no_hub / hub, "models--Qwen--Qwen3.8-Flash-Next-FP8")
    assert locate("Qwen/Qwen3.8-Flash-Next-FP8") == snapshot
    plain = _write_hub(no_hub / hub, "models--gpt2")
    assert locate("gpt2") == plain


def test_a_folder_wins_over_an_id(no_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(no_hub / "hub"))
    _write_hub(no_hub / "hub", "models--a--b")
    (no_hub / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(no_hub)
    assert locate("a/b") == Path("a/b")


@pytest.mark.parametrize(
    "name", ["", "a/b", "a/b/c", "../hub", "a/..", "/no/such/folder", "a\0b", "\ud800", "a/b@main"]
)
def test_what_is_nowhere_is_said_to_be_nowhere(
    no_hub: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(no_hub)
    if name:
        with pytest.raises(ManifestError, match="found nothing"):
            locate(name)
    else:
        assert locate(name) == Path()


def test_a_cache_without_the_snapshot_is_no_checkpoint(
    no_hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(no_hub))
    snapshot = _write_hub(no_hub, "models--a--b")
    for content in ("../../secret", "", "123\n456", "\xff"):
        (snapshot.parent.parent / "refs" / "main").write_text(content)
        with pytest.raises(ManifestError, match="found nothing"):
            locate("a/b")


def test_a_snapshot_of_links_is_opened_with_its_config(
    no_hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(no_hub))
    snapshot = _write_hub(no_hub, "models--a--b")
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    write_tiny(blobs)
    for name in ("config.json", "model.safetensors"):
        (blobs / name).rename(blobs / f"blob-{name}")
        (snapshot / name).symlink_to(f"../../blobs/blob-{name}")
    (manifest,) = tables("a/b")
    assert manifest.root == snapshot
    assert manifest.hash is not None
    assert manifest.files[0].path == snapshot / "model.safetensors"
    assert manifest.files[0].identity.inode == (blobs / "blob-model.safetensors").stat().st_ino


# config.json and other files


def test_the_config_is_an_object_or_absent(tmp_path: Path) -> None:
    assert read_config(tmp_path) is None
    path = tmp_path / "config.json"
    path.write_text('{"a": NaN}')
    config = read_config(tmp_path)
    assert config is not None
    assert list(config) == ["a"]
    for content in (b"", b"[1]", b"{", b"\xff\xfe{\0}\0", b'{"a":' * 100_000, b"9" * 5000):
        path.write_bytes(content)
        with pytest.raises(ManifestError, match=r"^config.json needs a JSON object, found "):
            read_config(tmp_path)
    with path.open("wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(ManifestError, match="16000000 bytes at most, found 100000001"):
        read_config(tmp_path)


def test_a_config_that_is_a_broken_link_is_not_an_absent_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("gone")
    with pytest.raises(ManifestError, match=r"config.json needs a file, found nothing"):
        read_config(tmp_path)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ManifestError, match="needs a regular file"):
            open_regular(path)
    for path in (tmp_path / "none", tmp_path / "pipe" / "none"):
        with pytest.raises(ManifestError, match="needs a file, found nothing"):
            open_regular(path)


# the index


def _write_raw_index(folder: Path, text: bytes) -> None:
    (folder / INDEX).write_bytes(text)


def test_files_of_marked_keys_are_taken_from_the_index(tmp_path: Path) -> None:
    assert indexed_files(tmp_path, MARKER) == []
    write_index(
        tmp_path,
        {
            "x.ple_embedding.a": "2.safetensors",
            "x.ple_embedding.b": "1.safetensors",
            "x.ple_embedding.c": "2.safetensors",
            "x.other.d": "3.safetensors",
        },
    )
    assert indexed_files(tmp_path, MARKER) == ["1.safetensors", "2.safetensors"]


@pytest.mark.parametrize("chunk_bytes", [7, 50, 64, 1000, 4096, 5000])
def test_entries_over_the_edge_of_a_chunk_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    files = {f"{'x' * (key % 7)}.ple_embedding.{key}": f"{key}.safetensors" for key in range(150)}
    files.update({f"{'y' * 97}.other.{key}": "other.safetensors" for key in range(20)})
    write_index(tmp_path, dict(sorted(files.items())))
    monkeypatch.setattr(index, "_CHUNK_BYTES", chunk_bytes)
    assert indexed_files(tmp_path, MARKER) == sorted(f"{key}.safetensors" for key in range(150))


@pytest.mark.parametrize("before", range((1 << 20) - 80, (1 << 20) + 8, 3))
def test_an_entry_at_the_edge_of_the_real_chunk_is_found(tmp_path: Path, before: int) -> None:
    entry = b'"a.ple_embedding.b":"c.safetensors"'
    _write_raw_index(tmp_path, b'{"weight_map":{' + b" " * before + entry + b"}}")
    assert indexed_files(tmp_path, MARKER) == ["c.safetensors"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (b'{"a.ple_embedding.b" : "c"}', ["c"]),
        (b'{"a.ple_embedding.b"\n\t:\r\n"c"}', ["c"]),
        (b'{"a.ple_embedding.b":"\\u0063"}', ["c"]),
        (b'{"a":"c.ple_embedding.d"}', []),
        (b'{"note":"a.ple_embedding.b","x":"y"}', []),
        (b'{"a.ple_embedding.b":["c"]}', []),
        (b'{"a.ple_embedding.b":"c', []),
        (b'{"a.ple_embedding.b":"\\q"}', []),
        (b'{"a.ple_embedding.b":"\xff"}', []),
        (b".ple_embedding.", []),
        (b'"' + b"x" * 10_000 + b'.ple_embedding.":"c"', []),
        (b'".ple_embedding.":"' + b"c" * 10_000 + b'"', []),
        (b"", []),
    ],
)
def test_only_a_key_with_its_file_counts(tmp_path: Path, text: bytes, names: list[str]) -> None:
    _write_raw_index(tmp_path, text)
    assert indexed_files(tmp_path, MARKER) == names


@pytest.mark.parametrize(
    "name", ["../c", "/c", "a/c", "a\\\\c", "..", ".", "", "\\u0000", "\\ud800", "a\\nb"]
)
def test_file_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    _write_raw_index(tmp_path, b'{"a.ple_embedding.b":"' + name.encode() + b'"}')
    with pytest.raises(ManifestError, match="needs a file of the same folder") as caught:
        tables(tmp_path)
    assert caught.value.file == INDEX


def test_a_file_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    write_index(tmp_path, _split_tiny(tmp_path))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ManifestError, match=f"named by {INDEX}, found nothing") as caught:
        tables(tmp_path)
    assert caught.value.file == "b.safetensors"
    (tmp_path / "b.safetensors").symlink_to("gone")
    with pytest.raises(ManifestError, match=r"b.safetensors needs a file, found nothing"):
        tables(tmp_path)


# tables from index and headers


@pytest.mark.parametrize(
    "keep",
    [
        lambda name: True,
        lambda name: "shard_" in name,
        lambda name: "shard_0" in name,
        lambda name: "scale" in name,
        lambda name: "layer_multipliers" in name,
        lambda name: "lm_head" in name,
        None,
    ],
    ids=["all", "shards", "one shard", "scale", "buffer", "no part", "no index"],
)
def test_a_filtered_index_hides_nothing(tmp_path: Path, keep: Callable[[str], bool] | None) -> None:
    files = _split_tiny(tmp_path)
    (expected,) = tables(tmp_path)
    if keep is not None:
        write_index(tmp_path, {name: file for name, file in files.items() if keep(name)})
    (manifest,) = tables(tmp_path)
    assert manifest == expected
    assert manifest.scale == SCALE


def test_the_index_is_no_proof(tmp_path: Path) -> None:
    files = _split_tiny(tmp_path)
    write_index(tmp_path, dict.fromkeys(files, "rest.safetensors"))
    assert len(tables(tmp_path)) == 1


def test_a_complete_index_keeps_other_files_out(tmp_path: Path) -> None:
    write_index(tmp_path, _split_tiny(tmp_path))
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())
    (tmp_path / "broken.safetensors").write_bytes(b"")
    assert len(tables(tmp_path)) == 1
    (tmp_path / INDEX).unlink()
    with pytest.raises(ManifestError, match="needs one file"):
        tables(tmp_path)


def test_stored_constants_in_another_file_are_compared(tmp_path: Path) -> None:
    files = _split_tiny(tmp_path)
    write_file(
        tmp_path / "rest.safetensors",
        [int64(f"{root()}.ngram_heads_offsets", [0, 11, 24, 42])],
    )
    for written in (files, None):
        if written is None:
            (tmp_path / INDEX).unlink()
        else:
            write_index(tmp_path, written)
        with pytest.raises(ManifestError, match="needs 41, found 42"):
            tables(tmp_path)


def test_a_single_file_is_a_checkpoint(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / "broken.safetensors").write_bytes(b"")
    (from_file,) = tables(tmp_path / "model.safetensors")
    (from_folder,) = tables(tmp_path)
    assert from_file == from_folder
    assert from_file.hash is not None
    other = tmp_path / "other.safetensors"
    write_file(other, [Array("w", "U8", (1,), b"x")])
    with pytest.raises(ManifestError, match=r"other.safetensors needs tensors like .* found none"):
        tables(other)


def test_a_folder_without_a_table_says_what_was_looked_for(tmp_path: Path) -> None:
    message = (
        r"needs tensors like layers.<layer>.ple.ple_embedding.ngram_embedding.shard_<n>.weight"
    )
    with pytest.raises(ManifestError, match=message + ", found none in 0 .safetensors files"):
        tables(tmp_path)
    write_config(tmp_path, model_type="llama")
    write_file(tmp_path / "a.safetensors", [Array("w", "U8", (1,), b"x")])
    with pytest.raises(ManifestError, match=message + ", found none in 1 .safetensors file"):
        tables(tmp_path)
    # stripped of its table, a checkpoint may keep the constants and the scale
    write_config(tmp_path)
    write_file(tmp_path / "a.safetensors", [*hash_buffers(), scale()])
    with pytest.raises(ManifestError, match=message):
        tables(tmp_path)


def test_a_broken_file_is_named_when_the_others_make_no_table(tmp_path: Path) -> None:
    _split_tiny(tmp_path)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / "b.safetensors").write_bytes(pointer)
    message = r"rows needs 64, found 32; b.safetensors needs tensors, found a Git LFS pointer"
    with pytest.raises(ManifestError, match=message):
        tables(tmp_path)
    for name in ("a", "scale", "rest"):
        (tmp_path / f"{name}.safetensors").write_bytes(pointer)
    with pytest.raises(ManifestError, match=r"found none .*; a.safetensors .* a Git LFS pointer"):
        tables(tmp_path)


def test_files_without_a_part_of_a_table_are_not_parsed(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    write_header(tmp_path / "other.safetensors", b'{"w": nonsense')
    assert len(tables(tmp_path)) == 1
    write_header(tmp_path / "other.safetensors", b'{"x.ple_embedding.y": nonsense')
    with pytest.raises(ManifestError, match=r"other.safetensors needs a JSON object"):
        tables(tmp_path)


# the released model, its rows left as holes


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
