"""The fields of a qwen4_exp config that shape its per-layer embedding tables, checked one by one.

The bounds are far above any real model: they keep a nonsense config from hanging the derivation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rowstream.checkpoint import CONFIG_NAME
from rowstream.errors import ManifestError
from rowstream.hashing import NgramConstants, layer_constants

__all__ = ["DEFAULT_SEED", "PleConfig", "read_ple_config"]

# the class default of transformers; the releases do not store it
DEFAULT_SEED = 1234

_MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")
_NGRAM_SIZE_MAX = 8
_HEADS_MAX = 1024
_LAYERS_MAX = 64
_PRIMES_MAX = 4096  # heads of all layers: each takes up to 60 us to find
_LAYER_ID_MAX = 4096
_VOCAB_BASE_MAX = 2**40
_VOCAB_SIZE_MAX = 2**31
_WIDTH_MAX = 2**24
_DIVISOR_MAX = 2**32
_SEED_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class PleConfig:
    """What the config says of the tables; `layers` are zero-based and ascending."""

    layers: tuple[int, ...]
    row_values: int
    divisor: int  # rows are padded to a multiple of it
    constants: tuple[NgramConstants, ...]  # one for each layer

    def num_rows(self, ordinal: int) -> int:
        """Rows of the table of the PLE layer with that ordinal, padding included."""
        return -(-self.constants[ordinal].num_rows // self.divisor) * self.divisor


def read_ple_config(config: dict[str, Any]) -> PleConfig:
    """Check the fields that shape the tables and derive the hash constants of every PLE layer.

    Absent fields take the defaults of transformers' `Qwen4ExpTextConfig`. Raises ManifestError
    naming the field. The number of shards is not asked for: configs disagree with their own files.
    """
    text = _text_section(config)
    ngram_size = _integer(text, "ngram_size", 3, low=2, high=_NGRAM_SIZE_MAX)
    heads_per_ngram = _integer(text, "heads_per_ngram", 8, high=_HEADS_MAX)
    heads = (ngram_size - 1) * heads_per_ngram
    if heads > _HEADS_MAX:
        raise _error("heads_per_ngram", f"{_HEADS_MAX} heads in total at most", heads)
    vocab_size = _integer(text, "vocab_size", 248_320, high=_VOCAB_SIZE_MAX)
    layers = _layers(text)
    if heads * len(layers) > _PRIMES_MAX:
        raise _error("ple_layer_ids", f"{_PRIMES_MAX} heads in total at most", heads * len(layers))
    return PleConfig(
        layers=layers,
        row_values=_width(text, heads) // heads,
        divisor=_integer(text, "make_ngram_vocab_size_divisible_by", 128, high=_DIVISOR_MAX),
        constants=layer_constants(
            len(layers),
            ngram_size=ngram_size,
            heads_per_ngram=heads_per_ngram,
            vocab_size=vocab_size,
            eos=_eos(text, vocab_size),
            vocab_base=_integer(text, "ngram_vocab_size_base", 20_000_000, high=_VOCAB_BASE_MAX),
            seed=_integer(text, "seed", DEFAULT_SEED, low=-_SEED_MAX, high=_SEED_MAX),
        ),
    )


def _text_section(config: dict[str, Any]) -> dict[str, Any]:
    # with a text_config, what the top level repeats is out of date: ignored, as transformers does
    text = config.get("text_config", config)
    if type(text) is not dict:
        raise _error("text_config", "an object", text)
    model_type = text.get("model_type", config.get("model_type"))
    if model_type not in _MODEL_TYPES:
        raise _error("model_type", " or ".join(_MODEL_TYPES), model_type)
    return text


def _layers(text: dict[str, Any]) -> tuple[int, ...]:
    # one-based, in any order, perhaps repeated; tensors count layers from zero
    ids = text.get("ple_layer_ids")
    if (
        type(ids) is not list
        or not ids
        or not all(type(value) is int and 1 <= value <= _LAYER_ID_MAX for value in ids)
    ):
        raise _error("ple_layer_ids", f"a list of integers from 1 to {_LAYER_ID_MAX}", ids)
    layers = tuple(value - 1 for value in sorted(set(ids)))
    if len(layers) > _LAYERS_MAX:
        raise _error("ple_layer_ids", f"{_LAYERS_MAX} layers at most", len(layers))
    return layers


def _width(text: dict[str, Any], heads: int) -> int:
    name = "ple_embed_dim" if text.get("ple_embed_dim") is not None else "hidden_size"
    width = _integer(text, name, 2048, high=_WIDTH_MAX)
    if width % heads:
        raise _error(name, f"a multiple of {heads} heads", width)
    return width


def _eos(text: dict[str, Any], vocab_size: int) -> int:
    # of several, transformers hashes with the first
    eos = text.get("eos_token_id")
    if type(eos) is list and eos:
        eos = eos[0]
    if type(eos) is not int or not 0 <= eos < vocab_size:
        raise _error("eos_token_id", f"an id below vocab_size {vocab_size}", eos)
    return eos


def _integer(text: dict[str, Any], name: str, default: int, *, low: int = 1, high: int) -> int:
    value = text.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise _error(name, f"an integer from {low} to {high}", value)
    return value


def _error(field: str, needed: object, found: object) -> ManifestError:
    return ManifestError.mismatch(field, needed, found, file=CONFIG_NAME)
