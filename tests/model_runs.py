"""What tests ask of a qwen4_exp model: every way in which tokens reach its n-gram layers.

Each scenario takes a model and returns logits or tokens; it holds for all supported versions of
transformers.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
import transformers

from tiny_models import EOS, checkpoint, resident

Model = Any
Scenario = Callable[[Model], Any]


def prompts(count: int = 2, length: int = 40) -> Any:
    """Token ids with an eos inside the first prompt, and 7, which ends a text in one checkpoint."""
    ids = torch.randint(3, 490, (count, length), generator=torch.Generator().manual_seed(7))
    ids[0, 9] = EOS
    ids[-1, 12] = 7
    return ids


_CACHE = (
    "cache"
    if "cache" in inspect.signature(transformers.Qwen4ExpForCausalLM.forward).parameters
    else "past_key_values"
)


def step(model: Model, ids: Any, cache: Any = None) -> tuple[Any, Any]:
    options = {} if cache is None else {_CACHE: cache}
    answer = model(input_ids=ids, use_cache=True, **options)
    return answer.logits, getattr(answer, _CACHE)


def steps(model: Model, ids: Any, cuts: list[int]) -> Any:
    cache, logits = None, []
    for start, end in itertools.pairwise(cuts):
        part, cache = step(model, ids[:, start:end], cache)
        logits.append(part)
    return torch.cat(logits, 1)


def prefill(model: Model) -> Any:
    return model(input_ids=prompts(), use_cache=False).logits


def chunked_prefill(model: Model) -> Any:
    # the eos at 9 and the two tokens behind it fall on both sides of a cut
    return steps(model, prompts(), [0, 1, 10, 11, 30, 40])


def cached_decode(model: Model) -> Any:
    return steps(model, prompts(), [0, 8, *range(9, 20)])


def left_padded(model: Model) -> Any:
    ids = prompts()
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    ids[1, :7] = EOS
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 7:]


def generate(model: Model, ids: Any, **options: Any) -> Any:
    """Generate eight tokens greedily, whether or not an eos is among the likely ones."""
    length = {"min_new_tokens": 8, "max_new_tokens": 8}
    return model.generate(ids, do_sample=False, pad_token_id=EOS, **length, **options)


def greedy(model: Model, **options: Any) -> Any:
    return generate(model, prompts(length=17), **options)


def greedy_left_padded(model: Model) -> Any:
    ids = prompts(length=17)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return generate(model, ids, attention_mask=mask)


def two_beams(model: Model) -> Any:
    return greedy(model, num_beams=2)


def three_beams(model: Model) -> Any:
    return greedy(model, num_beams=3)


def static_cache(model: Model) -> Any:
    return greedy(model, cache_implementation="static")


def forked_cache(model: Model) -> Any:
    ids = prompts()
    _, cache = step(model, ids[:, :15])
    fork = copy.deepcopy(cache)
    parts = []
    for branch, others in ((cache, ids[:, 15:20]), (fork, ids[:, 25:30])):
        first, state = step(model, others[:, :3], branch)
        second, _ = step(model, others[:, 3:], state)
        parts += [first, second]
    return torch.cat(parts, 1)


SCENARIOS = [
    prefill,
    chunked_prefill,
    cached_decode,
    left_padded,
    greedy,
    greedy_left_padded,
    two_beams,
    three_beams,
    static_cache,
    forked_cache,
]


@functools.cache
def _resident(name: str, dtype: Any) -> Model:
    return resident(checkpoint(name), dtype)


@functools.cache
def expected(name: str, dtype: Any, scenario: Scenario) -> Any:
    """Return what the stock model with its table in memory answers."""
    with torch.no_grad():
        return scenario(_resident(name, dtype))
