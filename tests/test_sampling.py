"""Sampling against probabilities worked out with plain Python."""

from __future__ import annotations

import math
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from rowstream.runtime.sampling import Sampler, choose  # noqa: E402

LOGITS = [0.3, 2.0, -1.0, 1.5, 0.0, float("-inf")]
DRAWS = 1000


def probabilities(temperature: float, top_p: float, top_k: int) -> dict[int, float]:
    weights = {i: math.exp(x / temperature) for i, x in enumerate(LOGITS) if math.isfinite(x)}
    ranked = sorted(weights, key=lambda i: -weights[i])[: top_k or None]
    total = sum(weights[i] for i in ranked)
    kept: list[int] = []
    before = 0.0
    for i in ranked:
        if before < top_p or not kept:
            kept.append(i)
        before += weights[i] / total
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, 100])
def test_shares_of_evenly_spread_draws(temperature: float, top_p: float, top_k: int) -> None:
    logits = torch.tensor(LOGITS)
    counts = Counter(
        choose(logits, temperature=temperature, top_p=top_p, top_k=top_k, draw=(i + 0.5) / DRAWS)
        for i in range(DRAWS)
    )
    expected = probabilities(temperature, top_p, top_k)
    assert set(counts) <= set(expected)
    for token, probability in expected.items():
        assert abs(counts[token] / DRAWS - probability) <= 1.5 / DRAWS


@pytest.mark.parametrize("draw", [0.0, math.nextafter(1.0, 0.0)])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_the_ends_of_the_draw_give_possible_tokens(draw: float, top_p: float) -> None:
    logits = torch.tensor([float("-inf"), 1.0, 2.0, float("-inf")])
    assert choose(logits, temperature=1.0, top_p=top_p, top_k=0, draw=draw) in (1, 2)


def test_equal_logits_keep_their_order() -> None:
    # as argmax has it, so that top_p 0 is greedy
    logits = torch.zeros(5000)
    logits[[700, 30, 4000]] = 1.0
    assert choose(logits, temperature=1.0, top_p=0.0, top_k=0, draw=0.9) == 30
    drawn = [choose(logits, temperature=1.0, top_p=1.0, top_k=2, draw=d) for d in (0.1, 0.5, 0.9)]
    assert drawn == [30, 700, 4000]


def test_a_tiny_temperature_takes_the_most_likely_token() -> None:
    logits = torch.tensor([1e4, 1e4 + 1, -1e4])
    assert choose(logits, temperature=1e-300, top_p=1.0, top_k=0, draw=0.5) == 1


@pytest.mark.parametrize("logits", [[float("nan"), 1.0], [float("-inf")] * 2])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_nothing_to_choose_from(logits: list[float], top_p: float) -> None:
    with pytest.raises(ValueError, match="logits"):
        choose(torch.tensor(logits), temperature=1.0, top_p=top_p, top_k=0, draw=0.5)


def test_a_sampler_leaves_the_chosen_token_alone() -> None:
    scores = torch.tensor([LOGITS])
    sampler = Sampler(temperature=1.0, top_p=1.0, top_k=1, seed=0)
    masked = sampler(torch.tensor([[0]]), scores)
    assert int(masked.argmax()) == 1
    assert int(torch.isfinite(masked).sum()) == 1


def draws(seed: int | None) -> list[int]:
    sampler = Sampler(temperature=1.0, top_p=1.0, top_k=0, seed=seed)
    scores = torch.zeros(1, 1000)
    return [int(sampler(torch.tensor([[0]]), scores).argmax()) for _ in range(8)]


def test_seeds() -> None:
    assert draws(5) == draws(5)
    assert len({tuple(draws(seed)) for seed in (0, 1, -1, 2**63 - 1)}) == 4
    assert draws(None) != draws(None)
