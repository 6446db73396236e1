"""Choice of the next token from logits: temperature, top-k, top-p and a random stream.

Works on torch tensors on any device; knows neither model nor tokenizer.
"""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor


def choose(logits: Tensor, *, temperature: float, top_p: float, top_k: int, draw: float) -> int:
    """Pick a token id for a draw in [0, 1): the same logits and draw give the same token.

    `logits` is [vocab]; `temperature` must be positive; `top_k` 0 and `top_p` 1 keep every token.
    Raises ValueError when there is nothing to choose from, as with NaN logits.
    """
    peak = float(logits.max())
    if not math.isfinite(peak):
        raise ValueError(f"logits: need a finite maximum, have {peak}")
    ids: Tensor | None = None
    if top_k:
        # ties with the last one stay, as in transformers
        last = torch.topk(logits, min(top_k, logits.numel())).values[-1]
        ids = (logits >= last).nonzero()[:, 0]
        logits = logits[ids]
    if top_p < 1.0:
        # stable: among equals the lowest id comes first, which is the one that argmax takes
        logits, order = torch.sort(logits, descending=True, stable=True)
        ids = order if ids is None else ids[order]
    # the maximum goes to 0 first, so that a tiny temperature does not overflow
    weights = torch.softmax((logits.double() - peak) / temperature, dim=0)
    reach = torch.cumsum(weights, dim=0)
    count = weights.numel()
    if top_p < 1.0:
        # a token stays while those before it fall short of top_p, so the first always does
        count = max(1, int((reach - weights < top_p).sum()))
    total = float(reach[count - 1])
    # strictly below the total, so that the token found has a weight
    target = min(draw * total, math.nextafter(total, 0.0))
    at = int(torch.searchsorted(reach[:count], target, right=True))
    return at if ids is None else int(ids[at])


class Sampler:
    """Be a logits processor that leaves one token, drawn by `choose`, for a greedy loop to take.

    So the loop of `generate` needs no global random state: each request has its own.
    """

    def __init__(
        self, *, temperature: float, top_p: float, top_k: int, seed: int | None = None
    ) -> None:
        self._temperature = temperature
        self._top_p = top_p
        self._top_k = top_k
        # seeded by text: Random(-1) and Random(1) are the same stream
        self._random = random.Random(None if seed is None else str(seed))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask [1, vocab] scores but for the chosen token."""
        token = choose(
            scores[0],
            temperature=self._temperature,
            top_p=self._top_p,
            top_k=self._top_k,
            draw=self._random.random(),
        )
        masked = torch.full_like(scores, float("-inf"))
        masked[0, token] = 0.0
        return masked
