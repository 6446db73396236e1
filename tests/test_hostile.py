"""Checkpoints that are broken, hostile or half there, through the command line: one line, status 1,
no traceback, at once, in bounded memory.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import (
    TINY_CONFIG,
    Array,
    hash_buffers,
    int64,
    root,
    scale,
    shards,
    table_bytes,
    write_config,
    write_file,
    write_header,
    write_index,
    write_tiny,
)
from children import unmeasured
from fuzz import fuzz_checkpoint
from looks import PAUSE_S
from rowstream import ManifestError, ReadError, RowStore, tables
from rowstream.cli import main

Capture = pytest.CaptureFixture[str]
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAME = f"{root()}.ngram_embedding"

Write = Callable[[Path], object]


def refusal(capsys: Capture, path: Path) -> str:
    """The one line that `inspect` has to say."""
    began = time.process_time()
    status = main(["inspect", os.fspath(path)])
    spent = time.process_time() - began
    out, err = capsys.readouterr()
    assert (status, out) == (1, "")
    assert spent < 2
    assert err.startswith("rowstream: error: ")
    assert err.endswith("\n")
    assert err[:-1].isprintable()
    assert err.isascii()
    assert len(err) < 1000
    return err[len("rowstream: error: ") : -1]


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


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_headers(case: str, tmp_path: Path, capsys: Capture) -> None:
    write, message = HEADERS[case]
    write(tmp_path)
    for path in (tmp_path, tmp_path / FILE):
        assert re.search(message, refusal(capsys, path))
    (tmp_path / "config.json").unlink(missing_ok=True)
    if case not in ("another width", "more rows", "one axis"):
        refusal(capsys, tmp_path)


def test_every_truncation_is_refused(tmp_path: Path, capsys: Capture) -> None:
    write_tiny(tmp_path)
    content = (tmp_path / FILE).read_bytes()
    cuts = [*range(0, 40), *range(40, len(content), 37), *range(len(content) - 9, len(content))]
    for cut in cuts:
        (tmp_path / FILE).write_bytes(content[:cut])
        assert refusal(capsys, tmp_path).startswith(
            (FILE, f"{tmp_path} needs tensors like") if cut < len(content) else FILE
        )


# --- tables: shards and their likes


def tiny_of(change: Callable[[list[Array]], list[Array]], **config: Any) -> Write:
    def write(folder: Path) -> None:
        write_config(folder, **config)
        rows = shards(table_bytes(64, 6), [16] * 4)
        write_file(folder / FILE, change([scale(), *rows, *hash_buffers()]))

    return write


def with_scale(data: bytes, dtype: str = "F32", shape: tuple[int, ...] = ()) -> Write:
    stored = Array(f"{NAME}.weight_scale", dtype, shape, data)
    return tiny_of(lambda held: [stored, *held[1:]])


def other_constants(position: int) -> Write:
    def change(held: list[Array]) -> list[Array]:
        values = np.frombuffer(held[position].data or b"", "<i8").copy()
        values[0] += 2
        held[position] = int64(held[position].name, values.tolist())
        return held

    return tiny_of(change)


def split(folder: Path, **names: list[Array]) -> None:
    write_config(folder)
    for name, arrays in names.items():
        write_file(folder / f"{name}.safetensors", arrays)


def duplicate_shard(folder: Path) -> None:
    rows = shards(table_bytes(64, 6), [16] * 4)
    split(folder, a=[scale(), *rows], b=[rows[2]])


def missing_file(folder: Path) -> None:
    rows = shards(table_bytes(64, 6), [16] * 4)
    split(folder, a=[scale(), *rows[:3]])
    files = {rows[3].name: "b.safetensors", rows[0].name: "a.safetensors"}
    write_index(folder, files)


TABLES: dict[str, tuple[Write, str]] = {
    "a shard twice": (duplicate_shard, "shard_2.weight needs one file, found also a.safetensors"),
    "a shard of both styles": (
        tiny_of(lambda held: [*held, Array(f"{NAME}.shards.1.weight", "F8_E4M3", (16, 6))]),
        "needs one tensor for a shard",
    ),
    "a shard missing": (tiny_of(lambda held: [*held[:2], *held[3:]]), "needs shard 1, found shard"),
    "the first shard missing": (tiny_of(lambda held: [held[0], *held[2:]]), "needs shard 0, found"),
    "the last shard missing": (tiny_of(lambda held: [*held[:4], *held[5:]]), "rows needs 64, foun"),
    "a file of shards missing": (missing_file, f"b.safetensors needs to exist, named by {INDEX}"),
    "a row no reader can hold": (
        lambda folder: write_file(folder / FILE, [Array(f"{NAME}.weight", "F32", (3, 2**33))]),
        "row width needs 65536 at most, found 8589934592",
    ),
    "a shard number without end": (
        tiny_of(lambda held: [Array(f"{NAME}.shard_{'9' * 4000}.weight", "F8_E4M3", (1, 6))]),
        "needs a name like",
    ),
    "a layer without end": (
        lambda folder: write_file(
            folder / FILE,
            [Array(f"layers.{'9' * 4000}.ple.ple_embedding.ngram_embedding.weight", "F32", (1, 1))],
        ),
        "needs tensors like",
    ),
    "a scale that is no number": (
        with_scale(struct.pack("<f", math.nan)),
        "needs a finite positive scale, found nan",
    ),
    "a scale without end": (with_scale(struct.pack("<f", math.inf)), "finite positive scale, foun"),
    "a scale of zero": (with_scale(bytes(4)), "needs a finite positive scale, found 0.0"),
    "a negative scale": (with_scale(struct.pack("<f", -1)), "finite positive scale, found -1.0"),
    "a scale for each row": (with_scale(bytes(256), shape=(64,)), r"needs \[\] or \[1\]"),
    "other multipliers": (other_constants(5), r"layer_multipliers \[0\] needs \d+, found \d+"),
    "other offsets": (other_constants(6), r"ngram_heads_offsets \[0\] needs 0, found 2"),
    "other sizes": (other_constants(7), r"ngram_heads_vocab_sizes \[0\] needs 11, found 13"),
    "sizes of another seed": (tiny_of(lambda held: held, seed=99), r"layer_multipliers \[0\]"),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables_that_do_not_fit_together(case: str, tmp_path: Path, capsys: Capture) -> None:
    write, message = TABLES[case]
    write(tmp_path)
    assert re.search(message, refusal(capsys, tmp_path))


# --- configs


def config_of(content: bytes) -> Write:
    def write(folder: Path) -> None:
        write_tiny(folder)
        (folder / "config.json").write_bytes(content)

    return write


def changed(**fields: Any) -> Write:
    return config_of(json.dumps({**TINY_CONFIG, **fields}).encode())


def sparse_config(folder: Path) -> None:
    write_tiny(folder)
    os.truncate(folder / "config.json", 1 << 40)


CONFIGS: dict[str, tuple[Write, str]] = {
    "empty": (config_of(b""), "config.json needs a JSON object"),
    "cut off": (config_of(b'{"model_type": "qwen4'), "config.json needs a JSON object"),
    "an LFS pointer": (config_of(POINTER), "config.json needs a JSON object"),
    "a list": (config_of(b"[]"), "config.json needs a JSON object, found list"),
    "noise": (config_of(random.Random(3).randbytes(999)), "config.json needs a JSON object"),
    "a terabyte": (sparse_config, "config.json needs 16000000 bytes at most"),
    "deeper than any stack": (config_of(b'{"a":' * 1_000_000), "found maximum recursion"),
    "a number of a million digits": (
        config_of(b'{"seed":' + b"9" * 1_000_000 + b"}"),
        "found Exceeds the limit",
    ),
    "not a number": (changed(ngram_vocab_size_base=math.nan), "ngram_vocab_size_base needs an int"),
    "a value of a megabyte": (changed(seed="x" * 1_000_000), r"seed needs an .* found xx"),
    "a value of many lines": (changed(model_type="a\nb\x1b[0m"), r"found a\\nb\\x1b\[0m"),
    "layers by the million": (
        changed(ple_layer_ids=list(range(1, 1_500_000))),
        "ple_layer_ids needs a list of integers from 1 to 4096",
    ),
    "primes without end": (
        changed(
            ple_layer_ids=list(range(1, 65)),
            heads_per_ngram=512,
            ple_embed_dim=1024,
            ngram_vocab_size_base=2**40,
        ),
        "ple_layer_ids needs 4096 heads in total at most, found 65536",
    ),
    "the most primes that are allowed": (
        changed(
            ple_layer_ids=list(range(1, 65)),
            heads_per_ngram=32,
            ple_embed_dim=64,
            ngram_vocab_size_base=2**40,
            vocab_size=2**31,
        ),
        "ple_layer_ids 1 needs a table in layer 0",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_nonsense_configs(case: str, tmp_path: Path, capsys: Capture) -> None:
    write, message = CONFIGS[case]
    write(tmp_path)
    assert re.search(message, refusal(capsys, tmp_path))


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


@pytest.mark.parametrize("case", NAMES)
def test_names_and_kinds_of_file(case: str, tmp_path: Path, capsys: Capture) -> None:
    write, message = NAMES[case]
    write(tmp_path)
    assert re.search(message, refusal(capsys, tmp_path))


def test_an_index_without_a_size_is_an_empty_one(tmp_path: Path, capsys: Capture) -> None:
    # reading it to its end would take hours
    linked(INDEX, "/proc/self/pagemap")(tmp_path)
    assert main(["inspect", os.fspath(tmp_path)]) == 0
    assert "layers.1.ple" in capsys.readouterr().out


def test_a_link_out_of_the_folder_is_followed(tmp_path: Path, capsys: Capture) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write_tiny(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../blobs/{path.name}")
    write_index(snapshot, {f"{NAME}.shard_0.weight": FILE})
    assert main(["inspect", os.fspath(snapshot)]) == 0
    assert "layers.1.ple" in capsys.readouterr().out


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("drops root to see what an ordinary user sees")
    write_tiny(tmp_path)
    (tmp_path / FILE).chmod(0)
    for folder in (tmp_path, *tmp_path.parents):
        folder.chmod(folder.stat().st_mode | 0o055)
    # once as root: what is imported late may lie where an ordinary user cannot read
    script = (
        "import contextlib, os, sys; from rowstream.cli import main;"
        " contextlib.redirect_stdout(open(os.devnull, 'w')).__enter__();"
        " main(sys.argv[1:]); os.setuid(65534); sys.exit(main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", script, "inspect", os.fspath(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=unmeasured())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"rowstream: error: {tmp_path / FILE}: permission denied\n"


# --- memory, and time on the wall


GREEDY: dict[str, Write] = {
    "a header that is a hole": HEADERS["a header that is a hole"][0],
    "a hole behind a name": HEADERS["a hole behind a name"][0],
    "a header of brackets": lambda folder: write_header(
        folder / FILE, b'{".ple_embedding.":[' + b"[]," * 2_000_000 + b"1]}"
    ),
    "a config of brackets": config_of(b'{"a":[' + b"[]," * 2_000_000 + b"1]}"),
    "a config of a terabyte": CONFIGS["a terabyte"][0],
    "a config that never ends": NAMES["a config that never ends"][0],
    "a config without a size": NAMES["a config without a size"][0],
    "an index of a terabyte": NAMES["an index of a terabyte"][0],
    "a row no reader can hold": TABLES["a row no reader can hold"][0],
    "the most primes": CONFIGS["the most primes that are allowed"][0],
}

# the interpreter with NumPy takes a good part of these
INSPECT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from rowstream.cli import main
sys.exit(main(["inspect", sys.argv[1]]))
"""


@pytest.mark.parametrize("case", GREEDY)
def test_in_a_gibibyte_of_memory(case: str, tmp_path: Path) -> None:
    GREEDY[case](tmp_path)
    argv = [sys.executable, "-c", INSPECT, os.fspath(tmp_path)]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=120, env=unmeasured()
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("rowstream: error: ")
    assert done.stderr.count("\n") == 1
    assert "MemoryError" not in done.stderr


def test_the_widest_row_that_is_allowed_opens_in_bounded_memory(tmp_path: Path) -> None:
    row = np.arange(65536, dtype="<f4")
    write_file(tmp_path / FILE, [Array(f"{NAME}.weight", "F32", (1, 65536), row.tobytes())])
    with RowStore.open(tmp_path, backend="disk") as store:
        assert np.array_equal(store.values(store.gather([0]))[0], row)
        assert store.stats()["memory_bytes"] < 64 << 20


def test_a_table_of_a_petabyte_is_refused_where_offsets_do_not_fit(tmp_path: Path) -> None:
    # a sparse file of that size is possible on xfs, btrfs and tmpfs
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    path = folder / f"rowstream-{os.getpid()}.safetensors"
    try:
        try:
            write_file(path, [Array(f"{NAME}.weight", "BF16", (2**42, 64))])
        except OSError:
            pytest.skip("no file system for so large a file")
        with pytest.raises(ManifestError, match=f"end needs {2**48} at most"):
            tables(path)
    finally:
        path.unlink(missing_ok=True)


# --- files that change


@pytest.mark.parametrize("backend", ["disk", "mmap", "pinned"])
def test_a_file_that_changed_between_header_and_opening(backend: str, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (manifest,) = tables(tmp_path)
    os.utime(tmp_path / FILE, ns=(1, 1))
    with pytest.raises(ManifestError, match=f"^{FILE}: identity needs"):
        RowStore(manifest, backend=backend)
    (manifest,) = tables(tmp_path)
    os.truncate(tmp_path / FILE, (tmp_path / FILE).stat().st_size - 1)
    with pytest.raises((ManifestError, ValueError), match=FILE):
        RowStore(manifest, backend=backend)


@pytest.mark.parametrize("backend", ["disk", "mmap"])
def test_a_file_that_changes_after_opening(backend: str, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    with RowStore.open(tmp_path, backend=backend) as store:
        store.gather([1])
        os.utime(tmp_path / FILE, ns=(1, 1))
        time.sleep(PAUSE_S)
        with pytest.raises(ReadError, match="file changed since it was opened"):
            store.gather([1])


# --- the fuzzer's harness, so that it does not rot where atheris is not installed


def test_seeds_of_the_fuzzer_and_some_thousand_changes(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "work").mkdir()
    seeds = fuzz_checkpoint.seeds(tmp_path / "scratch")
    rng = random.Random(os.urandom(8))

    def bend(data: bytes, max_size: int) -> bytes:
        bent = bytearray(data or b"x")
        for _ in range(rng.randint(1, 4)):
            word = rng.choice(fuzz_checkpoint.WORDS).encode()
            at = rng.randrange(len(bent))
            bent[at : at + rng.choice([0, 0, 1, len(word)])] = word
        return bytes(bent[:max_size])

    ended: dict[str, int] = {}
    for _ in range(600):
        data = rng.choice(seeds)
        for _ in range(rng.randint(0, 2)):
            data = fuzz_checkpoint.mutate(data, 8192, rng.getrandbits(32), bend)
        try:
            fuzz_checkpoint.unpack(data, tmp_path / "work")
            how = fuzz_checkpoint.check(tmp_path / "work")
        except Exception as error:
            pytest.fail(f"{error!r} of {data!r}")
        ended[how] = ended.get(how, 0) + 1
    assert ended["tables"] > 20
    assert ended["ManifestError"] > 20
