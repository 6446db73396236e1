"""Tables that are refused for the tensors that they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from broken_checkpoints import NAME, TABLE, arrays
from checkpoints import Array, int64, root, scale, shards, table_bytes, write_config, write_file
from provocations import met
from rowstream import ManifestError, tables


def two_files(folder: Path) -> object:
    write_config(folder)
    sound = [scale(), *shards(TABLE, [16] * 4)]
    write_file(folder / "a.safetensors", sound)
    write_file(folder / "b.safetensors", sound[-1:])
    return tables(folder)


def met_arrays(
    message: str, change: Callable[[list[Array]], Sequence[Array]], *, alone: bool = False
) -> None:
    met(message, ManifestError, arrays(change, alone=alone))


def shaped(dtype: str, shape: tuple[int, ...], part: str = "shard_0.weight") -> Array:
    return Array(f"{NAME}.{part}", dtype, shape)


def other_root(sound: list[Array]) -> list[Array]:
    return [*sound, *(array._replace(name=f"again.{array.name}") for array in sound)]


T = "<file>: <tensor>"
met(f"{T} needs one file, found also <file>", ManifestError, two_files)
met_arrays("<tensor> needs one table for layer <n>, found also <tensor>", other_root)
met_arrays(
    f"{T} needs one tensor for a shard, found also <tensor>",
    lambda sound: [*sound, shaped("F8_E4M3", (16, 6), "shards.0.weight")],
)
met_arrays(
    f"{T} needs either shards or one tensor, found <n> shards too",
    lambda sound: [*sound, shaped("F8_E4M3", (64, 6), "weight")],
)
met_arrays("<tensor> needs shard <n>, found shard <n> next", lambda sound: [*sound[:2], *sound[3:]])
met_arrays(f"{T} dtype needs <dtypes>, found <dtype>", lambda sound: [shaped("U8", (64, 6))])
met_arrays(f"{T} shape needs rows and row width, found <shape>", lambda _: [shaped("BF16", (9,))])
met_arrays(f"{T} row width needs 65536 at most, found <n>", lambda _: [shaped("BF16", (1, 65537))])
met_arrays(
    f"{T} dtype needs <dtype> as the first shard, found <dtype>",
    lambda sound: [*sound[:-4], shaped("BF16", (16, 6), "shard_3.weight")],
)
met_arrays(
    f"{T} row width needs <n>, found <n>",
    lambda sound: [*sound[:-4], shaped("F8_E4M3", (16, 5), "shard_3.weight")],
)
met_arrays(
    f"{T} row width needs <n>, found <n>",
    lambda sound: [scale(), *shards(table_bytes(64, 8), [16] * 4)],
)
met_arrays(
    f"{T} rows needs <n>, found <n>", lambda sound: [scale(), *shards(TABLE, [16, 8, 16, 16])]
)
met_arrays("<tensor> rows needs <n>, found <n>", lambda sound: [scale(), *shards(TABLE, [16] * 3)])
met_arrays(
    f"{T} needs F8_E4M3 codes beside it, found <dtype>",
    lambda sound: [scale(), shaped("BF16", (64, 6), "weight")],
)
met_arrays(
    f"{T} F8_E4M3 needs ngram_embedding.weight_scale, found nothing", lambda sound: sound[1:]
)


def scaled(dtype: str, shape: tuple[int, ...], data: bytes) -> Callable[[list[Array]], list[Array]]:
    return lambda sound: [Array(sound[0].name, dtype, shape, data), *sound[1:]]


met_arrays(f"{T} shape needs [] or [1], found <shape>", scaled("F32", (2,), bytes(8)))
met_arrays(f"{T} dtype needs <dtypes>, found <dtype>", scaled("I64", (1,), bytes(8)))
met_arrays(f"{T} needs a finite positive scale, found <value>", scaled("F32", (), bytes(4)))


def buffer(name: str, values: Sequence[int]) -> Callable[[list[Array]], list[Array]]:
    return lambda sound: [*sound[:5], int64(f"{root()}.{name}", values)]


met_arrays(f"{T} values needs <n>, found <n>", buffer("layer_multipliers", [1]))
met_arrays(f"{T} [<n>] needs <value>, found <value>", buffer("layer_multipliers", [1, 2, 3]))
met_arrays(
    f"{T} dtype needs <dtypes>, found <dtype>",
    lambda sound: [*sound[:5], Array(f"{root()}.layer_multipliers", "F32", (3,))],
)
met_arrays(f"{T} shape needs [1] to [1024], found <shape>", buffer("layer_multipliers", []))
met_arrays(
    f"{T} needs sizes that fit <n> rows, found <sizes>",
    buffer("ngram_heads_vocab_sizes", [60, 61]),
    alone=True,
)
met_arrays(
    f"{T} needs one scale for the whole table, found a scale of one shard",
    lambda sound: [*sound, shaped("F32", (1,), "shard_0.weight_scale")],
)
met_arrays(
    f"{T} needs a name like <name>, found a part of an unknown packing",
    lambda sound: [*sound, shaped("U8", (4,), "qweight")],
)
