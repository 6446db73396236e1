"""The n-grams of the text as numbers: which groups of rows each token needs, and their hashes.

Works out the mix of the hash by itself. Equal mixes of an order need the same rows; as the product
of a group's sizes is beyond 64 bits, different mixes need different groups.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from benchmarks.spans import PIECE_ROWS
from benchmarks.text import Corpus
from numpy.typing import NDArray

from rowstream.hashing import NgramConstants, layer_constants, ngram_row_ids

__all__ = ["PIECE_TOKENS", "Trace", "gather_ends", "group_hashes", "released_constants"]

PIECE_TOKENS = PIECE_ROWS // 16  # a larger gather is planned in pieces of so many tokens
_KEPT = Path(__file__).resolve().parents[1] / "build" / "bench" / "trace"
_STEP = np.uint64(0x9E3779B97F4A7C15)


def released_constants(sizes_of: NgramConstants | None = None) -> NgramConstants:
    """Return the constants of the released model's first table, or with another table's sizes."""
    (constants,) = layer_constants(
        1,
        ngram_size=3,
        heads_per_ngram=8,
        vocab_size=248_320,
        eos=248_044,
        vocab_base=20_000_000,
        seed=1234,
    )
    if sizes_of is None:
        return constants
    if sizes_of.groups != constants.groups:
        raise ValueError(f"a table with groups {constants.groups} is needed, got {sizes_of.groups}")
    return replace(constants, sizes=sizes_of.sizes, offsets=sizes_of.offsets)


def group_hashes(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash groups of row ids [groups, width] as the cache does, which shards by it."""
    hashes = np.full(len(ids), ids.shape[1], np.uint64)
    with np.errstate(over="ignore"):
        for column in ids.T.astype(np.uint64):
            hashes = (hashes ^ column) * _STEP
            hashes ^= hashes >> np.uint64(32)
    return hashes


def gather_ends(tokens: NDArray[np.int64] | list[int]) -> NDArray[np.int64]:
    """Return where the pieces of gathers end in a flat trace of two keys for each token."""
    ends: list[int] = []
    begun = 0
    for count in tokens:
        whole = range(PIECE_TOKENS, int(count), PIECE_TOKENS)
        ends += [2 * (begun + end) for end in (*whole, int(count))]
        begun += int(count)
    return np.array(ends, np.int64)


@dataclass(frozen=True, slots=True)
class Trace:
    """A corpus by n-gram: two keys for each token, in the order of the corpus."""

    corpus: Corpus
    constants: NgramConstants
    keys: NDArray[np.uint32]  # [tokens, 2], below len(hashes)
    hashes: NDArray[np.uint64]  # of each key

    @classmethod
    def of(cls, corpus: Corpus, constants: NgramConstants) -> Trace:
        """Number all n-grams of a corpus."""
        mixes = np.concatenate(
            [_mixes(constants, corpus.document(index)) for index in range(len(corpus))]
        )
        # a mix is below 2^63, so there is room for the order
        mixes = (mixes << np.uint64(1)) | np.arange(2, dtype=np.uint64)
        different, keys = np.unique(mixes, return_inverse=True)
        hashes = np.empty(len(different), np.uint64)
        for order in range(2):
            of_order = (different & np.uint64(1)) == order
            heads = slice(8 * order, 8 * order + 8)
            mix = (different[of_order] >> np.uint64(1)).astype(np.int64)
            sizes = np.array(constants.sizes[heads], np.int64)
            ids = mix[:, None] % sizes + np.array(constants.offsets[heads], np.int64)
            hashes[of_order] = group_hashes(ids)
        return cls(corpus, constants, keys.reshape(-1, 2).astype(np.uint32), hashes)

    @classmethod
    def kept(cls, corpus: Corpus, constants: NgramConstants) -> Trace:
        """Return the trace as it was numbered before, or number it and keep it."""
        name = hashlib.sha256(f"{corpus.digest} {constants}".encode()).hexdigest()[:12]
        keys, hashes = (_KEPT / f"{part}-{name}.npy" for part in ("keys", "hashes"))
        if not (keys.exists() and hashes.exists()):
            made = cls.of(corpus, constants)
            _KEPT.mkdir(parents=True, exist_ok=True)
            np.save(keys, made.keys)
            np.save(hashes, made.hashes)
        return cls(corpus, constants, np.load(keys), np.load(hashes))

    def documents(self, after: int, tokens: int, count: int) -> list[int]:
        """Return the first tokens of documents of some length that begin after a token."""
        starts = self.corpus.starts
        long = np.flatnonzero((np.diff(starts) >= tokens) & (starts[:-1] >= after))
        if len(long) < count:
            raise RuntimeError(f"{count} documents of {tokens} tokens needed, {len(long)} are left")
        return [int(starts[index]) for index in long[:count]]

    def flat(self, first: int, last: int) -> NDArray[np.uint32]:
        """Return the keys of tokens of the corpus, one after the other."""
        return self.keys[first:last].reshape(-1)

    def row_ids(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the row ids [tokens, 16] of tokens within one document, worked out elsewhere."""
        before = int(np.searchsorted(self.corpus.starts, first, side="right")) - 1
        begin = max(int(self.corpus.starts[before]), first - 2)
        context = np.full(2, self.constants.eos, np.int64)
        if first > begin:
            context[begin - first :] = self.corpus.tokens[begin:first]
        return ngram_row_ids(self.constants, context, self.corpus.tokens[first:last])

    def chunks(self, tokens: int) -> list[tuple[int, int]]:
        """Return all documents cut into chunks: first token and end."""
        starts: list[int] = self.corpus.starts.tolist()
        return [
            (at, min(end, at + tokens))
            for begin, end in itertools.pairwise(starts)
            for at in range(begin, end, tokens)
        ]


def _mixes(constants: NgramConstants, tokens: NDArray[np.int32]) -> NDArray[np.uint64]:
    ids = tokens.astype(np.uint64)
    # the text holds no eos, so none lies within an n-gram
    begun = np.concatenate([np.full(2, constants.eos, np.uint64), ids])
    one, two, three = (np.uint64(value) for value in constants.multipliers)
    pair = (ids * one) ^ (begun[1:-1] * two)
    return np.stack([pair, pair ^ (begun[:-2] * three)], axis=1)
