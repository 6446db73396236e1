"""`rowstream verify`: proves a table right, and two copies the same; the exit status tells."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rowstream.cli.arguments import Commands, add_command, positive
from rowstream.cli.progress import Progress
from rowstream.cli.text import fields, json_text, plural

if TYPE_CHECKING:
    from rowstream.verify import Report, TableReport

__all__ = ["add_to"]

_EXAMPLES = """\
  rowstream verify demo
  rowstream verify demo --rows 100000 --seed 7
  rowstream verify demo --against copy --full
  rowstream verify demo --full --checksums demo.sha256.json
"""


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "verify",
        help="prove that a table is read right, or that two checkpoints hold the same one",
        description="Check the tables of a checkpoint: hash constants, geometry, scale, and rows "
        "read in several ways, compared byte for byte with a second reader that shares no code "
        "with the first. The status is 0 where all is sound, 1 where it is not.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="checkpoint folder, .safetensors file, or id in the local hub cache",
    )
    parser.add_argument(
        "--table", metavar="NAME", help="only this table, as inspect names it (default: all)"
    )
    parser.add_argument(
        "--against",
        metavar="OTHER",
        help="checkpoint that must hold the same table, in whatever layout",
    )
    parser.add_argument(
        "--rows",
        metavar="N",
        type=positive,
        default=4096,
        help="random rows to compare, besides the first, the last and those at shard boundaries"
        " (default: 4096)",
    )
    parser.add_argument(
        "--seed", metavar="S", type=_seed, help="choose the rows of an earlier run (default: new)"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="read every row too, once, in order, for a SHA-256 of the table and of each shard",
    )
    parser.add_argument(
        "--checksums",
        metavar="FILE",
        type=Path,
        help="with --full: keep the checksums in FILE, or compare with them where it exists",
    )
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        choices=("auto", "disk", "mmap", "pinned"),
        help="read through this one, may be repeated (default: auto, and a second one)",
    )
    parser.add_argument(
        "--reader",
        action="append",
        default=[],
        choices=("auto", "uring", "pool"),
        help="read the disk with this one, may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="the checks as JSON")
    parser.set_defaults(run=run, usage=parser.format_usage())


def run(args: argparse.Namespace) -> int:
    """Verify and print."""
    from rowstream.verify import verify
    from rowstream.verify.checksums import read_file, write_file

    if args.checksums is not None and not args.full:
        text = "rowstream verify: error: argument --checksums: needs --full"
        print(f"{args.usage}{text}", file=sys.stderr)
        return 2
    known = None
    if args.checksums is not None:
        if os.path.lexists(args.checksums):
            known = read_file(args.checksums)
        else:
            # found out now rather than after the whole table has been read
            os.stat(args.checksums.parent)
    with Progress("verifying") as progress:
        report = verify(
            args.path,
            table=args.table,
            against=args.against,
            rows=args.rows,
            seed=args.seed,
            backends=args.backend,
            readers=args.reader,
            full=args.full,
            checksums=known,
            progress=progress,
        )
    print(json_text(report.as_json()) if args.json else _text(report))
    if args.checksums is not None and known is None and report.sound:
        write_file(
            args.checksums,
            {table.name: table.checksums for table in report.tables if table.checksums is not None},
        )
        if not args.json:
            print(f"{args.checksums}: checksums kept")
    return 0 if report.sound else 1


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"needs a whole number from 0 on, got {text!r}")
    return int(text)


def _text(report: Report) -> str:
    counts = [
        f"{report.count(status):,} {status}"
        for status in ("failed", "warning", "skipped")
        if report.count(status)
    ]
    checks = sum(len(table.checks) for table in report.tables)
    summary = ", ".join([plural(len(report.tables), "table"), plural(checks, "check"), *counts])
    verdict = "sound" if report.sound else "not sound"
    return "\n\n".join(
        [
            *(_table_text(table) for table in report.tables),
            f"{report.path}: {verdict} ({summary}, --seed {report.seed})",
        ]
    )


def _table_text(table: TableReport) -> str:
    width = max(len(check.status) for check in table.checks)
    text = fields((check.name, f"{check.status:<{width}}  {check.text}") for check in table.checks)
    if table.checksums is not None:
        digests = zip(table.checksums.shard_rows, table.checksums.shards, strict=True)
        text += "\n\n" + fields(
            [
                ("sha256 of the rows", table.checksums.table),
                *(
                    (f"shard {shard}", f"{digest}  {plural(rows, 'row')}")
                    for shard, (rows, digest) in enumerate(digests)
                ),
            ]
        )
    return f"{table.name}\n{text}"
