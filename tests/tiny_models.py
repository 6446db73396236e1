"""Tiny qwen4_exp checkpoints from transformers itself, in which a wrong row changes the logits.

Owns the small configs, the rewriting of a saved BF16 table as FP8 and the resident models that
serve as oracles; nothing here imports rowstream.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

EOS = 1
# What FP8 rows are multiplied with. N(0, 1) rows reach 4.6: all codes stay below E4M3's 448.
SCALE = 0.0123
_root = tempfile.TemporaryDirectory(prefix="tiny-models-")
_SHARD = re.compile(r"\.ngram_embedding\.shard_\d+\.weight$")


def text_config(**changes: Any) -> Any:
    """Return a four-layer text config with one PLE layer (decoder layer 1) of about 81,000 rows."""
    settings: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "hc_count": 4,
        "hc_lowrank": 16,
        "ple_layer_ids": [2],
        "ple_embed_dim": 128,
        "ngram_vocab_size_base": 5000,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": 8,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "bos_token_id": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "max_position_embeddings": 4096,
        "output_gate_type": "sigmoid",
        "initializer_range": 0.2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
        },
        "dtype": "bfloat16",
    }
    return transformers.Qwen4ExpTextConfig(**(settings | changes))


def stir(model: Any) -> None:
    """Give the n-gram layers weights that reach the logits: a fresh model's convolution is zero."""
    with torch.no_grad():
        for layer in text_layers(model):
            if layer.ple is not None:
                layer.ple.conv1d.weight.normal_(0, 0.3)
                layer.ple.ple_embedding.ngram_embedding.weight.normal_(0, 1.0)
                layer.ple.value_proj.weight.normal_(0, 0.5)
                layer.ple.key_proj.weight.normal_(0, 0.5)


def text_layers(model: Any) -> Any:
    """Return the decoder layers of a text-only or a multimodal model."""
    return getattr(model.model, "language_model", model.model).layers


def write_text(folder: Path, *, file_size: str = "2MB", **changes: Any) -> Path:
    """Save a BF16 text-only checkpoint."""
    torch.manual_seed(0)
    model: Any = transformers.Qwen4ExpForCausalLM(text_config(**changes))
    stir(model.to(torch.bfloat16).eval())
    model.save_pretrained(folder, max_shard_size=file_size)
    return folder


def write_multimodal(folder: Path, **changes: Any) -> Path:
    """Save a BF16 checkpoint with a vision tower; the text part is the same as write_text's."""
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    }
    text = text_config(**changes).to_dict()
    config = transformers.Qwen4ExpConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=500,
        video_token_id=501,
        vision_start_token_id=502,
        vision_end_token_id=503,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model: Any = transformers.Qwen4ExpForConditionalGeneration(config)
    stir(model.to(torch.bfloat16).eval())
    model.save_pretrained(folder, max_shard_size="2MB")
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Set top-level keys of config.json; a key set to None is removed."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config.pop(key, None) if value is None else config.__setitem__(key, value)
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Any) -> None:
    """Rewrite every file as `change(tensors)` leaves it, and the index with it."""
    weight_map = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, path.name))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def table_apart(folder: Path) -> None:
    """Move the table's shards into files of their own, `table-N.safetensors`."""
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    for number, path in enumerate(sorted(folder.glob("*.safetensors"))):
        tensors = load_file(path)
        shards = {key: tensors.pop(key) for key in list(tensors) if _SHARD.search(key)}
        save_file(tensors, path, metadata={"format": "pt"})
        if shards:
            name = f"table-{number}.safetensors"
            save_file(shards, folder / name, metadata={"format": "pt"})
            index["weight_map"].update(dict.fromkeys(shards, name))
    index_path.write_text(json.dumps(index))


def as_fp8(
    source: Path, folder: Path, *, scale_dtype: torch.dtype = torch.bfloat16, quantized: bool = True
) -> Path:
    """Copy a BF16 checkpoint with its table as FP8 and one scale, as Qwen's FP8 release has it.

    `quantized`: name the table in config.json's quantization_config and store the shared experts
    as FP8 blocks; without it config.json says nothing, as in RadixArk's release.
    """
    shutil.copytree(source, folder)
    done: set[str] = set()

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            if _SHARD.search(key):
                prefix = key[: key.index(".shard_")]
                tensors[key] = (tensors[key].float() / SCALE).to(torch.float8_e4m3fn)
                if prefix not in done:
                    done.add(prefix)
                    tensors[prefix + ".weight_scale"] = torch.tensor([SCALE], dtype=scale_dtype)
            elif quantized and ".shared_expert." in key and key.endswith("_proj.weight"):
                scale = tensors[key].float().abs().max() / 448
                tensors[key] = (tensors[key].float() / scale).to(torch.float8_e4m3fn)
                tensors[key + "_scale_inv"] = scale.reshape(1, 1)

    edit_tensors(folder, change)
    if quantized:
        kept = ["lm_head", "linear_attn", "self_attn", "ple.key_proj", "ple.value_proj", "mlp.gate"]
        kept += ["mlp.experts", "shared_expert_gate", "hyper_connection", "visual"]
        edit_config(
            folder,
            quantization_config={
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": kept,
                "modules_to_convert": ["ple.ple_embedding.ngram_embedding"],
            },
        )
    return folder


@functools.cache
def checkpoint(name: str) -> Path:
    """Write one of the named checkpoints, once; tests must not change it."""
    folder = Path(_root.name) / name
    if name == "bf16":
        return write_text(folder)
    if name == "list-eos":
        # 7 ends a text too, and must not cut an n-gram
        return write_text(folder, eos_token_id=[EOS, 7])
    if name == "two-layers":
        return write_text(folder, ple_layer_ids=[1, 3])
    if name == "two-layers-fp8":
        return as_fp8(checkpoint("two-layers"), folder)
    if name == "multimodal":
        return write_multimodal(folder)
    if name == "multimodal-fp8":
        return as_fp8(checkpoint("multimodal"), folder)
    if name == "multimodal-fp8-inner":
        shutil.copytree(checkpoint("multimodal-fp8"), folder)
        config = json.loads((folder / "config.json").read_text())
        inner = config["text_config"] | {"quantization_config": config["quantization_config"]}
        edit_config(folder, quantization_config=None, text_config=inner)
        return folder
    if name == "fp8":
        return as_fp8(checkpoint("bf16"), folder)
    if name == "fp8-f32-scale":
        return as_fp8(checkpoint("bf16"), folder, scale_dtype=torch.float32)
    if name == "fp8-unnamed":
        return as_fp8(checkpoint("bf16"), folder, quantized=False)
    raise ValueError(name)


def resident(folder: Path, dtype: Any = "auto") -> Any:
    """Load the stock model with its table in memory.

    Of a multimodal checkpoint the text part, with the quantization_config that only the whole has:
    without it stock transformers drops the scale of the table.
    """
    whole = transformers.AutoConfig.from_pretrained(folder)
    config = whole.get_text_config()
    if getattr(whole, "quantization_config", None) is not None:
        config.quantization_config = whole.quantization_config
    model: Any = transformers.Qwen4ExpForCausalLM
    return model.from_pretrained(folder, config=config, dtype=dtype).eval()
