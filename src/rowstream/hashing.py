"""The n-gram hash of qwen4_exp: its constants, and the rows that each token of a run needs.

Plain NumPy and integers; the reference for the native hash. Knows no file and no config key.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["NgramConstants", "layer_constants", "ngram_row_ids"]

_INT64_MAX = 2**63 - 1
_UINT64_MASK = 2**64 - 1
_SPLITMIX_STEP = 0x9E3779B97F4A7C15
_LAYER_SEED_STEP = 10_007  # distance between the seeds of successive PLE layers

# Miller-Rabin to these bases is exact below the bound (Jaeschke 1993)
_WITNESSES = (2, 3, 5, 7, 11)
_WITNESSES_BOUND = 2_152_302_898_747
_SMALL_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)
_SMALL_PRODUCT = math.prod(_SMALL_PRIMES)


@dataclass(frozen=True, slots=True)
class NgramConstants:
    """What turns a window of tokens into row ids, for one PLE layer.

    Head h of order n hashes n tokens; heads are ordered by order, from 2 to `ngram_size`.
    """

    ngram_size: int
    heads_per_ngram: int
    vocab_size: int
    eos: int
    multipliers: tuple[int, ...]  # [ngram_size], odd
    sizes: tuple[int, ...]  # [heads], rows of each head
    offsets: tuple[int, ...]  # [heads], first row of each head

    def __post_init__(self) -> None:
        if self.ngram_size < 2 or self.heads_per_ngram < 1:
            raise ValueError(
                f"hash constants need ngram_size >= 2 and heads_per_ngram >= 1, "
                f"got {self.ngram_size} and {self.heads_per_ngram}"
            )
        if len(self.multipliers) != self.ngram_size:
            raise ValueError(
                f"hash constants need {self.ngram_size} multipliers, got {len(self.multipliers)}"
            )
        if not len(self.sizes) == len(self.offsets) == self.heads:
            raise ValueError(
                f"hash constants need {self.heads} sizes and offsets, "
                f"got {len(self.sizes)} and {len(self.offsets)}"
            )

    @property
    def heads(self) -> int:
        """Rows that one token needs."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def groups(self) -> tuple[int, ...]:
        """Heads of each order."""
        return (self.heads_per_ngram,) * (self.ngram_size - 1)

    @property
    def num_rows(self) -> int:
        """Rows that a token can reach; the table is padded beyond them."""
        return sum(self.sizes)


def layer_constants(
    num_layers: int,
    *,
    ngram_size: int,
    heads_per_ngram: int,
    vocab_size: int,
    eos: int,
    vocab_base: int,
    seed: int,
) -> tuple[NgramConstants, ...]:
    """Derive the constants of the first `num_layers` PLE layers of a model.

    Each layer takes the primes from `vocab_base` on where the layer before stopped, and a seed of
    its own.
    """
    heads = (ngram_size - 1) * heads_per_ngram
    primes = itertools.islice(_primes_from(vocab_base), num_layers * heads)
    layers = []
    for ordinal in range(num_layers):
        sizes = tuple(itertools.islice(primes, heads))
        layers.append(
            NgramConstants(
                ngram_size=ngram_size,
                heads_per_ngram=heads_per_ngram,
                vocab_size=vocab_size,
                eos=eos,
                multipliers=_multipliers(ngram_size, vocab_size, seed + _LAYER_SEED_STEP * ordinal),
                sizes=sizes,
                offsets=tuple(itertools.accumulate(sizes[:-1], initial=0)),
            )
        )
    return tuple(layers)


def ngram_row_ids(
    constants: NgramConstants, context: ArrayLike | None, tokens: ArrayLike
) -> NDArray[np.int64]:
    """Hash a run of tokens into the rows they need: int64 [len(tokens), heads].

    `context` is the `ngram_size - 1` ids before the first token; None means the start of a
    sequence, which reads as eos. An n-gram never reaches past an earlier eos: what lies before it
    reads as eos too. An id outside [0, vocab_size) raises ValueError.
    """
    reach = constants.ngram_size - 1
    ids = _checked_ids(tokens, "tokens", constants.vocab_size)
    if context is None:
        before = np.full(reach, constants.eos, np.int64)
    else:
        before = _checked_ids(context, "context", constants.vocab_size)
        if len(before) != reach:
            raise ValueError(f"context needs {reach} ids, got {len(before)}")
    history = np.concatenate((before, ids))
    count = len(ids)
    rows = np.empty((count, constants.heads), np.int64)
    within = np.ones(count, np.bool_)  # no eos between the token and the predecessor looked at
    mixed = ids * constants.multipliers[0]
    for distance in range(1, constants.ngram_size):
        predecessor = history[reach - distance : reach - distance + count]
        within &= predecessor != constants.eos
        mixed = mixed ^ (
            np.where(within, predecessor, constants.eos) * constants.multipliers[distance]
        )
        heads = slice(
            (distance - 1) * constants.heads_per_ngram, distance * constants.heads_per_ngram
        )
        sizes = np.array(constants.sizes[heads], np.int64)
        rows[:, heads] = mixed[:, None] % sizes + np.array(constants.offsets[heads], np.int64)
    return rows


def _checked_ids(values: ArrayLike, name: str, vocab_size: int) -> NDArray[np.int64]:
    ids = np.asarray(values)
    if ids.ndim != 1:
        raise ValueError(f"{name} need one dimension, got {ids.ndim}")
    if ids.size == 0:
        return np.empty(0, np.int64)
    if ids.dtype.kind not in "iu":
        # one integer of 64 bits or more turns a whole list into floats or objects
        found, ids = ids.dtype, np.asarray(values, np.object_)
        if not all(type(value) is int for value in ids):
            raise TypeError(f"{name} need integers, got {found}")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        position = int(outside[0])
        raise ValueError(
            f"{name}[{position}] needs an id in [0, {vocab_size}), got {ids[position]}"
        )
    return ids.astype(np.int64)


def _multipliers(count: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    # odd, and small enough that the product with any id below vocab_size stays in an int64
    half = max(1, _INT64_MAX // vocab_size // 2)
    return tuple(
        2 * (_splitmix64(seed + _SPLITMIX_STEP * (index + 1)) % half) + 1 for index in range(count)
    )


def _splitmix64(state: int) -> int:
    z = (state + _SPLITMIX_STEP) & _UINT64_MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _UINT64_MASK
    return z ^ (z >> 31)


def _primes_from(lowest: int) -> Iterator[int]:
    if lowest <= 2:
        yield 2
    for candidate in itertools.count(max(3, lowest | 1), 2):
        if _is_prime(candidate):
            yield candidate


def _is_prime(n: int) -> bool:
    if n <= _SMALL_PRIMES[-1]:
        return n in _SMALL_PRIMES
    if math.gcd(n, _SMALL_PRODUCT) != 1:
        return False
    twos = ((n - 1) & (1 - n)).bit_length() - 1
    return all(_passes(n, witness, twos) for witness in _witnesses(n))


def _witnesses(n: int) -> Sequence[int]:
    # thirteen prime bases are exact below 3.3e24 (Sorenson and Webster 2015)
    return _WITNESSES if n < _WITNESSES_BOUND else _SMALL_PRIMES[:13]


def _passes(n: int, witness: int, twos: int) -> bool:
    x = pow(witness, (n - 1) >> twos, n)
    if x in (1, n - 1):
        return True
    for _ in range(twos - 1):
        x = x * x % n
        if x == n - 1:
            return True
    return False
