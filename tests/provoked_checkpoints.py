"""Checkpoints that are refused, each for another reason."""

from __future__ import annotations

import json
import os
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
    write_header,
    write_index,
    write_tiny,
)
from provocations import met
from rowstream import Manifest, ManifestError, RowStore, tables
from rowstream.formats.safetensors import read_header
from rowstream.manifest import Extent

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAME = f"{root()}.ngram_embedding"
TABLE = table_bytes(64, 6)

Provoke = Callable[[Path], object]


def config(**changes: Any) -> Provoke:
    def provoke(folder: Path) -> object:
        write_tiny(folder)
        write_config(folder, **changes)
        return tables(folder)

    return provoke


def arrays(change: Callable[[list[Array]], Sequence[Array]], *, alone: bool = False) -> Provoke:
    """A checkpoint of one file with other tensors; `alone` without its config."""

    def provoke(folder: Path) -> object:
        if not alone:
            write_config(folder)
        sound = [scale(), *shards(TABLE, [16] * 4), *hash_buffers()]
        write_file(folder / FILE, change(sound))
        return tables(folder)

    return provoke


def header(document: Any, *, data: bytes = b"\0" * 388) -> Provoke:
    """A file of that header; a dictionary changes entries of a sound one."""

    def provoke(folder: Path) -> object:
        write_config(folder)
        text = document
        if not isinstance(document, bytes):
            sound: dict[str, Any] = {
                f"{NAME}.weight_scale": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
                f"{NAME}.shard_0.weight": {
                    "dtype": "F8_E4M3",
                    "shape": [64, 6],
                    "data_offsets": [4, 388],
                },
            }
            for name, change in document.items():
                key = name if name.startswith("__") else f"{NAME}.{name}"
                old = sound.get(key)
                sound[key] = {**old, **change} if isinstance(change, dict) and old else change
            text = json.dumps(sound).encode()
        write_header(folder / FILE, text, data)
        return tables(folder)

    return provoke


def junk(content: bytes) -> Provoke:
    def provoke(folder: Path) -> object:
        (folder / FILE).write_bytes(content)
        return tables(folder)

    return provoke


def tiny(act: Callable[[Path], object]) -> Provoke:
    """A sound checkpoint, something done to it, and a look at it."""

    def provoke(folder: Path) -> object:
        write_tiny(folder)
        act(folder)
        return tables(folder)

    return provoke


def manifest(change: Callable[[Manifest], dict[str, Any]]) -> Provoke:
    """A manifest changed by hand."""

    def provoke(folder: Path) -> object:
        write_tiny(folder)
        (sound,) = tables(folder)
        return replace(sound, **change(sound))

    return provoke


def extent(**changes: int) -> Provoke:
    """A manifest with another first extent."""

    def change(sound: Manifest) -> dict[str, Any]:
        (plane,) = sound.planes
        first = replace(plane.extents[0], **changes)
        return {"planes": (replace(plane, extents=(first, *plane.extents[1:])),)}

    return manifest(change)


def met_config(message: str, **changes: Any) -> None:
    met(f"config.json: {message}", ManifestError, config(**changes))


met_config("<field> needs an integer from <low> to <high>, found <value>", ngram_size=99)
met_config("text_config needs an object, found <value>", text_config=[1])
met_config("model_type needs qwen4_exp or qwen4_exp_text, found <model type>", model_type="llama")
met_config("ple_layer_ids needs a list of integers from 1 to 4096, found <value>", ple_layer_ids=[])
met_config("ple_layer_ids needs 64 layers at most, found <n>", ple_layer_ids=list(range(1, 70)))
met_config("heads_per_ngram needs 1024 heads in total at most, found <n>", heads_per_ngram=1000)
met_config(
    "ple_layer_ids needs 4096 heads in total at most, found <n>",
    heads_per_ngram=512,
    ple_layer_ids=[1, 2, 3, 4, 5],
)
met_config("<field> needs a multiple of <n> heads, found <n>", ple_embed_dim=25)
met_config("eos_token_id needs an id below vocab_size <n>, found <id>", eos_token_id=50)
met_config(
    "ple_layer_ids <id> needs a table in layer <n>, found tables in <layers>", ple_layer_ids=[2, 6]
)
met(
    "<tensor> needs <id> in ple_layer_ids of config.json, found <ids>",
    ManifestError,
    arrays(lambda sound: [*sound, *shards(TABLE, [64], layer=5), scale(5)]),
)


def big(name: str, num_bytes: int) -> Callable[[Path], object]:
    def act(folder: Path) -> None:
        with open(folder / name, "wb") as file:
            file.truncate(num_bytes)

    return act


met(
    "<file> needs a JSON object, found <reason>",
    ManifestError,
    tiny(lambda folder: (folder / "config.json").write_text("{")),
    tiny(lambda folder: (folder / "config.json").write_text("[]")),
    header(b"{" + root().encode() + b".}"),
)
met(
    "<file> needs <n> bytes at most, found <n>",
    ManifestError,
    tiny(big("config.json", 16_000_001)),
    tiny(big(INDEX, 500_000_001)),
)


def dangling(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("nowhere")


def folder_for_file(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


def indexed(name: str) -> Provoke:
    return tiny(lambda folder: write_index(folder, {f"{NAME}.shard_0.weight": name}))


met("<file> needs a file, found nothing", ManifestError, tiny(dangling))
met("<file> needs a regular file, found something else", ManifestError, tiny(folder_for_file))
met(
    f"{INDEX}: file name needs a file of the same folder, found <name>",
    ManifestError,
    indexed("../other.safetensors"),
)
met(
    f"<file> needs to exist, named by {INDEX}, found nothing",
    ManifestError,
    indexed("model-2.safetensors"),
)
met(
    "<path> needs a folder, a .safetensors file or an id in <cache>, found nothing",
    ManifestError,
    lambda folder: tables(folder / "absent"),
)


def no_table(folder: Path) -> object:
    write_file(folder / FILE, [int64("other", [1])])
    return tables(folder / FILE)


met(
    "<path> needs tensors like <names>, found none in <n> .safetensors files",
    ManifestError,
    tables,
)
met(
    "<path> needs tensors like <names>, found none in 1 .safetensors file",
    ManifestError,
    no_table,
)


def half_broken(folder: Path) -> None:
    write_file(folder / "a.safetensors", [scale(), *shards(TABLE, [16] * 4)[1:]])
    (folder / "b.safetensors").write_bytes(b"junk")
    tables(folder)


met("<message>; <message of a broken file>", ManifestError, half_broken)

# headers
met(
    "<file> needs tensors, found a Git LFS pointer",
    ManifestError,
    junk(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
)
met("<file> needs at least 8 bytes, found <n>", ManifestError, junk(b"junk"))
met(
    "<file>: header needs <n> bytes, file has <n> after its length and the limit is 100000000",
    ManifestError,
    junk(b"\xff" * 8 + b"{}"),
)
met(
    "<file> needs a header that starts with {, found none",
    ManifestError,
    header(b" " + root().encode() + b"."),
)
entry = b'"%s.ngram_embedding.weight": {}' % root().encode()
met(
    "<file> needs each key once, found <key> twice",
    ManifestError,
    header(b"{%s, %s}" % (entry, entry)),
)
met(
    "<file> needs finite numbers, found <literal>",
    ManifestError,
    header(b'{"%s.x": NaN}' % root().encode()),
)
met(
    "<file>: __metadata__ needs an object of strings, found <value>",
    ManifestError,
    header({"__metadata__": [1]}),
)
met(
    "<file>: <tensor> entry needs an object, found <value>",
    ManifestError,
    header({"shard_0.weight": 5}),
)
met(
    "<file>: <tensor> dtype needs a string, found <value>",
    ManifestError,
    header({"shard_0.weight": {"dtype": 5}}),
)
met(
    "<file>: <tensor> shape needs a list of sizes, found <value>",
    ManifestError,
    header({"shard_0.weight": {"shape": [-1, 6]}}),
)
met(
    "<file>: <tensor> data_offsets needs a begin and an end, found <value>",
    ManifestError,
    header({"shard_0.weight": {"data_offsets": [9, 4]}}),
)
met(
    "<file>: <tensor> needs <n> bytes at <offset>, file has <n>",
    ManifestError,
    header({}, data=b"\0" * 300),
    extent(offset=1 << 40),
)
met(
    "<file>: <tensor> <dtype> <shape> needs <n> bytes, found <n>",
    ManifestError,
    header({"shard_0.weight": {"shape": [63, 6]}}),
)
met(
    "<file>: <tensor> data needs to start at <offset> or later, found <offset>",
    ManifestError,
    header({"weight_scale": {"data_offsets": [2, 6]}}),
)
met("<file> needs <n> bytes, found <n>", ManifestError, header({}, data=b"\0" * 400))


def rewritten(folder: Path) -> object:
    write_tiny(folder)
    tensor = read_header(folder / FILE).tensors()[0]
    with open(folder / FILE, "ab") as file:
        file.write(b"more")
    return tensor.read()


met(
    "<file>: <tensor> file needs as its header was read, found changed since",
    ManifestError,
    rewritten,
)

# the tensors of a table


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

# manifests made by hand, and files that change before they are opened
met(
    "<tensor> heads needs <n>, found <n>",
    ManifestError,
    manifest(lambda sound: {"groups": (1,)}),
)
met(
    "<tensor> hash constants for heads needs <n>, found <n>",
    ManifestError,
    manifest(lambda sound: {"groups": (1, 1), "heads": 2}),
)
met("<tensor> <plane> extent at row needs <n>, found <n>", ManifestError, extent(first_row=1))
met("<tensor> <plane> file needs below <n>, found <n>", ManifestError, extent(file=9))


def past_the_end(sound: Manifest) -> dict[str, Any]:
    (plane,) = sound.planes
    (file,) = sound.files
    far = replace(file, identity=replace(file.identity, size=1 << 62))
    return {
        "files": (far,),
        "planes": (replace(plane, extents=(Extent(0, 1 << 48, 0, sound.num_rows),)),),
    }


met("<tensor> <plane> end needs <n> at most, found <n>", ManifestError, manifest(past_the_end))
met(
    "<tensor> <plane> rows needs <n>, found <n>",
    ManifestError,
    manifest(lambda sound: {"num_rows": 99}),
)


def replaced(folder: Path) -> object:
    write_tiny(folder)
    (sound,) = tables(folder)
    os.utime(folder / FILE, ns=(1, 1))
    return RowStore(sound)


def shortened(folder: Path) -> object:
    write_tiny(folder)
    (sound,) = tables(folder)
    os.truncate(folder / FILE, 100)
    return RowStore(sound)


met("<file>: identity needs <identity>, found <identity>", ManifestError, replaced)
met("<file>: rows need <n> bytes, file has <n>", ValueError, shortened)


def several(table: str | None) -> Provoke:
    def provoke(folder: Path) -> object:
        write_config(folder, ple_layer_ids=[2, 6])
        other = shards(table_bytes(120, 6), [60, 60], layer=5)
        write_file(folder / FILE, [scale(), *shards(TABLE, [16] * 4), scale(5), *other])
        return RowStore.open(folder, table=table)

    return provoke


met("the checkpoint has <n> tables, name one: <names>", ValueError, several(None))
met("table needs one of <names>, got <name>", ValueError, several("layers.9.ple"))
