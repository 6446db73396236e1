"""Where device profiles are kept between runs: one JSON file in the user's cache folder.

Keeps plain objects by key and never fails: a cache that is broken or cannot be written is as good
as an empty one.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from rowstream.checkpoint import json_object, open_regular
from rowstream.errors import ManifestError

__all__ = ["cache_file", "read_entry", "write_entry"]

_VERSION = 1
_BYTES_MAX = 1 << 20
_ENTRIES_MAX = 256


def cache_file() -> Path:
    """Return where profiles are kept: rowstream/profiles.json below XDG_CACHE_HOME or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # the specification of the variable has a relative path ignored
    folder = Path(cache) if os.path.isabs(cache) else Path("~/.cache").expanduser()
    return folder / "rowstream" / "profiles.json"


def read_entry(key: str) -> dict[str, Any] | None:
    """Return what is kept under a key, as it was written by anyone, or None."""
    entry = _entries().get(key)
    return entry if type(entry) is dict else None


def write_entry(key: str, entry: dict[str, Any]) -> bool:
    """Keep an object of JSON values under a key; False where that cannot be."""
    entries = _entries()
    entries.pop(key, None)  # written last, dropped last
    entries[key] = entry
    while len(entries) > _ENTRIES_MAX:
        del entries[next(iter(entries))]
    text = json.dumps({"version": _VERSION, "profiles": entries}, indent=1)
    try:
        path = cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, made = tempfile.mkstemp(dir=path.parent, prefix=".profiles-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(made, path)
        except BaseException:
            os.unlink(made)
            raise
    except (OSError, RuntimeError):  # without a home folder expanduser raises the latter
        return False
    return True


def _entries() -> dict[str, Any]:
    try:
        with open_regular(cache_file()) as file:
            text = file.read(_BYTES_MAX + 1)
        document = json_object(text, file=cache_file().name)
    except (OSError, RuntimeError, ManifestError):
        return {}
    entries = document.get("profiles")
    whole = len(text) <= _BYTES_MAX and document.get("version") == _VERSION
    return entries if whole and type(entries) is dict else {}
