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

from rowstream.hashing import NgramConstants, layer_constants, ngram_row_ids

EOS = 248_044
RELEASED: dict[str, Any] = {
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "vocab_size": 248_320,
    "eos": EOS,
    "vocab_base": 20_000_000,
    "seed": 1234,
}
# fmt: off
RELEASED_SIZES = [
    20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077,
    20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171,
]
RELEASED_OFFSETS = [
    0, 20000003, 40000026, 60000059, 80000106, 100000165, 120000228, 140000297,
    160000374, 180000455, 200000548, 220000655, 240000802, 260000955, 280001114, 300001275,
]
# eos, eos, 1, 2, 3, 4 at the start of a sequence
RELEASED_ROWS = [
    [
        9663979, 26558231, 56120240, 74755659, 80459717, 109265651, 132697467, 151022725,
        170054832, 192967038, 200687722, 225763581, 259275737, 272983544, 297596484, 300986548,
    ],
    [
        9663979, 26558231, 56120240, 74755659, 80459717, 109265651, 132697467, 151022725,
        170054832, 192967038, 200687722, 225763581, 259275737, 272983544, 297596484, 300986548,
    ],
    [
        16121432, 28938500, 59087997, 73487090, 81148277, 104500129, 120276032, 149373875,
        176283436, 184305849, 216528839, 231080079, 257961536, 266068568, 289043455, 305959965,
    ],
    [
        15220011, 32170723, 40646129, 76511807, 98682440, 106072663, 127158041, 141938523,
        170367010, 180520041, 210849650, 234005644, 252857364, 272068622, 291885712, 311569748,
    ],
    [
        14605717, 24410875, 49313567, 72177428, 86060820, 104022010, 130963819, 146886202,
        161523077, 195939126, 219424565, 220811782, 248020141, 275228530, 284297999, 309645223,
    ],
    [
        11040574, 24501192, 51231614, 76654297, 92730965, 111423247, 139461694, 156846261,
        165574070, 192841407, 207986682, 225545153, 249179168, 272813213, 280691234, 300081218,
    ],
]
# 10, 11, eos, 12, 13 at the start of a sequence
RELEASED_ROWS_WITH_EOS = [
    [
        6826666, 27775725, 51991156, 74082527, 82622748, 119600976, 135816374, 152166807,
        174244281, 190221032, 211723794, 232787707, 243645790, 275729718, 280030017, 303574322,
    ],
    [
        2940504, 22060242, 51620224, 61004244, 80476372, 100300474, 130036651, 149684858,
        176155633, 188444023, 204598098, 221538224, 251457628, 261736411, 285242727, 303372722,
    ],
    [
        4679147, 20352667, 52599150, 74683044, 98198172, 106977280, 121027876, 141408284,
        169789359, 198612961, 210924170, 220705730, 246230035, 272812674, 295242179, 309152779,
    ],
    [
        10272144, 38375960, 56169038, 77269436, 82103390, 104512879, 128875317, 156088582,
        166704986, 181067027, 214019790, 236371812, 246423428, 277700973, 295065937, 303933063,
    ],
    [
        2372911, 26244889, 58181291, 70892635, 93217067, 113992001, 125154417, 146704472,
        177001882, 191203173, 206256009, 222909216, 243785810, 265022014, 285514102, 308573248,
    ],
]
# fmt: on

# name -> keywords of layer_constants, ordinal, multipliers, sizes, tokens, rows
OTHERS: dict[str, tuple[dict[str, Any], int, list[int], list[int], list[int], list[list[int]]]] = {
    "bigrams only": (
        {"ngram_size": 2, "heads_per_ngram": 3, "vocab_size": 1000, "eos": 5}
        | {"vocab_base": 100, "seed": 0},
        0,
        [1032908777371477, 6779975073340089],
        [101, 103, 107],
        [1, 2, 5, 3, 4, 999, 6],
        [
            [69, 182, 216],
            [74, 150, 230],
            [36, 154, 218],
            [70, 172, 258],
            [69, 113, 230],
            [67, 167, 266],
            [19, 113, 256],
        ],
    ),
    "four orders' worth, third layer": (
        {"ngram_size": 4, "heads_per_ngram": 3, "vocab_size": 1000, "eos": 7}
        | {"vocab_base": 1000, "seed": 99},
        2,
        [7768133622846157, 1108943275613769, 1778168284733195, 2051593558512901],
        [1117, 1123, 1129, 1151, 1153, 1163, 1171, 1181, 1187],
        [1, 2, 7, 3, 4, 999, 6],
        [
            [151, 1498, 2363, 4472, 5257, 6638, 7006, 8253, 9307],
            [119, 2025, 2598, 3780, 4598, 6226, 7898, 8743, 9634],
            [788, 1367, 2696, 3798, 5612, 6413, 6980, 8862, 9419],
            [724, 1620, 2773, 4411, 5354, 6541, 7876, 8264, 10142],
            [274, 1793, 2387, 3754, 5589, 6650, 7338, 8323, 9382],
            [625, 1894, 2367, 3448, 4724, 6329, 7806, 8382, 9638],
            [1081, 2033, 2784, 3623, 4699, 6704, 7637, 8384, 9249],
        ],
    ),
    "primes from 2, second layer, eos 0": (
        {"ngram_size": 5, "heads_per_ngram": 1, "vocab_size": 151_936, "eos": 0}
        | {"vocab_base": 2, "seed": 10_007},
        1,
        [49740807812305, 51836209428339, 6467611119323, 39797766181069, 39073051780461],
        [11, 13, 17, 19],
        [1, 2, 0, 3, 4, 151_935, 6],
        [
            [5, 23, 25, 45],
            [6, 17, 25, 45],
            [1, 20, 26, 42],
            [4, 21, 27, 53],
            [6, 12, 30, 59],
            [1, 11, 31, 43],
            [5, 11, 35, 46],
        ],
    ),
    "largest vocabulary and base": (
        {"ngram_size": 3, "heads_per_ngram": 2, "vocab_size": 2**31, "eos": 2**31 - 1}
        | {"vocab_base": 2**40, "seed": 1234},
        0,
        [4211035941, 108803913, 3744090161],
        [1099511627791, 1099511627803, 1099511627831, 1099511627873],
        [1, 2, 2**31 - 1, 3, 4, 2**31 - 1, 6],
        [
            [706577425405, 1806086503112, 2968028997118, 4067241512415],
            [8380393731, 1107892021522, 2294508557370, 3393713052809],
            [624961676160, 1724374607803, 2822797797825, 3921963989138],
            [715268129347, 1814777207054, 2959539881912, 4058752397209],
            [17054669135, 1116566296926, 2286002840558, 3385207335997],
            [625279890230, 1724692821873, 2829957220533, 3929123411846],
            [694044552916, 1793553630623, 2981266512711, 4080479028008],
        ],
    ),
    "smallest vocabulary, eight orders, negative seed": (
        {"ngram_size": 8, "heads_per_ngram": 1, "vocab_size": 2, "eos": 1}
        | {"vocab_base": 1, "seed": -3},
        0,
        [
            1796716817816816145,
            4446140700838053705,
            2251624536377632283,
            873687353019301057,
            1178251026150819533,
            3800703589642599557,
            3422982206872569195,
            2223322799282701381,
        ],
        [2, 3, 5, 7, 11, 13, 17],
        [1, 0, 1, 1, 0, 1, 0],
        [
            [0, 3, 6, 14, 20, 37, 41],
            [1, 4, 6, 14, 25, 37, 52],
            [1, 3, 6, 14, 25, 36, 47],
            [0, 3, 6, 14, 20, 37, 41],
            [1, 4, 6, 14, 25, 37, 52],
            [1, 3, 6, 14, 25, 36, 47],
            [1, 4, 6, 14, 25, 37, 52],
        ],
    ),
}

# eos 9 at each position of 1, 2, 3, 4, 5; heads of 53, 59 and 61 rows
EOS_AT = {
    0: [[15, 77, 117], [29, 107, 132], [6, 93, 157], [20, 66, 151], [20, 54, 124]],
    1: [[37, 76, 114], [15, 80, 152], [52, 97, 159], [20, 101, 143], [20, 54, 151]],
    2: [[37, 76, 114], [18, 66, 112], [21, 68, 142], [21, 80, 141], [20, 101, 148]],
    3: [[37, 76, 114], [18, 66, 112], [6, 88, 140], [45, 87, 156], [19, 73, 126]],
    4: [[37, 76, 114], [18, 66, 112], [6, 88, 140], [20, 66, 131], [28, 77, 164]],
}


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
