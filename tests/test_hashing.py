"""Literal rows come from an oracle that shares no code with rowstream."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hashed_rows import (
    EOS,
    EOS_AT,
    OTHERS,
    RELEASED,
    RELEASED_OFFSETS,
    RELEASED_ROWS,
    RELEASED_ROWS_WITH_EOS,
    RELEASED_SIZES,
)
from rowstream.hashing import NgramConstants, layer_constants, ngram_row_ids


def _released() -> NgramConstants:
    return layer_constants(1, **RELEASED)[0]


def _small(ngram_size: int) -> NgramConstants:
    return layer_constants(
        1,
        ngram_size=ngram_size,
        heads_per_ngram=1,
        vocab_size=100,
        eos=9,
        vocab_base=50,
        seed=1234,
    )[0]


def test_the_released_model_has_the_published_constants() -> None:
    constants = _released()
    assert constants.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert list(constants.sizes) == RELEASED_SIZES
    assert list(constants.offsets) == RELEASED_OFFSETS
    assert constants.num_rows == 320_001_446
    assert (constants.heads, constants.groups) == (16, (8, 8))


def test_the_released_model_has_the_worked_rows() -> None:
    rows = ngram_row_ids(_released(), None, [EOS, EOS, 1, 2, 3, 4])
    assert rows.dtype == np.int64
    assert rows.tolist() == RELEASED_ROWS
    assert (
        ngram_row_ids(_released(), None, [10, 11, EOS, 12, 13]).tolist() == RELEASED_ROWS_WITH_EOS
    )


@pytest.mark.parametrize("name", OTHERS)
def test_other_shapes_have_the_rows_of_the_oracle(name: str) -> None:
    keywords, ordinal, multipliers, sizes, tokens, rows = OTHERS[name]
    constants = layer_constants(ordinal + 1, **keywords)[ordinal]
    assert list(constants.multipliers) == multipliers
    assert list(constants.sizes) == sizes
    assert list(constants.offsets) == [0, *itertools.accumulate(sizes)][:-1]
    assert ngram_row_ids(constants, None, tokens).tolist() == rows


@pytest.mark.parametrize("position", EOS_AT)
def test_an_ngram_never_reaches_past_an_earlier_eos(position: int) -> None:
    tokens = [1, 2, 3, 4, 5]
    tokens[position] = 9
    assert ngram_row_ids(_small(4), None, tokens).tolist() == EOS_AT[position]
    assert ngram_row_ids(_small(3), None, tokens).tolist() == [row[:2] for row in EOS_AT[position]]


def test_context_holds_the_ids_before_the_run() -> None:
    assert ngram_row_ids(_small(3), [9, 1], [3, 9, 4]).tolist() == [[27, 71], [45, 98], [21, 80]]
    # an eos in the context hides what is before it
    assert ngram_row_ids(_small(4), [8, 1, 9], [3, 4]).tolist() == [[52, 97, 159], [20, 101, 143]]
    assert ngram_row_ids(_small(4), [9, 9, 9], [1]).tolist() == [EOS_AT[1][0]]


def _naive_rows(constants: NgramConstants, history: Sequence[int], position: int) -> list[int]:
    """The rows of one token, written from the rule: walk back until an eos or the start."""
    window = [history[position]]
    for back in range(position - 1, position - constants.ngram_size, -1):
        if back < 0 or history[back] == constants.eos:
            break
        window.append(history[back])
    window += [constants.eos] * (constants.ngram_size - len(window))
    rows = []
    for head, (size, offset) in enumerate(zip(constants.sizes, constants.offsets, strict=True)):
        mixed = 0
        for token, multiplier in list(zip(window, constants.multipliers, strict=True))[
            : head // constants.heads_per_ngram + 2
        ]:
            mixed ^= token * multiplier
        rows.append(mixed % size + offset)
    return rows


_shapes = st.builds(
    layer_constants,
    st.just(1),
    ngram_size=st.integers(2, 6),
    heads_per_ngram=st.integers(1, 4),
    vocab_size=st.just(30),
    eos=st.integers(0, 29),
    vocab_base=st.integers(1, 5000),
    seed=st.integers(0, 2**40),
)


@given(_shapes, st.data())
@settings(deadline=None)
def test_rows_follow_the_rule_and_any_split_gives_the_same(
    layers: tuple[NgramConstants, ...], data: st.DataObject
) -> None:
    (constants,) = layers
    ids = st.integers(0, 29) | st.just(constants.eos)
    tokens = data.draw(st.lists(ids, max_size=24))
    whole = ngram_row_ids(constants, None, tokens)
    assert whole.shape == (len(tokens), constants.heads)
    assert whole.tolist() == [
        _naive_rows(constants, tokens, position) for position in range(len(tokens))
    ]
    reach = constants.ngram_size - 1
    history = [constants.eos] * reach + tokens
    for cut in data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)):
        rest = ngram_row_ids(constants, history[cut : cut + reach], tokens[cut:])
        assert np.array_equal(rest, whole[cut:])


def test_ids_outside_the_vocabulary_are_named() -> None:
    constants = _released()
    for bad in (-1, 248_320, 2**40, 2**63, 2**200, -(2**200)):
        with pytest.raises(ValueError, match=rf"tokens\[2\] needs an id .* got {bad}"):
            ngram_row_ids(constants, None, [1, 2, bad, 3])
        with pytest.raises(ValueError, match=rf"context\[1\] needs an id .* got {bad}"):
            ngram_row_ids(constants, [1, bad], [1])


def test_runs_of_the_wrong_kind_are_refused() -> None:
    constants = _released()
    with pytest.raises(ValueError, match="context needs 2 ids, got 1"):
        ngram_row_ids(constants, [1], [1])
    with pytest.raises(ValueError, match="one dimension"):
        ngram_row_ids(constants, None, [[1]])
    wrong: list[Any] = [[1.0], [True], ["1"], [None]]
    for tokens in wrong:
        with pytest.raises(TypeError, match="integers"):
            ngram_row_ids(constants, None, tokens)
    assert ngram_row_ids(constants, None, []).shape == (0, 16)
    for dtype in (np.uint8, np.int32, np.uint64):
        rows = ngram_row_ids(constants, None, np.array([1, 2], dtype))
        assert rows.tolist() == ngram_row_ids(constants, None, [1, 2]).tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"ngram_size": 1},
        {"heads_per_ngram": 0},
        {"multipliers": (1, 3)},
        {"sizes": (11,)},
        {"offsets": (0,)},
    ],
)
def test_constants_that_do_not_fit_each_other_are_refused(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "ngram_size": 3,
        "heads_per_ngram": 1,
        "vocab_size": 10,
        "eos": 0,
        "multipliers": (1, 3, 5),
        "sizes": (11, 13),
        "offsets": (0, 11),
    }
    NgramConstants(**fields)
    with pytest.raises(ValueError, match="hash constants need"):
        NgramConstants(**(fields | change))


def test_primes_are_those_of_a_sieve() -> None:
    limit = 100_000
    sieve = np.ones(limit, np.bool_)
    sieve[:2] = False
    for divisor in range(2, 317):
        if sieve[divisor]:
            sieve[divisor * divisor :: divisor] = False
    primes = np.flatnonzero(sieve)
    for base in (1, 2, 3, 50, 54, 2809, 3481, 60_000):
        expected = primes[primes >= base][:2000].tolist()
        layers = layer_constants(
            2, ngram_size=3, heads_per_ngram=500, vocab_size=9, eos=0, vocab_base=base, seed=0
        )
        assert [size for layer in layers for size in layer.sizes] == expected


def test_strong_pseudoprimes_are_no_primes() -> None:
    # the smallest strong pseudoprimes to the first 1, 2, ... 6 prime bases (OEIS A014233)
    for composite in (2047, 1373653, 25326001, 3215031751, 2152302898747, 3474749660383):
        constants = layer_constants(
            1,
            ngram_size=2,
            heads_per_ngram=1,
            vocab_size=9,
            eos=0,
            vocab_base=composite,
            seed=0,
        )
        assert constants[0].sizes[0] > composite


def test_the_constants_of_the_released_model_take_milliseconds() -> None:
    spent = []
    for _ in range(5):
        start = time.process_time()
        layer_constants(1, **RELEASED)
        spent.append(time.process_time() - start)
    assert min(spent) < 0.02


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("layer_ids", "ordinal", "eos", "fields"),
    [
        ([2], 0, EOS, {}),
        ([2], 0, [248_046, EOS], {}),
        ([2, 6, 10], 2, EOS, {}),
        (
            [2, 6],
            1,
            7,
            {"vocab_size": 1000, "ngram_size": 5, "heads_per_ngram": 4, "seed": 99}
            | {"ngram_vocab_size_base": 1000},
        ),
    ],
)
def test_rows_are_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
    layer_ids: list[int],
    ordinal: int,
    eos: int | list[int],
    fields: dict[str, Any],
) -> None:
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    configuration = pytest.importorskip("transformers.models.qwen4_exp.configuration_qwen4_exp")

    class Spy(torch.nn.Module):  # type: ignore[misc, name-defined]
        """Stands in for the embedding and keeps the ids that it is asked for."""

        def __init__(self, num_rows: int, width: int) -> None:
            super().__init__()
            self.num_rows = num_rows
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, ids: Any) -> Any:
            self.ids = ids.clone()
            return torch.zeros(*ids.shape, 1)

    config = configuration.Qwen4ExpTextConfig(
        hidden_size=2560,
        num_hidden_layers=48,
        ple_layer_ids=layer_ids,
        ple_embed_dim=2560,
        eos_token_id=eos,
        **fields,
    )
    with monkeypatch.context() as patch:
        patch.setattr(modeling.nn, "Embedding", Spy)
        module = modeling.Qwen4ExpTextNGramEmbedding(config, 2560, layer_ids[ordinal] - 1, ordinal)
    first = eos[0] if isinstance(eos, list) else eos
    constants = layer_constants(
        len(layer_ids),
        ngram_size=config.ngram_size,
        heads_per_ngram=config.heads_per_ngram,
        vocab_size=config.vocab_size,
        eos=first,
        vocab_base=config.ngram_vocab_size_base,
        seed=config.seed,
    )[ordinal]
    assert module.layer_multipliers.tolist() == list(constants.multipliers)
    assert module.ngram_heads_vocab_sizes.tolist() == list(constants.sizes)
    assert module.ngram_heads_offsets.tolist() == list(constants.offsets)
    rng = np.random.default_rng(0)
    for length in range(1, 30):
        tokens = rng.integers(0, config.vocab_size, length)
        tokens[rng.random(length) < 0.2] = first
        module(torch.from_numpy(tokens)[None], None)
        expected = module.ngram_embedding.ids[0].numpy()
        assert np.array_equal(ngram_row_ids(constants, None, tokens), expected)
