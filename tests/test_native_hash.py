"""The native n-gram hash: literal values of the released model's constants, and agreement with
NumPy's.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rowstream import _core
from rowstream.hashing import NgramConstants, layer_constants, ngram_row_ids

EOS = 248044
# Qwen3.8-Flash-Next, as stored in its checkpoint
MULTIPLIERS = (23703573157769, 20109073645365, 8052911324071)
SIZES = tuple(
    20_000_000 + n for n in (3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171)
)
# rows of tokens 1 2 3 4 at the start of a sequence
EXPECTED = {
    1: "16121432 28938500 59087997 73487090 81148277 104500129 120276032 149373875 "
    "176283436 184305849 216528839 231080079 257961536 266068568 289043455 305959965",
    2: "15220011 32170723 40646129 76511807 98682440 106072663 127158041 141938523 "
    "170367010 180520041 210849650 234005644 252857364 272068622 291885712 311569748",
    3: "14605717 24410875 49313567 72177428 86060820 104022010 130963819 146886202 "
    "161523077 195939126 219424565 220811782 248020141 275228530 284297999 309645223",
    4: "11040574 24501192 51231614 76654297 92730965 111423247 139461694 156846261 "
    "165574070 192841407 207986682 225545153 249179168 272813213 280691234 300081218",
}


def native(constants: NgramConstants) -> _core.NgramHash:
    return _core.NgramHash(
        ngram_size=constants.ngram_size,
        heads_per_ngram=constants.heads_per_ngram,
        vocab_size=constants.vocab_size,
        eos=constants.eos,
        multipliers=constants.multipliers,
        sizes=constants.sizes,
        offsets=constants.offsets,
    )


def rows(
    hash_: _core.NgramHash, heads: int, context: list[int], tokens: list[int]
) -> NDArray[np.int64]:
    out = np.full((len(tokens), heads), -7, np.int64)
    hash_.rows(np.array(context, np.int64), np.array(tokens, np.int64), out)
    return out


def released() -> NgramConstants:
    offsets = tuple(sum(SIZES[:head]) for head in range(16))
    return NgramConstants(3, 8, 248320, EOS, MULTIPLIERS, SIZES, offsets)


def test_released_constants() -> None:
    found = rows(native(released()), 16, [EOS, EOS], [1, 2, 3, 4])
    assert found.tolist() == [[int(row) for row in EXPECTED[t].split()] for t in (1, 2, 3, 4)]


def test_eos_inside_the_run() -> None:
    found = rows(native(released()), 16, [EOS, EOS], [10, 11, EOS, 12, 13])
    assert found[:, 0].tolist() == [6826666, 2940504, 4679147, 10272144, 2372911]
    assert found[:, 8].tolist() == [174244281, 176155633, 169789359, 166704986, 177001882]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_agrees_with_numpy(data: st.DataObject) -> None:
    draw = data.draw
    ngram_size = draw(st.integers(2, 5))
    vocab_size = draw(st.integers(2, 400))
    eos = draw(st.integers(0, min(vocab_size - 1, 5)))
    constants = layer_constants(
        2,
        ngram_size=ngram_size,
        heads_per_ngram=draw(st.integers(1, 4)),
        vocab_size=vocab_size,
        eos=eos,
        vocab_base=draw(st.integers(2, 10_000)),
        seed=draw(st.integers(0, 2**32)),
    )[draw(st.integers(0, 1))]
    ids = st.one_of(st.just(eos), st.integers(0, vocab_size - 1))
    context = draw(st.lists(ids, min_size=ngram_size - 1, max_size=ngram_size - 1))
    tokens = draw(st.lists(ids, max_size=30))
    found = rows(native(constants), constants.heads, context, tokens)
    assert np.array_equal(found, ngram_row_ids(constants, context, tokens))


@pytest.mark.parametrize("bad", [-1, 248320, 2**62])
def test_ids_outside_the_vocabulary(bad: int) -> None:
    hash_ = native(released())
    with pytest.raises(ValueError, match=rf"token id {bad} at position 1 is outside \[0, 248320\)"):
        rows(hash_, 16, [EOS, EOS], [1, bad])
    with pytest.raises(ValueError, match=rf"context id {bad} at position 0"):
        rows(hash_, 16, [bad, EOS], [1])


def test_shapes() -> None:
    hash_ = native(released())
    with pytest.raises(ValueError, match="context has 1 ids, needs 2"):
        rows(hash_, 16, [EOS], [1])
    with pytest.raises(ValueError, match=r"out needs shape \[1, 16\]"):
        rows(hash_, 15, [EOS, EOS], [1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"multipliers": (1,)}, "do not fit"),
        ({"sizes": SIZES[:3]}, "do not fit"),
        ({"sizes": (0,) * 16}, "no rows"),
        ({"eos": 248320}, "outside the vocabulary"),
        ({"ngram_size": 0}, "do not fit"),
    ],
)
def test_constants_are_checked(change: dict[str, object], message: str) -> None:
    constants: dict[str, object] = {
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "vocab_size": 248320,
        "eos": EOS,
        "multipliers": MULTIPLIERS,
        "sizes": SIZES,
        "offsets": SIZES,
    }
    with pytest.raises(ValueError, match=message):
        _core.NgramHash(**{**constants, **change})  # type: ignore[arg-type]
