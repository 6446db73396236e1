"""`rowstream gather`: rows by id or by tokens, as bytes or values."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rowstream.cli.arguments import Commands, add_command, add_reader, add_table, ids
from rowstream.cli.text import json_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rowstream.store import RowStore

__all__ = ["add_to"]

_EXAMPLES = """\
  rowstream gather demo --rows 0,1
  rowstream gather demo --rows=-1,7 --values
  rowstream gather demo --tokens 17,42,99 --json
"""


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "gather",
        help="read rows of a table, by row id or for a sequence of tokens",
        description="Read rows of a table: by row id, or the rows that each token of a sequence "
        "needs. One line for each row: its id and its bytes in hexadecimal.",
        examples=_EXAMPLES,
    )
    add_table(parser)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument(
        "--rows",
        metavar="IDS",
        type=ids,
        help="row ids; -1 is no row and reads as zeroes (--rows=-1,7)",
    )
    wanted.add_argument(
        "--tokens", metavar="IDS", type=ids, help="token ids of a sequence, from its start on"
    )
    parser.add_argument(
        "--backend",
        default="auto",
        choices=("auto", "disk", "mmap", "pinned"),
        help="where the rows are read from (default: auto)",
    )
    add_reader(parser)
    parser.add_argument("--values", action="store_true", help="decoded values instead of bytes")
    parser.add_argument(
        "--json",
        action="store_true",
        help="row_ids and rows_hex, a list for each token; values if asked for",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Gather and print."""
    import numpy as np

    from rowstream.store import RowStore

    with RowStore.open(
        args.path, table=args.table, backend=args.backend, reader=args.reader
    ) as store:
        if args.tokens is None:
            row_ids = np.array([args.rows], np.int64)
        else:
            row_ids = store.row_ids(None, np.array(args.tokens, np.int64))
        try:
            rows = store.gather(row_ids)
        except IndexError as error:
            raise ValueError(f"{store.manifest.name}: {error}") from error
        print(
            _json(store, row_ids, rows, args.values)
            if args.json
            else _text(store, row_ids, rows, args.values)
        )
    return 0


def _text(
    store: RowStore, row_ids: NDArray[np.int64], rows: NDArray[np.uint8], values: bool
) -> str:
    flat = rows.reshape(-1, store.row_bytes)
    if values:
        shown = [" ".join(f"{value:.9g}" for value in row) for row in store.values(flat).tolist()]
    else:
        shown = [row.tobytes().hex() for row in flat]
    return "\n".join(f"{row} {text}" for row, text in zip(row_ids.ravel(), shown, strict=True))


def _json(
    store: RowStore, row_ids: NDArray[np.int64], rows: NDArray[np.uint8], values: bool
) -> str:
    answer: dict[str, Any] = {
        "row_ids": row_ids.tolist(),
        "rows_hex": [[row.tobytes().hex() for row in token] for token in rows],
    }
    if values:
        # JSON has no word for what is not finite
        answer["values"] = [
            [[value if abs(value) < float("inf") else None for value in row] for row in token]
            for token in store.values(rows).tolist()
        ]
    return json_text(answer)
