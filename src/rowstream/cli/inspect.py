"""`rowstream inspect`: the tables of a checkpoint, where their rows lie, what a token reads."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from rowstream.cli.arguments import Commands, add_command, add_table_paths
from rowstream.cli.text import fields, json_text, plural, size

if TYPE_CHECKING:
    from rowstream.manifest import Manifest, Plane

__all__ = ["add_to", "describe"]

_EXAMPLES = """\
  rowstream inspect demo
  rowstream inspect demo --json
"""

_PAGE = 4096  # what an SSD reads at least, whatever its sectors
_SECTOR = 512


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "inspect",
        help="show the tables of a checkpoint: files, rows, alignment, reads per token",
        description="Show the tables of a checkpoint that rows can be streamed from. "
        "Reads headers only.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="checkpoint folder, .safetensors file, or id in the local hub cache",
    )
    add_table_paths(parser)
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Describe and print."""
    from rowstream.catalog import tables

    described = [describe(manifest) for manifest in tables(args.path, table_paths=args.table_path)]
    if args.json:
        print(json_text({"path": args.path, "tables": described}))
    else:
        print("\n\n".join(_text(table) for table in described))
    return 0


def describe(manifest: Manifest) -> dict[str, Any]:
    """Return all that `inspect --json` says about a table."""
    from rowstream.backends import ReadOptions, open_table

    opened = open_table(manifest, "auto", ReadOptions())
    try:
        native = opened.native.files()
    finally:
        opened.native.close()
    # a backend that reads no copies has not opened them
    files = (*manifest.files, *manifest.copies)[: len(native)]
    alignments = [file.alignment for file in native]
    planes = [_plane(plane, alignments) for plane in manifest.planes]
    rows = manifest.num_rows
    return {
        "name": manifest.name,
        "tensor": manifest.tensor,
        "layer": manifest.layer,
        "family": manifest.family,
        "format": manifest.format,
        "root": os.fspath(manifest.root),
        "codec": manifest.codec,
        "scale": manifest.scale,
        "num_rows": rows,
        "row_bytes": manifest.row_bytes,
        "row_values": manifest.row_values,
        "table_bytes": manifest.table_bytes,
        "heads": manifest.heads,
        "groups": list(manifest.groups),
        "reads_per_token": manifest.heads * len(planes),
        # a straddling row is still one read; these are the blocks that the reads cover on average
        "blocks_per_token": manifest.heads * sum(plane["blocks"] for plane in planes) / rows,
        "read_bytes_per_token": manifest.heads
        * sum(plane["block_bytes_read"] for plane in planes)
        / rows,
        "pages_per_token": manifest.heads * sum(plane["pages"] for plane in planes) / rows,
        "planes": planes,
        "files": [
            {
                "path": os.fspath(file.path),
                "file_bytes": file.identity.size,
                "stored_bytes": os.stat(file.path).st_blocks * 512,
                "shards": sum(
                    extent.file == index
                    for plane in manifest.planes
                    for extent in (*plane.extents, *plane.copies)
                ),
                "direct": entry.direct,
                "alignment": entry.alignment,
                "note": entry.note,
            }
            for index, (file, entry) in enumerate(zip(files, native, strict=True))
        ],
        "shards": sum(len(plane.extents) for plane in manifest.planes),
        "hash": _hash(manifest),
        "auto": {"backend": opened.backend, "reader": opened.reader, "reason": opened.reason},
    }


def _plane(plane: Plane, alignments: list[int]) -> dict[str, Any]:
    blocks = block_bytes_read = pages = straddling = straddling_sectors = straddling_pages = 0
    for extent in plane.extents:
        where = (extent.offset, plane.row_bytes, extent.num_rows)
        covered, split = _coverage(*where, alignments[extent.file])
        blocks += covered
        block_bytes_read += covered * alignments[extent.file]
        straddling += split
        covered, split = _coverage(*where, _PAGE)
        pages += covered
        straddling_pages += split
        straddling_sectors += _coverage(*where, _SECTOR)[1]
    rows = sum(extent.num_rows for extent in plane.extents)
    return {
        "name": plane.name,
        "row_bytes": plane.row_bytes,
        "extents": len(plane.extents),
        "offsets_mod_512": sorted({extent.offset % _SECTOR for extent in plane.extents}),
        "offsets_mod_4096": sorted({extent.offset % _PAGE for extent in plane.extents}),
        "blocks": blocks,
        "block_bytes_read": block_bytes_read,
        "pages": pages,
        "straddling_rows": straddling,
        "straddling_share": straddling / rows,
        "straddling_share_512": straddling_sectors / rows,
        "straddling_share_4096": straddling_pages / rows,
    }


def _coverage(offset: int, row_bytes: int, num_rows: int, block: int) -> tuple[int, int]:
    """Return the blocks that the rows cover, each row alone, and the rows that cover several."""
    import numpy as np

    # where rows start within a block repeats after at most `block` rows
    starts = (offset + np.arange(min(num_rows, block), dtype=np.int64) * row_bytes) % block
    covered = (starts + row_bytes - 1) // block + 1
    whole, rest = divmod(num_rows, block)
    split = covered > 1
    return (
        int(covered.sum()) * whole + int(covered[:rest].sum()),
        int(split.sum()) * whole + int(split[:rest].sum()),
    )


def _hash(manifest: Manifest) -> dict[str, Any] | None:
    constants = manifest.hash
    if constants is None:
        return None
    return {
        "ngram_size": constants.ngram_size,
        "heads_per_ngram": constants.heads_per_ngram,
        "vocab_size": constants.vocab_size,
        "eos": constants.eos,
        "num_rows": constants.num_rows,
        "multipliers": list(constants.multipliers),
        "sizes": list(constants.sizes),
        "offsets": list(constants.offsets),
    }


def _text(table: dict[str, Any]) -> str:
    scale = "" if table["scale"] is None else f", scale {table['scale']:.9g}"
    files = table["files"]
    pairs = [
        ("tensor", table["tensor"]),
        (
            "where",
            f"layer {table['layer']} (from 0), family {table['family']}, format {table['format']}",
        ),
        ("table", f"{size(table['table_bytes'])} ({table['table_bytes']:,} bytes)"),
        (
            "rows",
            f"{table['num_rows']:,} of {plural(table['row_bytes'], 'byte')}:"
            f" {plural(table['row_values'], 'value')}, {table['codec']}{scale}",
        ),
        ("files", _files_text(table)),
        ("a token reads", _reads_text(table)),
        (
            "alignment",
            "\n".join(_plane_text(plane, _blocks_text(files)) for plane in table["planes"]),
        ),
        ("hash", _hash_text(table)),
        ("auto chooses", f"{table['auto']['backend']} ({table['auto']['reason']})"),
    ]
    return f"{table['name']}\n{fields(pairs)}"


def _files_text(table: dict[str, Any]) -> str:
    files = table["files"]
    folders: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        folders.setdefault(os.path.dirname(file["path"]), []).append(file)
    text = "\n".join(
        f"{plural(sum(file['shards'] for file in found), 'shard')} in"
        f" {plural(len(found), 'file')} of {folder or '.'}"
        for folder, found in folders.items()
    )
    file_bytes = sum(file["file_bytes"] for file in files)
    stored = sum(file["stored_bytes"] for file in files)
    if stored < file_bytes // 2:
        text += (
            f"\nholes: {size(file_bytes)} take {size(stored)} of the disk, most rows read as zeroes"
        )
    return text


def _blocks_text(files: list[dict[str, Any]]) -> str:
    return "/".join(str(block) for block in sorted({file["alignment"] for file in files}))


def _reads_text(table: dict[str, Any]) -> str:
    groups = " + ".join(str(group) for group in table["groups"])
    useful = table["heads"] * table["row_bytes"]
    return (
        f"{plural(table['heads'], 'row')} ({groups} heads)"
        f" in {plural(table['reads_per_token'], 'read')}\n"
        f"{plural(useful, 'byte')} of use in {table['read_bytes_per_token']:,.0f} bytes read:"
        f" {table['blocks_per_token']:.2f} blocks of {_blocks_text(table['files'])},"
        f" {table['pages_per_token']:.2f} pages of {_PAGE}"
    )


def _plane_text(plane: dict[str, Any], blocks: str) -> str:
    offsets = plane["offsets_mod_4096"]
    places = (
        f"all start at byte {offsets[0]} of a page of {_PAGE}"
        if len(offsets) == 1
        else f"start at {len(offsets)} different places in a page of {_PAGE}"
    )
    return (
        f"{plane['name']}: {plural(plane['extents'], 'shard')} {places}\n"
        f"{plane['straddling_share']:.2%} of rows straddle two blocks of {blocks}"
        f" (one longer read), {plane['straddling_share_4096']:.2%} two pages"
    )


def _hash_text(table: dict[str, Any]) -> str:
    constants = table["hash"]
    if constants is None:
        return "unknown without config.json: rows can be read, tokens cannot"
    return (
        f"n-grams of 2 to {constants['ngram_size']} tokens,"
        f" {plural(constants['heads_per_ngram'], 'head')} each,"
        f" vocabulary {constants['vocab_size']:,}, eos {constants['eos']}\n"
        f"{constants['num_rows']:,} rows can be reached, the other"
        f" {table['num_rows'] - constants['num_rows']:,} are padding\n"
        f"heads of {min(constants['sizes']):,} to {max(constants['sizes']):,} rows,"
        f" multipliers {', '.join(str(m) for m in constants['multipliers'])}"
    )
