"""Layer 0 of Qwen3.8-Flash-Next with random weights: the work that a table's rows are read behind.

The layer is transformers' own, of the real shapes: 4 residual streams of 2560, a gated delta net of
16 and 48 heads of 128, 512 experts of which a token takes 10, and one shared expert. A step decodes
one token for each lane, from the state that the one before left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["LayerZero"]

_HIDDEN, _STREAMS = 2560, 4


def _config() -> Any:
    """Return the configuration of the released model, cut down to its first layer."""
    from transformers.models.qwen4_exp import Qwen4ExpTextConfig

    config = Qwen4ExpTextConfig(
        hidden_size=_HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        num_attention_heads=24,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=640,
        shared_expert_intermediate_size=640,
        hc_count=_STREAMS,
        hc_lowrank=320,
        ple_layer_ids=[],
    )
    # the one of transformers' that a graph can hold: no size of it depends on the routing
    config._experts_implementation = "grouped_mm"
    return config


class LayerZero:
    """The layer's weights on a device; one for steps of any number of lanes."""

    def __init__(self, device: torch.device) -> None:
        from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextDecoderLayer

        self.config = _config()
        self.device = device
        with torch.device("meta"):
            layer = Qwen4ExpTextDecoderLayer(self.config, 0).to(torch.bfloat16)
        self.layer = layer.to_empty(device=device).eval()
        with torch.no_grad():
            for weight in self.layer.parameters():
                weight.normal_(std=0.02)

    def step(self, lanes: int) -> Callable[[], None]:
        """Return what decodes one token for each lane, on the current stream."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.config)
        shape = (lanes, 1, _HIDDEN)
        states = torch.randn(shape, dtype=torch.bfloat16, device=self.device)

        def work() -> None:
            with torch.no_grad():
                self.layer(
                    states.repeat(1, 1, _STREAMS),
                    position_embeddings=None,
                    past_key_values=cache,
                )

        for _ in range(3):  # the first makes the state, the others load every kernel
            work()
        return work
