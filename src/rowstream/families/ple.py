"""Per-layer embedding tables of qwen4_exp: from tensors and config to one manifest for each layer.

Owns the names of the tensors and what must agree among them. Reads the scale and the hash
constants, never rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowstream.checkpoint import CONFIG_NAME
from rowstream.codecs import CODECS, decode
from rowstream.errors import ManifestError
from rowstream.families.ple_config import PleConfig, read_ple_config
from rowstream.formats.tensor import Tensor
from rowstream.hashing import NgramConstants
from rowstream.manifest import Extent, Manifest, Plane, TableFile

__all__ = ["FAMILY", "MARKER", "PATTERN", "manifests", "role"]

FAMILY = "ple"
MARKER = b".ple_embedding."
PATTERN = "layers.<layer>.ple.ple_embedding.ngram_embedding.shard_<n>.weight"

_NAME = re.compile(
    r"(?P<root>(?:[A-Za-z0-9_]+\.)*layers\.(?P<layer>[0-9]{1,6})\.ple\.ple_embedding)\.(?P<part>.+)"
)
_SHARD = re.compile(r"ngram_embedding\.(?:shard_|shards\.)(?P<shard>[0-9]{1,9})\.weight")
_SHARD_SCALE = re.compile(r"ngram_embedding\.(?:shard_|shards\.)[0-9]+\.weight_scale(?:_.*)?")
_FUSED = "ngram_embedding.weight"
_SCALE = "ngram_embedding.weight_scale"
_MULTIPLIERS = "layer_multipliers"
_SIZES = "ngram_heads_vocab_sizes"
_OFFSETS = "ngram_heads_offsets"
_BUFFERS = (_MULTIPLIERS, _SIZES, _OFFSETS)

_CODEC_OF = {codec.dtype: name for name, codec in CODECS.items()}
_SCALE_CODECS = ("bf16", "f16", "f32")
_BUFFER_VALUES_MAX = 1024
_ROW_VALUES_MAX = 1 << 16  # readers hold a row for each read in flight


@dataclass(slots=True)
class _Parts:
    """The tensors of one layer, sorted by their part in the table."""

    root: str  # name up to and with "ple_embedding"
    layer: int
    shards: dict[int, Tensor] = field(default_factory=dict)
    fused: Tensor | None = None
    scale: Tensor | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def table(self) -> str:
        return f"{self.root}.ngram_embedding"

    def rows(self) -> list[Tensor]:
        """The tensors that hold rows, in row order."""
        if self.fused is None:
            return [self.shards[shard] for shard in sorted(self.shards)]
        return [self.fused]


def manifests(
    tensors: Iterable[Tensor], config: dict[str, Any] | None, root: Path, format_name: str
) -> list[Manifest]:
    """Build the manifest of every table among the tensors, by layer; empty when there is none.

    Raises ManifestError when a table is incomplete, ambiguous, or not what the config describes.
    Without a config the rows can be described, but not which of them a token needs.
    """
    layers = _by_layer(tensors)
    if not layers:
        return []
    described = None if config is None else read_ple_config(config)
    if described is not None:
        for layer in described.layers:
            if layer not in layers:
                raise ManifestError.mismatch(
                    f"ple_layer_ids {layer + 1}",
                    f"a table in layer {layer}",
                    f"tables in {sorted(layers)}",
                    file=CONFIG_NAME,
                )
    return [_manifest(layers[layer], described, root, format_name) for layer in sorted(layers)]


def role(name: str) -> str | None:
    """Tell what the tensor of that name is to a table: "rows", "constant" or nothing."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    part = match["part"]
    if part == _FUSED or _SHARD.fullmatch(part):
        return "rows"
    return "constant" if part == _SCALE or part in _BUFFERS else None


def _by_layer(tensors: Iterable[Tensor]) -> dict[int, _Parts]:
    by_root: dict[str, _Parts] = {}
    seen: dict[str, Tensor] = {}
    for tensor in tensors:
        match = _NAME.fullmatch(tensor.name)
        if match is None:
            continue
        if tensor.name in seen:
            raise tensor.mismatch("", "one file", f"also {seen[tensor.name].file.path.name}")
        seen[tensor.name] = tensor
        root, layer = match["root"], int(match["layer"])
        _place(tensor, match["part"], by_root.setdefault(root, _Parts(root, layer)))
    layers: dict[int, _Parts] = {}
    for parts in by_root.values():
        if not parts.rows():
            continue  # a checkpoint stripped of its table may keep the hash constants
        other = layers.setdefault(parts.layer, parts)
        if other is not parts:
            raise ManifestError.mismatch(
                "", f"one table for layer {parts.layer}", f"also {other.table}", tensor=parts.table
            )
    return layers


def _place(tensor: Tensor, part: str, parts: _Parts) -> None:
    if shard := _SHARD.fullmatch(part):
        other = parts.shards.setdefault(int(shard["shard"]), tensor)
        if other is not tensor:
            raise tensor.mismatch("", "one tensor for a shard", f"also {other.name}")
    elif part == _FUSED:
        parts.fused = tensor
    elif part == _SCALE:
        parts.scale = tensor
    elif part in _BUFFERS:
        parts.buffers[part] = tensor
    elif _SHARD_SCALE.fullmatch(part):
        raise tensor.mismatch("", "one scale for the whole table", "a scale of one shard")
    elif part.startswith("ngram_embedding."):
        raise tensor.mismatch("", "a name like " + PATTERN, "a part of an unknown packing")


def _manifest(parts: _Parts, config: PleConfig | None, root: Path, format_name: str) -> Manifest:
    _check_shards(parts)
    first = parts.rows()[0]
    num_rows = sum(tensor.shape[0] for tensor in parts.rows())
    row_values = first.shape[1]
    constants = None
    if config is None:
        heads, groups = _stored_heads(parts, num_rows)
    else:
        ordinal = _ordinal(parts, config)
        constants = config.constants[ordinal]
        heads, groups = constants.heads, constants.groups
        _check_buffers(parts, constants)
        if row_values != config.row_values:
            raise first.mismatch("row width", config.row_values, row_values)
        if num_rows != config.num_rows(ordinal):
            raise ManifestError.mismatch(
                "rows", config.num_rows(ordinal), num_rows, tensor=parts.table
            )
    codec = _CODEC_OF[first.dtype]
    files = dict.fromkeys(tensor.file for tensor in parts.rows())
    copies = dict.fromkeys(copy.file for tensor in parts.rows() for copy in tensor.copies)
    alone = [file for file in copies if file not in files]  # nothing but copies
    extents = _extents(parts.rows(), [*files, *alone])
    plane = Plane("codes", row_values * CODECS[codec].value_bytes, *extents)
    return Manifest(
        name=f"layers.{parts.layer}.ple",
        tensor=parts.table,
        layer=parts.layer,
        family=FAMILY,
        format=format_name,
        root=root,
        codec=codec,
        scale=_scale(parts, codec, num_rows),
        num_rows=num_rows,
        row_values=row_values,
        heads=heads,
        groups=groups,
        planes=(plane,),
        files=tuple(files),
        hash=constants,
        copies=tuple(alone),
    )


def _check_shards(parts: _Parts) -> None:
    if parts.fused is not None and parts.shards:
        other = parts.rows()[0]
        raise other.mismatch("", "either shards or one tensor", f"{len(parts.shards)} shards too")
    for position, shard in enumerate(sorted(parts.shards)):
        if shard != position:
            raise ManifestError.mismatch(
                "", f"shard {position}", f"shard {shard} next", tensor=parts.table
            )
    tensors = parts.rows()
    first, last = tensors[0], tensors[-1]
    for tensor in tensors:
        if tensor.dtype not in _CODEC_OF:
            raise tensor.mismatch("dtype", " or ".join(_CODEC_OF), tensor.dtype)
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise tensor.mismatch("shape", "rows and row width", list(tensor.shape))
        if tensor.shape[1] > _ROW_VALUES_MAX:
            raise tensor.mismatch("row width", f"{_ROW_VALUES_MAX} at most", tensor.shape[1])
        if tensor.dtype != first.dtype:
            raise tensor.mismatch("dtype", f"{first.dtype} as the first shard", tensor.dtype)
        if tensor.shape[1] != first.shape[1]:
            raise tensor.mismatch("row width", first.shape[1], tensor.shape[1])
        if tensor.shape[0] != first.shape[0] and (
            tensor is not last or tensor.shape[0] > first.shape[0]
        ):
            needed = f"{first.shape[0]}{' at most' if tensor is last else ''}"
            raise tensor.mismatch("rows", needed, tensor.shape[0])


def _extents(
    tensors: list[Tensor], files: Sequence[TableFile]
) -> tuple[tuple[Extent, ...], tuple[Extent, ...]]:
    """Return where the rows lie in the files, and where their copies do."""
    numbers = {file: number for number, file in enumerate(files)}
    extents, copies = [], []
    row = 0
    for tensor in tensors:
        first, *others = (
            Extent(numbers[place.file], place.offset, row, tensor.shape[0])
            for place in (tensor, *tensor.copies)
        )
        extents.append(first)
        copies += others
        row += tensor.shape[0]
    return tuple(extents), tuple(copies)


def _scale(parts: _Parts, codec: str, num_rows: int) -> float | None:
    scale = parts.scale
    if codec != "fp8_e4m3":
        if scale is not None:
            raise scale.mismatch("", "F8_E4M3 codes beside it", CODECS[codec].dtype)
        return None
    if scale is None:
        raise parts.rows()[0].mismatch("F8_E4M3", _SCALE, "nothing")
    if scale.shape not in ((), (1,)):
        per_row = " (a scale for each row)" if scale.shape[0] == num_rows else ""
        raise scale.mismatch("shape", "[] or [1]", f"{list(scale.shape)}{per_row}")
    if scale.dtype not in (CODECS[name].dtype for name in _SCALE_CODECS):
        needed = " or ".join(CODECS[name].dtype for name in _SCALE_CODECS)
        raise scale.mismatch("dtype", needed, scale.dtype)
    value = float(decode(_CODEC_OF[scale.dtype], np.frombuffer(scale.read(), np.uint8))[0])
    if not (math.isfinite(value) and value > 0):
        raise scale.mismatch("", "a finite positive scale", value)
    return value


def _ordinal(parts: _Parts, config: PleConfig) -> int:
    if parts.layer not in config.layers:
        ids = [layer + 1 for layer in config.layers]
        raise ManifestError.mismatch(
            "", f"{parts.layer + 1} in ple_layer_ids of {CONFIG_NAME}", ids, tensor=parts.table
        )
    return config.layers.index(parts.layer)


def _check_buffers(parts: _Parts, constants: NgramConstants) -> None:
    for name, derived in (
        (_MULTIPLIERS, constants.multipliers),
        (_SIZES, constants.sizes),
        (_OFFSETS, constants.offsets),
    ):
        if name not in parts.buffers:
            continue
        tensor = parts.buffers[name]
        stored = _buffer(tensor).tolist()
        if len(stored) != len(derived):
            raise tensor.mismatch("values", len(derived), len(stored))
        for position, (needed, found) in enumerate(zip(derived, stored, strict=True)):
            if needed != found:
                raise tensor.mismatch(f"[{position}]", needed, found)


def _stored_heads(parts: _Parts, num_rows: int) -> tuple[int, tuple[int, ...]]:
    if _SIZES not in parts.buffers:
        return 1, (1,)
    tensor = parts.buffers[_SIZES]
    sizes = _buffer(tensor)
    if sizes.min() < 1 or sum(sizes.tolist()) > num_rows:
        raise tensor.mismatch("", f"sizes that fit {num_rows} rows", sizes.tolist())
    return len(sizes), (len(sizes),)


def _buffer(tensor: Tensor) -> NDArray[np.int64]:
    if tensor.dtype != "I64":
        raise tensor.mismatch("dtype", "I64", tensor.dtype)
    if len(tensor.shape) != 1 or not 1 <= tensor.shape[0] <= _BUFFER_VALUES_MAX:
        raise tensor.mismatch("shape", f"[1] to [{_BUFFER_VALUES_MAX}]", list(tensor.shape))
    return np.frombuffer(tensor.read(), "<i8").astype(np.int64)
