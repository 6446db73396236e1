"""Checkpoints that are refused for their config, their files, or a manifest made of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from broken_checkpoints import NAME, TABLE, arrays, config, extent, header, manifest, tiny
from checkpoints import (
    FILE,
    INDEX,
    int64,
    root,
    scale,
    shards,
    table_bytes,
    write_config,
    write_file,
    write_index,
    write_tiny,
)
from provocations import Provoke, met
from rowstream import Manifest, ManifestError, RowStore, tables
from rowstream.manifest import Extent


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
