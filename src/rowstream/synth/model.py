"""The dense weights of a synthetic checkpoint: random, small, and ruled by the table.

The PLE value is the largest part of the residual stream, so the next word is a function of the last
tokens' rows; only whole words have a row in `lm_head`, so the text is made of words and never ends
early. Knows no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rowstream.hashing import NgramConstants
from rowstream.synth.config import TEXT
from rowstream.synth.layout import LANGUAGE_MODEL, PLE, PLE_EMBEDDING, TABLE, Tensor
from rowstream.synth.stream import uniform
from rowstream.synth.tokenizer import SPOKEN_IDS

# bits of the one scale of the released FP8 table: 0.00019931793212890625
SCALE_BITS: Final = 0x3951
# root mean square of a table value: all finite E4M3 codes equally likely, times the scale; the bf16
# mask's values
_VALUE_RMS: Final = {"fp8": 0.0203, "bf16": 0.62}


def _bf16(values: NDArray[np.float32]) -> bytes:
    """Round to BF16, ties to even."""
    bits: NDArray[np.uint32] = values.astype("<f4").view("<u4")
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    high: NDArray[np.uint16] = (bits >> np.uint32(16)).astype("<u2")
    return high.tobytes()


class _Weights:
    """Collects tensors; every one is a function of (seed, its name) alone."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.tensors: list[Tensor] = []

    def add(self, name: str, *shape: int, std: float | None = None, mean: float = 0.0) -> None:
        """Add uniform values; by default `std` lets a linear layer keep its input's size."""
        if std is None:
            std = 1 / math.sqrt(shape[-1])
        values = uniform(self._seed, name, math.prod(shape)).reshape(shape)
        values = values * np.float32(std * math.sqrt(3)) + np.float32(mean)
        self.put(name, values)

    def put(self, name: str, values: NDArray[np.float32]) -> None:
        self.tensors.append(Tensor(name, "BF16", values.shape, data=_bf16(values)))


def dense_tensors(seed: int, dtype: str, constants: NgramConstants) -> list[Tensor]:
    """Return every tensor but the shards: weights, hash buffers and the scale of an `fp8` table."""
    w = _Weights(seed)
    vocab, hidden = TEXT["vocab_size"], TEXT["hidden_size"]
    w.add(LANGUAGE_MODEL + "embed_tokens.weight", vocab, hidden, std=0.2)
    for layer, kind in enumerate(TEXT["layer_types"]):
        prefix = f"{LANGUAGE_MODEL}layers.{layer}."
        if kind == "linear_attention":
            _linear_attention(w, prefix + "linear_attn.")
        else:
            _full_attention(w, prefix + "self_attn.")
        _experts(w, prefix + "mlp.")
        _hyper_connection(w, prefix + "attn_hyper_connection.")
        _hyper_connection(w, prefix + "mlp_hyper_connection.")
    _ple(w, dtype)
    _hyper_connection(w, LANGUAGE_MODEL + "hyper_connection_mixer.", inject=False)
    head = uniform(seed, "lm_head.weight", vocab * hidden).reshape(vocab, hidden)
    spoken = np.zeros((vocab, 1), dtype=np.float32)
    spoken[list(SPOKEN_IDS)] = 1
    w.put("lm_head.weight", head * spoken)
    return [*w.tensors, *_table_companions(dtype, constants)]


def _linear_attention(w: _Weights, prefix: str) -> None:
    hidden, heads = TEXT["hidden_size"], TEXT["linear_num_value_heads"]
    keys = TEXT["linear_num_key_heads"] * TEXT["linear_key_head_dim"]
    values = heads * TEXT["linear_value_head_dim"]
    # decay rates around 0.05 a token: the state remembers the whole of a short prompt
    w.add(prefix + "A_log", heads, std=0.5, mean=-3.0)
    w.add(prefix + "dt_bias", heads, std=0.3)
    w.add(prefix + "conv1d.weight", 2 * keys + values, 1, TEXT["linear_conv_kernel_dim"])
    w.add(prefix + "in_proj_qkv.weight", 2 * keys + values, hidden)
    w.add(prefix + "in_proj_z.weight", values, hidden)
    w.add(prefix + "in_proj_a.weight", heads, hidden)
    w.add(prefix + "in_proj_b.weight", heads, hidden)
    w.add(prefix + "norm.weight", TEXT["linear_value_head_dim"], std=0.1, mean=1.0)
    w.add(prefix + "out_proj.weight", hidden, values)


def _full_attention(w: _Weights, prefix: str) -> None:
    hidden, size = TEXT["hidden_size"], TEXT["head_dim"]
    queries, keys = TEXT["num_attention_heads"] * size, TEXT["num_key_value_heads"] * size
    index_size = TEXT["indexer_head_dim"]
    w.add(prefix + "q_proj.weight", 2 * queries, hidden)  # queries and their output gates
    w.add(prefix + "k_proj.weight", keys, hidden)
    w.add(prefix + "v_proj.weight", keys, hidden)
    w.add(prefix + "o_proj.weight", hidden, queries, std=2 / math.sqrt(queries))
    # norms store their weight minus one; about 2 makes the attention pick tokens instead of
    # averaging all
    w.add(prefix + "q_norm.weight", size, std=0.1, mean=1.0)
    w.add(prefix + "k_norm.weight", size, std=0.1, mean=1.0)
    index_heads = TEXT["indexer_n_heads"] + TEXT["indexer_kv_heads"]
    w.add(prefix + "indexer.index_qk_proj.weight", index_heads * index_size, hidden)
    w.add(prefix + "indexer.q_layernorm.weight", index_size, std=0.1)
    w.add(prefix + "indexer.k_layernorm.weight", index_size, std=0.1)


def _experts(w: _Weights, prefix: str) -> None:
    hidden = TEXT["hidden_size"]
    w.add(prefix + "gate.weight", TEXT["num_experts"], hidden)
    w.add(prefix + "shared_expert_gate.weight", 1, hidden)
    for name, width in _mlps(prefix):
        w.add(name + "gate_proj.weight", width, hidden)
        w.add(name + "up_proj.weight", width, hidden)
        w.add(name + "down_proj.weight", hidden, width)


def _mlps(prefix: str) -> Iterator[tuple[str, int]]:
    for expert in range(TEXT["num_experts"]):
        yield f"{prefix}experts.{expert}.", TEXT["moe_intermediate_size"]
    yield prefix + "shared_expert.", TEXT["shared_expert_intermediate_size"]


def _hyper_connection(w: _Weights, prefix: str, *, inject: bool = True) -> None:
    streams, rank = TEXT["hc_count"], TEXT["hc_lowrank"]
    width = streams * TEXT["hidden_size"]
    w.add(prefix + "hc_norm.weight", width, std=0.1)
    w.add(prefix + "input_mix_weight_down.weight", rank, width)
    w.add(prefix + "input_mix_weight_up.weight", width, rank)
    if inject:
        w.add(prefix + "block_inject_weight.weight", streams, width)


def _ple(w: _Weights, dtype: str) -> None:
    embed, hidden = TEXT["ple_embed_dim"], TEXT["hidden_size"]
    width = TEXT["hc_count"] * hidden
    unit = 1 / (math.sqrt(embed) * _VALUE_RMS[dtype])
    w.add(PLE + "key_proj.weight", width, embed, std=unit)
    # twice the size of a layer's own output: the n-gram decides, the text before it has a say
    w.add(PLE + "value_proj.weight", hidden, embed, std=2 * unit)
    w.add(PLE + "conv1d.weight", width, 1, TEXT["ple_conv_kernel_size"], std=0.3)
    for norm in ("norm_key", "norm_query", "norm_conv"):
        w.add(f"{PLE}{norm}.weight", width, std=0.1)


def _table_companions(dtype: str, constants: NgramConstants) -> Iterator[Tensor]:
    for name, values in (
        ("layer_multipliers", constants.multipliers),
        ("ngram_heads_offsets", constants.offsets),
        ("ngram_heads_vocab_sizes", constants.sizes),
    ):
        data = np.array(values, dtype="<i8").tobytes()
        yield Tensor(PLE_EMBEDDING + name, "I64", (len(values),), data=data)
    if dtype == "fp8":
        yield Tensor(TABLE + ".weight_scale", "BF16", (1,), data=SCALE_BITS.to_bytes(2, "little"))
