"""`rowstream synth`: writes a synthetic checkpoint, with a progress bar."""

from __future__ import annotations

import argparse

from rowstream.cli.arguments import Commands, add_command
from rowstream.cli.progress import Progress
from rowstream.cli.text import plural, size

__all__ = ["add_to"]

_EXAMPLES = """\
  rowstream synth demo --table-gib 0.01
  rowstream synth demo-bf16 --table-gib 0.01 --dtype bf16 --layout radixark
  rowstream synth demo-full --table-gib 47.68 --sparse
"""


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "synth",
        help="write a checkpoint to try things with: a real table layout, a tiny model",
        description="Write a complete checkpoint with the names, files and table of a released one "
        "and a tiny model around it. Every byte of the table follows from the seed, so that any "
        "row can be recomputed.",
        examples=_EXAMPLES,
    )
    parser.add_argument("folder", metavar="DIR", help="folder to write, new or empty")
    parser.add_argument(
        "--table-gib",
        metavar="N",
        type=float,
        default=1.0,
        help="size of the table in GiB (default: 1)",
    )
    parser.add_argument(
        "--dtype", default="fp8", choices=("fp8", "bf16"), help="type of its values (default: fp8)"
    )
    parser.add_argument(
        "--layout",
        default="qwen",
        choices=("qwen", "radixark"),
        help="whose file layout to follow (default: qwen)",
    )
    parser.add_argument(
        "--sparse",
        action="store_true",
        help="leave holes for the table: takes no space, reads as zeroes",
    )
    parser.add_argument(
        "--seed", metavar="S", type=int, default=0, help="another seed, other bytes (default: 0)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write and say what was written."""
    from rowstream.synth import write_checkpoint

    with Progress("writing") as progress:
        summary = write_checkpoint(
            args.folder,
            table_gib=args.table_gib,
            dtype=args.dtype,
            layout=args.layout,
            sparse=args.sparse,
            seed=args.seed,
            progress=progress,
        )
    recipe = summary.recipe
    print(
        f"{summary.folder}: {plural(summary.num_files, 'file')},"
        f" {size(summary.written_bytes)} written in {summary.elapsed_s:.1f} s"
    )
    print(
        f"table: {recipe.dtype}, {plural(recipe.num_rows, 'row')}"
        f" of {plural(recipe.row_bytes, 'byte')}, {size(recipe.table_bytes)},"
        f" layout {recipe.layout}, seed {recipe.seed}"
    )
    if recipe.sparse:
        print(
            "sparse: the table is holes, every row reads as zeroes and no read reaches the device;"
            " right for sizes and start-up, wrong for speed"
        )
    return 0
