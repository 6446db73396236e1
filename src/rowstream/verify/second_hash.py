"""A second way to the row ids of tokens, for verify to compare with the first.

Shares no code with the families, the hash and the core: it derives the constants and hashes tokens
once more, in the plainest way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

__all__ = ["Constants", "derive", "token_rows"]

_SIEVE: Final = 1 << 18
_MASK64: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Constants:
    """The hash constants of one layer as the config gives them, and the rows that follow."""

    ngram_size: int
    heads_per_ngram: int
    vocab_size: int
    eos: int
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    num_rows: int  # padded
    row_values: int


def derive(config: dict[str, Any], tensor: str) -> Constants:
    """Derive the constants of the table whose tensors' names start with `tensor`."""
    text = config.get("text_config", config)
    size, per_order = text.get("ngram_size", 3), text.get("heads_per_ngram", 8)
    vocab = text.get("vocab_size", 248_320)
    eos = text["eos_token_id"]
    heads = (size - 1) * per_order
    layer = int(tensor.split("layers.")[-1].split(".")[0])
    ordinal = sorted(set(text["ple_layer_ids"])).index(layer + 1)
    sizes = _primes(text.get("ngram_vocab_size_base", 20_000_000), (ordinal + 1) * heads)[-heads:]
    half = max(1, (2**63 - 1) // vocab // 2)
    seed = text.get("seed", 1234) + 10_007 * ordinal
    width = text.get("ple_embed_dim")
    divisor = text.get("make_ngram_vocab_size_divisible_by", 128)
    return Constants(
        ngram_size=size,
        heads_per_ngram=per_order,
        vocab_size=vocab,
        eos=eos[0] if isinstance(eos, list) else eos,
        # splitmix64 adds its step to the state that it is given
        multipliers=tuple(_mix(seed + _GOLDEN * (j + 2)) % half * 2 + 1 for j in range(size)),
        sizes=tuple(sizes),
        offsets=tuple(sum(sizes[:head]) for head in range(heads)),
        num_rows=math.ceil(sum(sizes) / divisor) * divisor,
        row_values=(text.get("hidden_size", 2048) if width is None else width) // heads,
    )


def token_rows(constants: Constants, history: Sequence[int]) -> list[int]:
    """Return the rows of the last token of a history, with plain integers."""
    rows: list[int] = []
    mixed = history[-1] * constants.multipliers[0]
    ended = False
    for distance in range(1, constants.ngram_size):
        token = history[-1 - distance] if distance < len(history) else constants.eos
        ended = ended or token == constants.eos
        mixed ^= (constants.eos if ended else token) * constants.multipliers[distance]
        for _ in range(constants.heads_per_ngram):
            head = len(rows)
            rows.append(mixed % constants.sizes[head] + constants.offsets[head])
    return rows


def _mix(state: int) -> int:
    z = state & _MASK64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK64
    return z ^ (z >> 31)


def _primes(lowest: int, count: int) -> list[int]:
    """Return the first primes from `lowest` on, with a sieve."""
    found: list[int] = []
    start = max(2, lowest)
    while len(found) < count:
        limit = math.isqrt(start + _SIEVE)
        small = np.ones(limit + 1, np.bool_)
        window = np.ones(_SIEVE, np.bool_)
        for number in range(2, limit + 1):
            if small[number]:
                small[number * number :: number] = False
                window[max(number * number, -(-start // number) * number) - start :: number] = False
        found += (np.flatnonzero(window) + start).tolist()
        start += _SIEVE
    return found[:count]
