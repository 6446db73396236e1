"""config.json and generation_config.json of a synthetic checkpoint.

The table has its real geometry, everything else is tiny.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from rowstream.families.ple_config import DEFAULT_SEED
from rowstream.hashing import NgramConstants, layer_constants
from rowstream.synth.layout import LANGUAGE_MODEL
from rowstream.synth.stream import ROW_VALUES, row_bytes
from rowstream.synth.tokenizer import SPECIAL_IDS, VOCAB_SIZE

NGRAM_SIZE: Final = 3
HEADS_PER_NGRAM: Final = 8
HEADS: Final = (NGRAM_SIZE - 1) * HEADS_PER_NGRAM

TEXT: Final[dict[str, Any]] = {
    "model_type": "qwen4_exp_text",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": SPECIAL_IDS["<|endoftext|>"],
    "dtype": "bfloat16",
    "eos_token_id": SPECIAL_IDS["<|endoftext|>"],
    "hc_count": 4,
    "hc_lowrank": 16,
    "head_dim": 32,
    "heads_per_ngram": HEADS_PER_NGRAM,
    "hidden_act": "silu",
    "hidden_size": 64,
    "indexer_budget": 256,
    "indexer_compress_ratio": 4,
    "indexer_head_dim": 32,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 2,
    "initializer_range": 0.02,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "make_ngram_vocab_size_divisible_by": 128,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 32,
    "ngram_size": NGRAM_SIZE,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "output_gate_type": "sigmoid",
    "pad_token_id": None,
    "ple_conv_kernel_size": 4,
    "ple_embed_dim": HEADS * ROW_VALUES,
    "ple_layer_ids": [2],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [4, 2, 2],
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "shared_expert_intermediate_size": 32,
    "split_ngram_parts": 128,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}

_VISION: Final[dict[str, Any]] = {
    "model_type": "qwen4_exp_vision",
    "depth": 1,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "in_channels": 3,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def constants_for(base: int) -> NgramConstants:
    """Derive the hash constants of the one PLE layer."""
    if base < 2:
        raise ValueError(f"base needs 2 or more, got {base}")
    return layer_constants(
        1,
        ngram_size=NGRAM_SIZE,
        heads_per_ngram=HEADS_PER_NGRAM,
        vocab_size=VOCAB_SIZE,
        eos=TEXT["eos_token_id"],
        vocab_base=base,
        seed=DEFAULT_SEED,
    )[0]


def padded_rows(constants: NgramConstants) -> int:
    """Return the rows that the table stores for these constants."""
    multiple: int = TEXT["make_ngram_vocab_size_divisible_by"]
    return -(-constants.num_rows // multiple) * multiple


def base_for(table_gib: float, dtype: str) -> int:
    """Return the `ngram_vocab_size_base` whose table is nearest to `table_gib` GiB.

    The releases have 20 million. Raises ValueError when the table would have fewer than two rows a
    head.
    """
    smallest = 2 * HEADS * row_bytes(dtype) / 2**30
    if not smallest <= table_gib < 2**20:
        raise ValueError(f"table_gib needs {smallest:.2g} to {2**20}, got {table_gib}")
    return max(2, round(table_gib * 2**30 / row_bytes(dtype) / HEADS))


def text_config(base: int, dtype: str, layout: str) -> dict[str, Any]:
    """Return `text_config`, without a `seed`: as in the releases, the default holds."""
    text = {**TEXT, "ngram_vocab_size_base": base}
    if dtype == "fp8" and layout == "radixark":
        text["ple_embedding_dtype"] = "float8_e4m3fn"
    return dict(sorted(text.items()))


def model_config(base: int, dtype: str, layout: str, dense_names: Iterable[str]) -> dict[str, Any]:
    """Return config.json. `dense_names` are the tensors that an FP8 loader must leave in BF16."""
    config: dict[str, Any] = {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": SPECIAL_IDS["<|image_pad|>"],
        "model_type": "qwen4_exp",
        "text_config": text_config(base, dtype, layout),
        "tie_word_embeddings": False,
        "video_token_id": SPECIAL_IDS["<|video_pad|>"],
        "vision_config": _VISION,
        "vision_end_token_id": SPECIAL_IDS["<|vision_end|>"],
        "vision_start_token_id": SPECIAL_IDS["<|vision_start|>"],
    }
    if dtype == "fp8" and layout == "qwen":
        quantization = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": _dense_modules(dense_names),
            "modules_to_convert": ["ple.ple_embedding.ngram_embedding"],
        }
        config["quantization_config"] = quantization
        # the releases have it at the top alone; transformers' text-only class does not look there,
        # and would multiply by no scale without a word
        config["text_config"]["quantization_config"] = quantization
    return config


def _dense_modules(dense_names: Iterable[str]) -> list[str]:
    modules = {name.removesuffix(".weight") for name in dense_names if name.endswith(".weight")}
    # the runtime joins the experts of a layer into one module
    modules |= {name.split(".experts.")[0] + ".experts" for name in modules if ".experts." in name}
    modules.add("model.visual")
    return sorted(m for m in modules if m.startswith((LANGUAGE_MODEL, "lm_head", "model.visual")))


def generation_config() -> dict[str, Any]:
    """Return generation_config.json: greedy, ended by either end token."""
    ends = [SPECIAL_IDS["<|im_end|>"], SPECIAL_IDS["<|endoftext|>"]]
    return {
        "bos_token_id": SPECIAL_IDS["<|endoftext|>"],
        "do_sample": False,
        "eos_token_id": ends,
        "pad_token_id": SPECIAL_IDS["<|endoftext|>"],
    }
