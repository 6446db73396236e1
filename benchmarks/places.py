"""The tables that benchmarks measure, written where they are missing, and the text for them.

Run by itself it makes both tables and the trace, so that the benchmarks find them:
python benchmarks/places.py --dir FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import options
from benchmarks.ngrams import Trace, released_constants
from benchmarks.text import CorpusMissing, load_corpus

from rowstream import tables
from rowstream.synth import write_checkpoint

__all__ = ["holes_at", "table_at", "trace_for"]


def table_at(folder: Path, gib: float) -> Path:
    """Return the checkpoint with a table of that size under a folder, written if it is missing."""
    place = folder / f"table-{gib:g}gib"
    if not (place / "config.json").exists():
        print(f"writing {gib:g} GiB to {place}", flush=True)
        write_checkpoint(place, table_gib=gib)
    return place


def holes_at(folder: Path, gib: float) -> Path:
    """Return a checkpoint whose table of that size has no bytes at all."""
    place = folder / f"holes-{gib:g}gib"
    if not (place / "config.json").exists():
        write_checkpoint(place, table_gib=gib, sparse=True)
    return place


def trace_for(folder: Path) -> Trace:
    """Return the trace of the corpus for the table at a folder. Raises CorpusMissing."""
    (manifest,) = tables(folder)
    return Trace.kept(load_corpus(), released_constants(manifest.hash))


def main() -> None:
    arguments = options(__doc__).parse_args()
    folder = table_at(arguments.dir, arguments.gib)
    holes_at(arguments.dir, arguments.gib)
    try:
        trace = trace_for(folder)
    except CorpusMissing as reason:
        print(f"no text: {reason}")
        return
    print(f"{len(trace.keys)} tokens, {len(trace.hashes)} n-grams")


if __name__ == "__main__":
    main()
