"""Synthetic checkpoints, read back by safetensors, plain integers and transformers."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowstream.synth import Recipe, layout, row_bytes, table_rows, write_checkpoint
from rowstream.synth.stream import TableStream

BASE = 700
PREFIX = "model.language_model.layers.1.ple.ple_embedding."
TABLE = PREFIX + "ngram_embedding."
COMBINATIONS = [(d, x) for d in ("fp8", "bf16") for x in ("qwen", "radixark")]
MASK = 2**64 - 1


@pytest.fixture(scope="module", params=COMBINATIONS, ids=lambda c: f"{c[0]}-{c[1]}")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dtype, name = request.param
    folder = tmp_path_factory.mktemp("synth") / "model"
    write_checkpoint(folder, dtype=dtype, layout=name, base=BASE, seed=3)
    return folder


def header(path: Path) -> tuple[int, bytes, dict[str, Any]]:
    """Return a file's data base, the raw header and the parsed one."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return 8 + size, raw[8 : 8 + size], json.loads(raw[8 : 8 + size])


def catalog(folder: Path) -> dict[str, Path]:
    return {n: p for p in sorted(folder.glob("*.safetensors")) for n in header(p)[2]}


def splitmix(state: int) -> int:
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def expected_row(seed: int, dtype: str, row: int) -> bytes:
    """Recompute a row from the generator's description, in plain integers."""
    import hashlib

    digest = hashlib.sha256(f"rowstream synth table {seed}".encode()).digest()
    key = int.from_bytes(digest[:8], "little")
    words = row_bytes(dtype) // 8
    row_data = b"".join(
        splitmix(key + (row * words + i) * 0x9E3779B97F4A7C15).to_bytes(8, "little")
        for i in range(words)
    )
    if dtype == "fp8":
        return bytes(b - 1 if b in (0x7F, 0xFF) else b for b in row_data)
    halves = struct.unpack(f"<{len(row_data) // 2}H", row_data)
    return struct.pack(f"<{len(halves)}H", *((h & 0x83FF) | 0x3C00 for h in halves))


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_rows_equal_plain_integers(dtype: str) -> None:
    rows = [0, 1, 79, 12_345_678, 320_001_535, 2**40]
    got = table_rows(11, dtype, np.array(rows).reshape(2, 3))
    assert got.shape == (2, 3, row_bytes(dtype))
    assert [r.tobytes() for r in got.reshape(6, -1)] == [expected_row(11, dtype, r) for r in rows]


def test_rows_have_no_nan_and_both_largest_values() -> None:
    codes = table_rows(0, "fp8", np.arange(2000))
    assert not np.isin(codes, [0x7F, 0xFF]).any()
    assert np.bincount(codes.ravel(), minlength=256)[[0x00, 0x7E, 0x80, 0xFE]].min() > 500
    halves = table_rows(0, "bf16", np.arange(2000)).view("<u2").astype(np.uint32) << 16
    sizes = np.abs(halves.view(np.float32))
    assert sizes.min() >= 2.0**-7
    assert sizes.max() < 2.0


def test_rows_depend_on_the_seed_and_refuse_bad_ids() -> None:
    assert (table_rows(1, "fp8", [5]) != table_rows(2, "fp8", [5])).mean() > 0.9
    assert table_rows(1, "fp8", []).shape == (0, 160)
    with pytest.raises(ValueError, match="row_ids need 0 or more, got -1"):
        table_rows(0, "fp8", [3, -1])
    with pytest.raises(TypeError, match="row_ids need integers"):
        table_rows(0, "fp8", [1.5])
    with pytest.raises(ValueError, match="dtype needs one of fp8, bf16, got 'fp4'"):
        table_rows(0, "fp4", [1])


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
@pytest.mark.parametrize(("first", "size"), [(0, 1), (3, 21), (524_285, 9), (17, 1_600_003)])
def test_stream_starts_at_any_byte(dtype: str, first: int, size: int) -> None:
    out = np.empty(size, np.uint8)
    TableStream(5, dtype).fill(first, out)
    width = row_bytes(dtype)
    rows = table_rows(5, dtype, np.arange(first // width, (first + size) // width + 1))
    assert np.array_equal(out, rows.ravel()[first % width :][:size])


def test_files_hold_the_rows_that_the_recipe_gives(checkpoint: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    recipe = Recipe.read(checkpoint)
    shard_rows = recipe.num_rows // 128
    rng = random.Random(1)
    places = catalog(checkpoint)
    for shard in [0, 1, 2, 9, 10, 98, 100, 126, 127]:
        name = f"{TABLE}shard_{shard}.weight"
        # deserialize returns the bytes as the library finds them, without a framework
        tensors = dict(safetensors.deserialize(places[name].read_bytes()))
        assert tensors[name]["shape"] == [shard_rows, 160]
        assert tensors[name]["dtype"] == ("F8_E4M3" if recipe.dtype == "fp8" else "BF16")
        data = bytes(tensors[name]["data"])
        for row in [0, 1, shard_rows - 1, *rng.sample(range(shard_rows), 5)]:
            want = expected_row(3, recipe.dtype, shard * shard_rows + row)
            assert data[row * recipe.row_bytes :][: recipe.row_bytes] == want
        first = shard * shard_rows
        assert recipe.rows(np.arange(first, first + shard_rows)).tobytes() == data


def test_recipe_and_buffers_describe_the_table(checkpoint: Path) -> None:
    recipe = Recipe.read(checkpoint)
    places = catalog(checkpoint)

    def values(name: str) -> list[int]:
        base, _, entries = header(places[PREFIX + name])
        start, end = entries[PREFIX + name]["data_offsets"]
        data = places[PREFIX + name].read_bytes()[base + start : base + end]
        return list(struct.unpack(f"<{len(data) // 8}q", data))

    # the sixteen primes from 700 on, by any table of primes
    sizes = [701, 709, 719, 727, 733, 739, 743, 751, 757, 761, 769, 773, 787, 797, 809, 811]
    assert values("ngram_heads_vocab_sizes") == sizes
    assert values("ngram_heads_offsets") == [sum(sizes[:i]) for i in range(16)]
    assert all(m % 2 == 1 and 0 < m * 2047 < 2**63 for m in values("layer_multipliers"))
    assert recipe.num_rows == -(-sum(sizes) // 128) * 128
    assert recipe.table_bytes == recipe.num_rows * recipe.row_bytes
    text = json.loads((checkpoint / "config.json").read_text())["text_config"]
    assert (text["ngram_vocab_size_base"], text["ple_layer_ids"]) == (700, [2])
    assert "seed" not in text
    assert isinstance(text["eos_token_id"], int)
    scales = [n for n in places if n.endswith("weight_scale")]
    if recipe.dtype == "fp8":
        base, _, entries = header(places[scales[0]])
        at = base + entries[scales[0]]["data_offsets"][0]
        assert entries[scales[0]]["shape"] == [1]
        assert places[scales[0]].read_bytes()[at : at + 2] == b"\x51\x39"
    assert len(scales) == (recipe.dtype == "fp8")


def test_index_names_every_tensor_once(checkpoint: Path) -> None:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    entries = [(n, p.name) for p in checkpoint.glob("*.safetensors") for n in header(p)[2]]
    assert index["weight_map"] == dict(entries)
    assert len(entries) == len(dict(entries))
    total = 0
    for path in checkpoint.glob("*.safetensors"):
        base, _, tensors = header(path)
        ends = [t["data_offsets"][1] for t in tensors.values()]
        assert path.stat().st_size == base + max(ends)  # nothing behind the last tensor
        total += max(ends)
    assert index["metadata"]["total_size"] == total


def test_file_layout(checkpoint: Path) -> None:
    recipe = Recipe.read(checkpoint)
    shards: dict[str, list[int]] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        base, raw, entries = header(path)
        assert "__metadata__" not in entries
        if recipe.layout == "qwen":
            assert base % 8 == 0
            assert b": " not in raw
            by_start = sorted(entries, key=lambda n: int(entries[n]["data_offsets"][0]))
            assert by_start == list(entries)
        else:
            assert raw.endswith(b"}")
            assert b'"dtype": ' in raw
        numbers = [int(n.split("shard_")[1].split(".")[0]) for n in entries if "shard_" in n]
        if numbers:
            shards[path.name] = numbers
    places = {n: p.name for n, p in catalog(checkpoint).items()}
    if recipe.layout == "qwen":
        assert list(shards) == [f"model-{i:05d}-of-00037.safetensors" for i in range(5, 38)]
        sets = [sorted(s) for s in shards.values()]
        assert sets == [[0, 1], *([i, i + 1, i + 2, i + 3] for i in range(2, 126, 4)), [126, 127]]
        assert places[PREFIX + "layer_multipliers"] == "model-00005-of-00037.safetensors"
        assert places[PREFIX + "ngram_heads_offsets"] == "model-00037-of-00037.safetensors"
        assert len({*places.values()}) == 37
    else:
        kind = "plefp8" if recipe.dtype == "fp8" else "plebf16"
        assert list(shards) == [f"model-{kind}-{i:05d}.safetensors" for i in range(10)]
        assert [n for s in shards.values() for n in s] == sorted(range(128), key=str)
        assert [len(s) for s in shards.values()] == [13] * 9 + [11]
        assert places[PREFIX + "layer_multipliers"].startswith("model-bf16-")
        bases = [header(checkpoint / name)[0] for name in shards]
        assert any(base % 2 for base in bases)
        if recipe.dtype == "fp8":
            assert places[TABLE + "weight_scale"] == "model-plefp8-00009.safetensors"


def test_layout_has_the_byte_counts_of_the_releases() -> None:
    # sizes of the files on the hub; what the plans give at the real number of rows must be the same
    shards = layout.shard_tensors(320_001_536, 160, "fp8")
    scale = layout.Tensor(TABLE + "weight_scale", "BF16", (1,), data=b"\x51\x39")
    radixark = [plan.num_bytes for plan in layout.radixark_files([scale], shards)[:10]]
    tail = [5200027199, 5200027202, 5200027198, 5200027189, *[5200027190] * 5, 4400023163]
    assert radixark == tail
    qwen = layout.qwen_files([scale], shards)[5:-1]
    assert {plan.num_bytes for plan in qwen[:24]} == {1600008328}
    assert {plan.num_bytes for plan in qwen[24:]} == {1600008336}
    bases = [len(p.header) for p in layout.radixark_files([scale], shards)[:10]]
    assert bases == [2239, 2242, 2238, 2229, *[2230] * 5, 2041]


def test_fp8_markers_follow_the_layout(checkpoint: Path) -> None:
    recipe = Recipe.read(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    marked = "quantization_config" in config
    assert marked == ((recipe.dtype, recipe.layout) == ("fp8", "qwen"))
    stored = config["text_config"].get("ple_embedding_dtype")
    radixark_fp8 = (recipe.dtype, recipe.layout) == ("fp8", "radixark")
    assert stored == ("float8_e4m3fn" if radixark_fp8 else None)


def test_tokenizer_round_trips_any_text(checkpoint: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    config = json.loads((checkpoint / "config.json").read_text())
    text = config["text_config"]
    assert tokenizer.get_vocab_size() <= text["vocab_size"]
    assert tokenizer.token_to_id("<|endoftext|>") == text["eos_token_id"]
    assert tokenizer.token_to_id("<|image_pad|>") == config["image_token_id"]
    ends = json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"]
    assert [tokenizer.id_to_token(i) for i in ends] == ["<|im_end|>", "<|endoftext|>"]
    everything = "".join(chr(c) for c in range(1, 0x3000)) + "𝔘é\u0301 don't\r\n\t  x<|im_end|>y"
    for sample in (everything, " the water", "", "  "):
        ids = tokenizer.encode(sample).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == sample
        assert all(i < text["vocab_size"] for i in ids)
    assert tokenizer.encode(" the water of the house").tokens == [
        "Ġthe",
        "Ġwater",
        "Ġof",
        "Ġthe",
        "Ġhouse",
    ]


def test_stock_transformers_loads_it_and_the_table_decides_the_text(checkpoint: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    recipe = Recipe.read(checkpoint)
    if recipe.dtype == "fp8":
        pytest.importorskip("accelerate")
    transformers.utils.logging.disable_progress_bar()
    model, info = transformers.Qwen4ExpForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, output_loading_info=True
    )
    table = model.model.layers[1].ple.ple_embedding.ngram_embedding
    assert table.weight.shape == (recipe.num_rows, 160)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    # without a quantization_config stock transformers ignores the scale
    assert len(info["unexpected_keys"]) == ((recipe.dtype, recipe.layout) == ("fp8", "radixark"))
    if (recipe.dtype, recipe.layout) == ("fp8", "qwen"):
        assert table.weight.dtype == torch.float8_e4m3fn
        assert table.weight_scale.item() == 0.00019931793212890625
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)

    def answer(question: str) -> list[int]:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        out = model.generate(**ids, max_new_tokens=24, do_sample=False)[0]
        return list(out[ids["input_ids"].shape[1] :].tolist())

    first, second = answer("What is water?"), answer("What is fire?")
    assert len(first) == 24
    assert len(set(first)) > 12
    words = tokenizer.decode(first)
    assert words.replace(" ", "").replace(",", "").replace(".", "").isalpha()
    if info["unexpected_keys"]:
        return  # unscaled values drown the prompt
    assert first != second
    with torch.no_grad():
        rows = table.weight.view(torch.uint8)
        rows.copy_(rows.roll(1, 0))
    assert answer("What is water?")[0] != first[0]
