"""`rowstream bench reader`: random rows per second, time of a token's rows, processor time per row.

The machine stands next to the numbers, and so does what the device itself counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rowstream.cli.arguments import Commands, add_command, add_reader, add_table, positive
from rowstream.cli.text import fields, json_text, plural

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rowstream.block_device import BlockDevice
    from rowstream.store import RowStore

__all__ = ["add_to"]

_EXAMPLES = """\
  rowstream bench reader demo --rows 4096
  rowstream bench reader demo --rows 4096 --reader pool --json
"""

_TOKENS = 200  # gathers of one token at least: the 99th percentile needs them
_MOST_TOKENS = 2000
_TOKENS_S = 1.0
_DEVICE_SHARE = 0.95  # of the reads issued that the device must have counted


@dataclass(frozen=True, slots=True)
class _Round:
    rows_per_s: float
    cpu_us_per_row: float
    reads: int
    device_reads: int | None


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "bench",
        help="measure how fast rows are read",
        description="Measure how fast rows are read.",
        examples=_EXAMPLES,
    )
    benches = parser.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    reader = add_command(
        benches,
        "reader",
        help="random rows from the disk",
        description="Read random rows from the disk: many in one gather for rows/s and processor "
        f"time, then the rows of single tokens, {_TOKENS} times or more, for p50 and p99.",
        examples=_EXAMPLES,
    )
    add_table(reader)
    reader.add_argument(
        "--rows",
        metavar="N",
        type=positive,
        required=True,
        help="different rows read in one gather",
    )
    add_reader(reader)
    reader.add_argument(
        "--queue-depth",
        metavar="D",
        type=positive,
        default=128,
        help="reads kept in flight (default: 128)",
    )
    reader.add_argument(
        "--repeat",
        metavar="K",
        type=positive,
        default=3,
        help="gathers of N rows; the one with the median rate is reported (default: 3)",
    )
    reader.add_argument("--json", action="store_true", help="the numbers as JSON")
    reader.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    import numpy as np

    from rowstream.block_device import device_of
    from rowstream.machine import machine
    from rowstream.store import RowStore

    with RowStore.open(
        args.path,
        table=args.table,
        backend="disk",
        reader=args.reader,
        queue_depth=args.queue_depth,
    ) as store:
        if args.rows > store.num_rows:
            raise ValueError(
                f"--rows: needs {args.rows} different rows,"
                f" {store.manifest.name} has {store.num_rows}"
            )
        device = device_of(store.manifest.files[0].path)
        rng = np.random.default_rng()
        rounds = _rounds(store, device, rng, args.rows, args.repeat)
        tokens_us = _token_times_us(store, rng)
        stats = store.stats()
    median = sorted(rounds, key=lambda r: r.rows_per_s)[(len(rounds) - 1) // 2]
    result = {
        "rows_per_s": median.rows_per_s,
        "p50_us": float(np.percentile(tokens_us, 50)),
        "p99_us": float(np.percentile(tokens_us, 99)),
        "cpu_us_per_row": median.cpu_us_per_row,
        "reads": median.reads,
        "device_reads": median.device_reads,
        "rows": args.rows,
        "rows_per_token": store.heads,
        "tokens": len(tokens_us),
        "repeat": args.repeat,
        "table": store.manifest.name,
        "row_bytes": store.row_bytes,
        "backend": stats["backend"],
        "reader": stats["reader"],
        "queue_depth": stats["queue_depth"],
        "device": device.name,
        "device_kind": device.kind,
        "file_system": device.file_system,
        "machine": machine(),
    }
    print(json_text(result) if args.json else _text(result))
    _warn(rounds, device)
    return 0


def _rounds(
    store: RowStore, device: BlockDevice, rng: np.random.Generator, rows: int, repeat: int
) -> list[_Round]:
    import numpy as np

    out = np.ones(
        (rows, 1, store.row_bytes), np.uint8
    )  # written: a page's first touch is not the reader's
    rounds = []
    for _ in range(repeat):
        ids = _different_rows(rng, store.num_rows, rows).reshape(rows, 1)
        reads_before, device_before = store.stats()["reads"], device.completed_reads()
        cpu_began, began = time.process_time(), time.perf_counter()
        store.gather(ids, out)
        elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        device_after = device.completed_reads()
        counted = (
            None if device_before is None or device_after is None else device_after - device_before
        )
        rounds.append(
            _Round(
                rows / elapsed_s,
                cpu_s / rows * 1e6,
                store.stats()["reads"] - reads_before,
                counted,
            )
        )
    return rounds


def _different_rows(rng: np.random.Generator, num_rows: int, count: int) -> NDArray[np.int64]:
    """Return `count` different row ids in random order."""
    import numpy as np

    if count * 2 >= num_rows:
        return rng.permutation(num_rows)[:count].astype(np.int64)
    ids = np.empty(0, np.int64)
    while len(ids) < count:
        ids = np.unique(np.concatenate((ids, rng.integers(num_rows, size=count - len(ids) + 64))))
    return rng.permutation(ids)[:count]


def _token_times_us(store: RowStore, rng: np.random.Generator) -> list[float]:
    import numpy as np

    out = np.ones((1, store.heads, store.row_bytes), np.uint8)
    times_us: list[float] = []
    began = time.perf_counter()
    while len(times_us) < _TOKENS or (
        len(times_us) < _MOST_TOKENS and time.perf_counter() - began < _TOKENS_S
    ):
        ids = rng.integers(store.num_rows, size=(1, store.heads))
        start = time.perf_counter()
        store.gather(ids, out)
        times_us.append((time.perf_counter() - start) * 1e6)
    return times_us


def _text(result: dict[str, Any]) -> str:
    device_reads = result["device_reads"]
    counted = (
        "not counted by the device"
        if device_reads is None
        else f"the device counted {device_reads:,}"
    )
    return fields(
        [
            (
                "rows",
                f"{result['rows_per_s']:,.0f} /s"
                f" ({plural(result['rows'], 'different row')} in one gather)",
            ),
            (
                "a token",
                f"{result['p50_us']:.0f} us p50, {result['p99_us']:.0f} us p99"
                f" ({plural(result['rows_per_token'], 'row')}, {plural(result['tokens'], 'time')})",
            ),
            ("processor", f"{result['cpu_us_per_row']:.2f} us a row, all threads"),
            ("reads", f"{result['reads']:,} ({counted})"),
            (
                "with",
                f"{result['backend']}, reader {result['reader']},"
                f" queue depth {result['queue_depth']}",
            ),
            ("table", f"{result['table']}, rows of {plural(result['row_bytes'], 'byte')}"),
            (
                "device",
                f"{result['device'] or 'not visible'} ({result['device_kind']}),"
                f" {result['file_system']}",
            ),
            ("machine", result["machine"]),
        ],
        indent=0,
    )


def _warn(rounds: list[_Round], device: BlockDevice) -> None:
    issued = sum(r.reads for r in rounds)
    counted = [r.device_reads for r in rounds if r.device_reads is not None]
    if len(counted) < len(rounds):
        why = f"{device.file_system} shows no device whose reads could be counted"
    elif sum(counted) < _DEVICE_SHARE * issued:
        why = (
            f"{device.name} did {sum(counted):,} of {issued:,} reads;"
            " the rest came from the page cache or from holes of a sparse file"
        )
    else:
        return
    # after stdout, so that the warning ends what a person reads
    sys.stdout.flush()
    claim = (
        "these figures may not be a disk's"
        if len(counted) < len(rounds)
        else "these figures are not a disk's"
    )
    print(f"rowstream: warning: {claim}: {why}", file=sys.stderr)
