"""The tables that benchmarks measure, written where they are missing, and the text for them.

Run by itself it makes both tables and the trace, so that the benchmarks find them:
python benchmarks/places.py --dir FOLDER.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import options
from benchmarks.ngrams import Trace, released_constants
from benchmarks.text import CorpusMissing, load_corpus

from rowstream import Manifest, tables
from rowstream.synth import write_checkpoint

__all__ = ["cached_pages", "holes_at", "table_at", "trace_for"]


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


def cached_pages(manifest: Manifest) -> int:
    """Count the pages of a table's rows, and of nothing else, that the page cache has."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    cached = 0
    for plane in manifest.planes:
        for extent in plane.extents:
            end = extent.offset + extent.num_rows * plane.row_bytes
            first, last = -(-extent.offset // mmap.PAGESIZE), end // mmap.PAGESIZE
            with open(manifest.files[extent.file].path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
            at = np.frombuffer(mapped, np.uint8).ctypes.data + first * mmap.PAGESIZE
            found = np.zeros(last - first, np.uint8)
            if libc.mincore(at, found.size * mmap.PAGESIZE, found.ctypes.data) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), str(manifest.files[extent.file].path))
            cached += int(np.count_nonzero(found & 1))
    return cached


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
