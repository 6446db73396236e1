"""The index of a split checkpoint, model.safetensors.index.json: which files hold which tensors.

Only a hint, the headers decide. A real index has 300,000 keys, so it is scanned for a marker and
never parsed.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from rowstream.checkpoint import open_regular
from rowstream.errors import ManifestError

__all__ = ["INDEX_NAME", "indexed_files", "indexed_tensors"]

INDEX_NAME = "model.safetensors.index.json"

_INDEX_BYTES_MAX = 500_000_000  # ten times a real one of 300,000 keys
_CHUNK_BYTES = 1 << 20
_ENTRY_BYTES = 1 << 12  # the longest `"name": "file"` followed; a longer one is left to the headers
_ENTRY = re.compile(rb'"([^"\\]*)"[ \t\r\n]*:[ \t\r\n]*("(?:[^"\\]|\\.)*")')


def indexed_files(folder: Path, marker: bytes) -> list[str]:
    """Return the files that the folder's index gives for tensors whose name holds the marker.

    Sorted, each once; empty when there is no index. Raises ManifestError on a file name that leaves
    the folder.
    """
    return sorted(set(indexed_tensors(folder, marker).values()))


def indexed_tensors(folder: Path, marker: bytes) -> dict[str, str]:
    """Return tensors whose name holds the marker, and the file that the folder's index gives each.

    Empty when there is no index. Raises ManifestError on a file name that leaves the folder.
    """
    path = folder / INDEX_NAME
    if not os.path.lexists(path):
        return {}
    found: dict[str, str] = {}
    window = b""
    with open_regular(path) as file:
        left = os.fstat(file.fileno()).st_size
        if left > _INDEX_BYTES_MAX:
            raise ManifestError.mismatch(
                "", f"{_INDEX_BYTES_MAX} bytes at most", left, file=INDEX_NAME
            )
        # no more than that, or a link into /proc would be read without end
        while chunk := file.read(min(_CHUNK_BYTES, left)):
            left -= len(chunk)
            # an entry cut off at the end of one window lies whole in the next
            window = window[-2 * _ENTRY_BYTES :] + chunk
            hit = window.find(marker)
            while hit >= 0:
                found.update(_entry_at(window, hit))
                hit = window.find(marker, hit + 1)
    return found


def _entry_at(window: bytes, hit: int) -> dict[str, str]:
    quote = window.rfind(b'"', max(0, hit - _ENTRY_BYTES), hit)
    entry = _ENTRY.match(window, quote, hit + _ENTRY_BYTES) if quote >= 0 else None
    if entry is None or entry.start(2) < hit:
        return {}  # not a key
    try:
        name = json.loads(entry[2])
    except ValueError:
        return {}
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise ManifestError.mismatch(
            "file name", "a file of the same folder", name, file=INDEX_NAME
        )
    return {entry[1].decode("utf-8", "replace"): name}
