"""A checkpoint folder: where it lies, its config.json, and the careful opening of any file in it.

Knows no tensor and no table. Nothing is ever downloaded.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from rowstream.errors import ManifestError, shown

__all__ = ["CONFIG_NAME", "json_object", "locate", "open_regular", "read_config"]

CONFIG_NAME = "config.json"
_CONFIG_BYTES = 16_000_000  # real ones have kilobytes; parsed, it takes 30 times as much

# an id is `name` or `owner/name`; no part may start with a dot, which also rules out ".."
_HUB_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)?")
_REVISION = re.compile(r"[0-9A-Za-z]+")


def locate(path_or_id: str | os.PathLike[str]) -> Path:
    """Return the folder of a checkpoint given as a folder, as a file in it, or as a hub id.

    An id is looked up in the local hub cache. What exists on disk wins over an id. Raises
    ManifestError when nothing is found.
    """
    path = Path(path_or_id)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    name, hub = os.fspath(path_or_id), _hub_cache()
    if _HUB_ID.fullmatch(name):
        repository = hub / ("models--" + name.replace("/", "--"))
        revision = _main_revision(repository)
        if revision is not None and (repository / "snapshots" / revision).is_dir():
            return repository / "snapshots" / revision
    raise ManifestError.mismatch(
        shown(name), f"a folder, a .safetensors file or an id in {hub}", "nothing"
    )


def _hub_cache() -> Path:
    # the variables of huggingface_hub, in its order; the second is its older spelling of the first
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(variable):
            return Path(value).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def _main_revision(repository: Path) -> str | None:
    try:
        revision = (repository / "refs" / "main").read_text("ascii").strip()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None
    return revision if _REVISION.fullmatch(revision) else None


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return the JSON object in the folder's config.json, or None when there is no such file."""
    path = folder / CONFIG_NAME
    if not os.path.lexists(path):  # a dangling link is a broken download, not an absent config
        return None
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _CONFIG_BYTES:
            raise ManifestError.mismatch(
                "", f"{_CONFIG_BYTES} bytes at most", size, file=CONFIG_NAME
            )
        # no more than that, or a link into /proc would be read without end
        return json_object(file.read(size), file=CONFIG_NAME)


def open_regular(path: Path, *, exactly: bool = False) -> BinaryIO:
    """Open a file of a checkpoint for reading, links followed.

    `exactly` brings nothing into the page cache but what is read: rows may lie behind it. Raises
    ManifestError when it is absent or anything but a regular file: a named pipe would block
    forever.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise ManifestError.mismatch("", "a file", "nothing", file=path.name) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ManifestError.mismatch("", "a regular file", "something else", file=path.name)
    if not exactly:
        return os.fdopen(descriptor, "rb")
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return os.fdopen(descriptor, "rb", buffering=0)


def json_object(text: bytes, *, file: str, unique_keys: bool = False) -> dict[str, Any]:
    """Parse an untrusted JSON object; whatever is wrong raises ManifestError naming `file`."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed = dict(items)
        if len(parsed) != len(items):
            seen: set[str] = set()
            for name, _ in items:
                if name in seen:
                    raise ManifestError.mismatch("", "each key once", f"{name} twice", file=file)
                seen.add(name)
        return parsed

    def constant(literal: str) -> NoReturn:
        raise ManifestError.mismatch("", "finite numbers", literal, file=file)

    try:
        # decoded here: given bytes, json would guess at UTF-16 and UTF-32
        parsed = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=pairs if unique_keys else None,
            parse_constant=constant if unique_keys else None,
        )
    except ManifestError:
        raise
    except (ValueError, RecursionError, MemoryError) as error:
        # ValueError covers bad UTF-8, bad JSON and integers longer than the interpreter converts
        reason = str(error) or type(error).__name__
        raise ManifestError.mismatch("", "a JSON object", reason, file=file) from None
    if type(parsed) is not dict:
        raise ManifestError.mismatch("", "a JSON object", type(parsed).__name__, file=file)
    return parsed
