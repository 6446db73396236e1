"""Counter-based bytes: word i of a table depends on (seed, i) alone, so any row can be recomputed.

Owns the generator and the masks that keep every value finite; knows no file and no tensor name.
Words are the output sequence of SplitMix64 whose state starts at a hash of the seed, little endian,
row after row.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

GENERATOR: Final = "splitmix64/1"
ROW_VALUES: Final = 160
DTYPES: Final = ("fp8", "bf16")

_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_WORD = np.dtype("<u8")

# small enough for the cache, large enough to make the interpreter's share small: on an EPYC core 64
# KiB blocks give 1.5 GB/s, 512 KiB 2.2 GB/s, 1 MiB 2.4 GB/s
_BLOCK_WORDS = 64 * 1024
# bf16: sign, three exponent bits and the mantissa stay random, so 2**-7 <= |value| < 2
_BF16_KEEP = np.uint64(0x83FF83FF83FF83FF)
_BF16_SET = np.uint64(0x3C003C003C003C00)


def row_bytes(dtype: str) -> int:
    """Return the bytes of one row of 160 values: 160 for `fp8`, 320 for `bf16`."""
    check_dtype(dtype)
    return ROW_VALUES * (1 if dtype == "fp8" else 2)


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype needs one of {', '.join(DTYPES)}, got {dtype!r}")


def check_seed(seed: int) -> None:
    if not 0 <= seed <= _MASK64:
        raise ValueError(f"seed needs 0 to 2**64 - 1, got {seed}")


def _mix(words: NDArray[np.uint64], scratch: NDArray[np.uint64]) -> None:
    """Run SplitMix64's finalizer over `words` in place."""
    np.right_shift(words, np.uint64(30), out=scratch)
    np.bitwise_xor(words, scratch, out=words)
    np.multiply(words, _MIX_1, out=words)
    np.right_shift(words, np.uint64(27), out=scratch)
    np.bitwise_xor(words, scratch, out=words)
    np.multiply(words, _MIX_2, out=words)
    np.right_shift(words, np.uint64(31), out=scratch)
    np.bitwise_xor(words, scratch, out=words)


def _mask(words: NDArray[np.uint64], scratch: NDArray[np.uint64], dtype: str) -> None:
    """Make every value finite in place: FP8's two NaN codes become the largest numbers."""
    if dtype == "bf16":
        np.bitwise_and(words, _BF16_KEEP, out=words)
        np.bitwise_or(words, _BF16_SET, out=words)
        return
    codes, bits = words.view(np.uint8), scratch.view(np.uint8)
    np.bitwise_and(codes, np.uint8(0x7F), out=bits)
    np.equal(bits, np.uint8(0x7F), out=bits.view(np.bool_))
    np.subtract(codes, bits, out=codes)


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _words(key: int, indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words: NDArray[np.uint64] = indices * np.uint64(_GAMMA) + np.uint64(key)
    words = words.astype(_WORD, copy=False)
    _mix(words, np.empty_like(words))
    return words


class TableStream:
    """The bytes of one table, produced in blocks. Holds scratch memory: one stream per thread."""

    def __init__(self, seed: int, dtype: str) -> None:
        check_seed(seed)
        check_dtype(dtype)
        self._dtype = dtype
        self._key = table_key(seed)
        self._steps = np.arange(_BLOCK_WORDS, dtype=_WORD) * np.uint64(_GAMMA)
        self._words = np.empty(_BLOCK_WORDS, dtype=_WORD)
        self._scratch = np.empty(_BLOCK_WORDS, dtype=_WORD)

    def fill(self, first_byte: int, out: NDArray[np.uint8]) -> None:
        """Overwrite `out` (one axis, any alignment) with the table's bytes from `first_byte` on."""
        done = 0
        while done < out.size:
            word, skip = divmod(first_byte + done, 8)
            count = min(_BLOCK_WORDS, (skip + out.size - done + 7) // 8)
            words, scratch = self._words[:count], self._scratch[:count]
            start = np.uint64((self._key + word * _GAMMA) & _MASK64)
            np.add(self._steps[:count], start, out=words)
            _mix(words, scratch)
            _mask(words, scratch, self._dtype)
            part = words.view(np.uint8)[skip : skip + out.size - done]
            out[done : done + part.size] = part
            done += part.size


def table_key(seed: int) -> int:
    """Return the state that a table's words start from."""
    check_seed(seed)
    return _key(f"rowstream synth table {seed}")


def table_rows(seed: int, dtype: str, row_ids: ArrayLike) -> NDArray[np.uint8]:
    """Recompute rows of a synthetic table.

    `row_ids` has any shape; the result is [..., row_bytes]. Rows past the end of the table have
    bytes too. Raises ValueError for a negative row id, TypeError for ids that are no integers.
    """
    ids = np.asarray(row_ids)
    if ids.size == 0:
        ids = ids.astype(np.int64)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"row_ids need integers, got {ids.dtype}")
    if ids.size and ids.min() < 0:
        raise ValueError(f"row_ids need 0 or more, got {ids.min()}")
    words_per_row = row_bytes(dtype) // 8
    first = ids.astype(np.uint64)[..., None] * np.uint64(words_per_row)
    words = _words(table_key(seed), first + np.arange(words_per_row, dtype=np.uint64))
    _mask(words, np.empty_like(words), dtype)
    return words.view(np.uint8)


def uniform(seed: int, name: str, count: int) -> NDArray[np.float32]:
    """Return `count` values in [-1, 1), a function of (seed, name) alone, for the dense weights."""
    check_seed(seed)
    words = _words(_key(f"rowstream synth {name} {seed}"), np.arange(count, dtype=np.uint64))
    # 24 bits fit a float32 exactly, so the values do not depend on the platform's rounding
    whole = (words >> np.uint64(40)).astype(np.float32)
    values: NDArray[np.float32] = whole * np.float32(2.0**-23) - np.float32(1.0)
    return values
