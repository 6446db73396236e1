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

__all__ = ["cached_pages", "cached_row_pages", "forget", "holes_at", "table_at", "trace_for"]


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


def forget(path: Path) -> None:
    """Drop a file from the page cache. Nothing may have it mapped."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # what is not written yet would stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_pages(path: Path, pages: slice = slice(None)) -> int:
    """Count the pages of a file that the page cache has; of some of them, by their numbers."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    found = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
    at = np.frombuffer(mapped, np.uint8).ctypes.data
    if libc.mincore(at, len(mapped), found.ctypes.data) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
    return int(np.count_nonzero(found[pages] & 1))


def cached_row_pages(manifest: Manifest) -> int:
    """Count the pages of a table's rows, and of nothing else, that the page cache has."""
    cached = 0
    for plane in manifest.planes:
        for extent in plane.extents:
            end = extent.offset + extent.num_rows * plane.row_bytes
            pages = slice(-(-extent.offset // mmap.PAGESIZE), end // mmap.PAGESIZE)
            cached += cached_pages(manifest.files[extent.file].path, pages)
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
