"""Shards on other drives that do not go with their model, and profiles that cannot be made."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints import (
    Array,
    hash_buffers,
    int64,
    root,
    scale,
    shards,
    table_bytes,
    write_config,
    write_file,
    write_index,
)
from provocations import Provoke, met
from rowstream import ManifestError, UnavailableError, tables
from rowstream.engines.loadable import loadable
from rowstream.manifest import Manifest
from rowstream.profile import DeviceProfile

INDEX = "model.safetensors.index.json"
NAME = f"{root()}.ngram_embedding"
SHARDS = shards(table_bytes(64, 6), [16] * 4)
REST = [scale(), *hash_buffers()]

Files = Sequence[Sequence[Array]]


def apart(
    *places: Files, model: Files = (REST,), index: dict[str, str] | None = None
) -> Callable[[Path], list[Manifest]]:
    """A model, and table paths of some files each."""

    def provoke(folder: Path) -> list[Manifest]:
        for number, files in enumerate((model, *places)):
            place = folder / str(number)
            place.mkdir()
            for letter, arrays in zip("abc", files, strict=False):
                write_file(place / f"{letter}.safetensors", arrays)
        write_config(folder / "0")
        if index is not None:
            write_index(folder / "0", index)
        return tables(folder / "0", table_paths=[folder / str(n + 1) for n in range(len(places))])

    return provoke


def twice(folder: Path) -> object:
    apart([SHARDS])(folder)
    return tables(folder / "0", table_paths=[folder / "1", folder / "1" / "a.safetensors"])


def shortened(folder: Path) -> object:
    (manifest,) = apart([SHARDS], [SHARDS])(folder)
    (plane,) = manifest.planes
    copies = (replace(plane.copies[0], num_rows=1),)
    return replace(manifest, planes=(replace(plane, copies=copies),))


def changed(change: Callable[[Array], Array]) -> Files:
    return ([change(SHARDS[0]), *SHARDS[1:]],)


met(
    "<path> needs tensors like <names>, found none",
    ManifestError,
    apart([[int64("other", [1])]]),
)
met(
    "<file>: <tensor> needs a file of its own for each copy, found also <file>",
    ManifestError,
    twice,
)
met(
    "<tensor> <plane> copy needs the rows of an extent, found <n> from <n>",
    ManifestError,
    shortened,
)
met(
    "<file>: <tensor> needs one file, found also <file>",
    ManifestError,
    apart([SHARDS, SHARDS[:1]]),
)
met("<tensor> needs shard <n>, found shard <n> next", ManifestError, apart([SHARDS[1:]]))
met(
    "<file>: <tensor> dtype needs <dtype> as in <file>, found <dtype>",
    ManifestError,
    apart([SHARDS], model=([*REST, SHARDS[0]._replace(dtype="U8")],)),
)
met(
    "<file>: <tensor> shape needs <shape> as in <file>, found <shape>",
    ManifestError,
    apart([SHARDS], model=([*REST, SHARDS[0]._replace(shape=(32, 3))],)),
)
met(
    "<file>: <tensor> value needs <bytes> as in <file>, found <bytes>",
    ManifestError,
    apart([[*SHARDS, scale()._replace(data=b"\1\0")]]),
)
met(
    f"<tensor> needs to be in <file> or in a table path, as {INDEX} has it, found nowhere",
    ManifestError,
    apart([SHARDS[:3]], index={f"{NAME}.shard_3.weight": "d.safetensors"}),
)


def indexed(names: Any) -> Provoke:
    def provoke(folder: Path) -> object:
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))
        with loadable(folder) as place:
            return place

    return provoke


def no_block(folder: Path) -> object:
    (folder / "file").write_bytes(b"few")
    return DeviceProfile.measure(folder / "file")


met(f"{INDEX}: weight_map needs names of files, found <value>", ManifestError, indexed([1]))
met(
    "<message>; it holds <tensor>, which is no part of a table",
    ManifestError,
    indexed({"model.norm.weight": "absent.safetensors"}),
)
met("<file>: a measurement needs a block of <n> bytes, it has none", UnavailableError, no_block)
