"""Files that are hostile: headers, indexes and names, and what is said of each."""

from __future__ import annotations

import json
import os
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints import FILE, INDEX, root, write_config, write_header, write_index, write_tiny

NAME = f"{root()}.ngram_embedding"

Write = Callable[[Path], object]


# --- headers


def entries(changes: dict[str, Any]) -> dict[str, Any]:
    """A sound header of one shard and its scale, with some entries changed."""
    sound = {
        f"{NAME}.weight_scale": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        f"{NAME}.shard_0.weight": {"dtype": "F8_E4M3", "shape": [64, 6], "data_offsets": [4, 388]},
    }
    for part, change in changes.items():
        name = f"{NAME}.{part}"
        sound[name] = {**sound.get(name, {}), **change} if isinstance(change, dict) else change
    return sound


def header_of(changes: dict[str, Any], data_bytes: int = 388) -> Write:
    def write(folder: Path) -> None:
        write_config(folder)
        data = struct.pack("<f", 0.5) + bytes(data_bytes - 4)
        write_header(folder / FILE, json.dumps(entries(changes)).encode(), data)

    return write


def shard(**change: Any) -> Write:
    return header_of({"shard_0.weight": change})


def bytes_of(content: bytes) -> Write:
    return lambda folder: (folder / FILE).write_bytes(content)


def sparse_header(length: int, size: int, start: bytes = b"") -> Write:
    def write(folder: Path) -> None:
        (folder / FILE).write_bytes(struct.pack("<Q", length) + start)
        os.truncate(folder / FILE, size)

    return write


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 100\n"

HEADERS: dict[str, tuple[Write, str]] = {
    "overlapping": (
        shard(data_offsets=[2, 386]),
        r"shard_0.weight data needs to start at \d+ or later",
    ),
    "inside another": (
        header_of({"other": {"dtype": "U8", "shape": [9], "data_offsets": [9, 18]}}),
        "data needs to start at",
    ),
    "negative": (shard(data_offsets=[-384, 0]), "data_offsets needs a begin and an end"),
    "backwards": (shard(data_offsets=[388, 4]), "data_offsets needs a begin and an end"),
    "beyond 64 bits": (shard(data_offsets=[4, 2**64 + 388]), "data_offsets needs a begin"),
    "at the end of 63 bits": (shard(data_offsets=[4, 2**63 - 1]), "needs 9223372036854775803 byte"),
    "out of the file": (shard(data_offsets=[5, 389]), r"needs 384 bytes at \d+, file has \d+"),
    "fractions": (shard(data_offsets=[4.0, 388.0]), "data_offsets needs a begin and an end"),
    "a shape that overflows": (shard(shape=[2**62, 2**62]), "needs 9223372036854775807 bytes"),
    "a shape that wraps round to the right size": (
        shard(shape=[2**62, 2, 2, 6, 2**62 + 64]),
        "shape needs|needs 9223372036854775807 bytes",
    ),
    "a shape of another size": (shard(shape=[64, 7]), "needs 448 bytes, found 384"),
    "a negative shape": (shard(shape=[-64, -6]), "shape needs a list of sizes"),
    "another type": (shard(dtype="F8_E5M2"), "dtype needs F8_E4M3 or BF16 or F16 or F32"),
    "packed codes": (
        shard(dtype="U8", shape=[64, 6]),
        "dtype needs F8_E4M3 or BF16 or F16 or F32, found U8",
    ),
    "no rows": (shard(shape=[0, 6], data_offsets=[4, 4]), "needs 292 bytes, found 676"),
    "one axis": (shard(shape=[384]), "shape needs rows and row width"),
    "another width": (shard(shape=[128, 3]), "row width needs 6, found 3"),
    "more rows": (shard(shape=[96, 4]), "row width needs 6, found 4"),
    "bytes behind the last tensor": (header_of({}, data_bytes=389), r"needs \d+ bytes, found \d+"),
    "no scale": (header_of({"weight_scale": None}), "entry needs an object, found None"),
    "a name without end": (
        header_of({"x" * 100_000: {"dtype": 1}}),
        r"x{60,}\.\.\. dtype needs a string",
    ),
    "a name of many lines": (
        header_of({"\n\x1b[31m\u2028\x00": {"dtype": 1}}),
        r"\\n\\x1b\[31m\\u2028\\x00 dtype needs a string",
    ),
    "half a surrogate": (header_of({"\ud800": 1}), r"\\ud800 entry needs an object"),
    "empty": (bytes_of(b""), "needs at least 8 bytes, found 0"),
    "seven bytes": (bytes_of(bytes(7)), "needs at least 8 bytes, found 7"),
    "zeroes": (bytes_of(bytes(4096)), "header needs 0 bytes"),
    "noise": (bytes_of(random.Random(7).randbytes(4096)), "header needs .* bytes"),
    "an LFS pointer": (bytes_of(POINTER), "needs tensors, found a Git LFS pointer"),
    "text": (bytes_of(b"<html>404: not found</html>"), "header needs"),
    "a pickle": (bytes_of(b"PK\x03\x04" + bytes(100)), "header needs"),
    "a length of 2^64": (sparse_header(2**64 - 1, 1 << 40), "header needs 18446744073709551615"),
    "a length of 2^63": (sparse_header(2**63, 1 << 40), "the limit is 100000000"),
    "a length over the limit": (sparse_header(100_000_001, 1 << 40), "the limit is 100000000"),
    "a length past the end": (sparse_header(5000, 4096), "header needs 5000 bytes, file has 4088"),
    "a header that is a hole": (sparse_header(100_000_000, 1 << 40), "found none in 1 .safetens"),
    "a hole behind a name": (
        sparse_header(100_000_000, 1 << 40, b'{"x.ple_embedding.y":'),
        "needs a JSON object, found Expecting value",
    ),
    "UTF-16": (
        lambda folder: write_header(
            folder / FILE, json.dumps(entries({})).encode("utf-16-le") + b".ple_embedding."
        ),
        "needs a JSON object",
    ),
    "deeper than any stack": (
        lambda folder: write_header(folder / FILE, b'{".ple_embedding.":' + b"[" * 1_000_000),
        "needs a JSON object, found maximum recursion",
    ),
    "a number of a million digits": (
        lambda folder: write_header(
            folder / FILE, b'{".ple_embedding.":' + b"9" * 1_000_000 + b"}"
        ),
        "needs a JSON object, found Exceeds the limit",
    ),
}


# --- names, links and other kinds of file


def index_of(name: str) -> Write:
    def write(folder: Path) -> None:
        write_tiny(folder)
        write_index(folder, {f"{NAME}.shard_0.weight": name})

    return write


def linked(name: str, target: str) -> Write:
    def write(folder: Path) -> None:
        write_tiny(folder)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return write


def piped(name: str) -> Write:
    def write(folder: Path) -> None:
        write_tiny(folder)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return write


def sparse_index(folder: Path) -> None:
    index_of(FILE)(folder)
    os.truncate(folder / INDEX, 1 << 40)


NO_NEIGHBOR = f"{INDEX}: file name needs a file of the same folder, found "
NAMES: dict[str, tuple[Write, str]] = {
    **{f"the name {name!r}": (index_of(name), NO_NEIGHBOR) for name in ("..", ".", "", "../x")},
    "a path": (index_of("/etc/passwd"), NO_NEIGHBOR + "/etc/passwd"),
    "a path below": (index_of("sub/model.safetensors"), NO_NEIGHBOR + "sub/model.safetensors"),
    "a path of another system": (index_of("..\\x"), re.escape(NO_NEIGHBOR + "..\\\\x")),
    "a name with a zero": (index_of("a\0b"), re.escape(NO_NEIGHBOR + "a\\x00b")),
    "a name of many lines": (index_of("a\nb"), re.escape(NO_NEIGHBOR + "a\\nb")),
    "a name too long for any folder": (index_of("x" * 3000), "needs to exist, named by"),
    "an index of a terabyte": (sparse_index, f"{INDEX} needs 500000000 bytes at most"),
    "an index that is a pipe": (piped(INDEX), f"{INDEX} needs a regular file"),
    "an index that is gone": (linked(INDEX, "gone"), f"{INDEX} needs a file, found nothing"),
    "a config that is gone": (linked("config.json", "gone"), "config.json needs a file, found"),
    "a config that is a pipe": (piped("config.json"), "config.json needs a regular file"),
    "a config that never ends": (linked("config.json", "/dev/zero"), "needs a regular file"),
    "a config without a size": (
        linked("config.json", "/proc/self/pagemap"),
        "config.json needs a JSON object",
    ),
    "a config that is a folder": (linked("config.json", "."), "config.json needs a regular file"),
    "a config that links to itself": (linked("config.json", "config.json"), "too many levels"),
    "a file that is gone": (linked(FILE, "gone"), f"{FILE} needs a file, found nothing"),
    "a file that is a pipe": (piped(FILE), f"{FILE} needs a regular file"),
    "a file without a size": (linked(FILE, "/proc/self/pagemap"), f"{FILE}"),
    "a file that links to itself": (linked(FILE, FILE), "too many levels of symbolic links"),
}
