"""Coverage-guided fuzzing of all that is read before a row is: config, index, headers, constants.

An input is a small checkpoint folder in one string. Either its tables are described and lie in
their files, or ManifestError or OSError says in one line why not; in bounded time and memory.
Needs atheris: `make fuzz`, or `python tests/fuzz/fuzz_checkpoint.py --seconds 60`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, os.fspath(Path(__file__).resolve().parent.parent))

import checkpoints

# the parts of an input, in this order; an empty one is a file that is not there
SEPARATOR = b"\n\x1e\n"
PARTS = ("config.json", "model.safetensors.index.json", "a.safetensors", "b.safetensors")
RAW = b"raw:"  # before a part that is the whole file, length and all
DATA = b"\n\x1f\n"  # between a header and its data: the size of a hole, "|", the bytes before it

CPU_S = 2
MEMORY_BYTES = 4 << 30  # of addresses: the fuzzer's own tables are in it
RSS_MIB = 1024
HOLE_BYTES_MAX = 1 << 50
MESSAGE_CHARACTERS_MAX = 2000

WORDS = [
    *('"dtype"', '"shape"', '"data_offsets"', '"__metadata__"', '"F8_E4M3"', '"BF16"', '"F32"'),
    *('"I64"', '"F16"', '"U8"', "shard_0", "shards.1", ".weight", "weight_scale", "layers.1.ple"),
    *(".ple_embedding.", "ngram_embedding", "layer_multipliers", "ngram_heads_vocab_sizes"),
    *("ngram_heads_offsets", '"weight_map"', "a.safetensors", "../a", "/etc/passwd", "\\u0000"),
    *("NaN", "Infinity", "1e999", "-1", "9223372036854775807", "18446744073709551616", "null"),
    *("true", "[[[[", '{"a":', '"\\ud800"', "version https://git-lfs", '"text_config"'),
    *('"model_type"', '"qwen4_exp_text"', '"ple_layer_ids"', '"ple_embed_dim"', '"seed"'),
    *('"ngram_size"', '"heads_per_ngram"', '"vocab_size"', '"ngram_vocab_size_base"'),
    *('"make_ngram_vocab_size_divisible_by"', '"eos_token_id"', '"hidden_size"', "1099511627776"),
    *(SEPARATOR.decode(), DATA.decode(), RAW.decode()),
]

VALUES: list[Any] = [None, True, -1, 0, 1, 2, 7, 8, 64, 2**31, 2**40, 2**48, 2**62, 2**63, 2**64]
VALUES += [10**30, 0.5, 1e308, float("nan"), float("inf"), "", "x", "F8_E4M3", "BF16", "\ud800"]
VALUES += ["../x", "a/b", "\x00", "a.safetensors", [], {}, [0, 0], [1], [2**40], [2**62] * 4, [-1]]
VALUES += [[[]], list(range(1, 65)), {"dtype": "U8"}, {"dtype": "U8", "shape": [], "a": [0, 1]}]


def unpack(data: bytes, folder: Path, written: dict[str, bytes] | None = None) -> None:
    """Write the checkpoint that an input stands for; what another input left is removed.

    `written` is what earlier calls left in the folder: parts that are the same stay.
    """
    parts = data.split(SEPARATOR, len(PARTS))
    for name, part in zip(PARTS, [*parts, *[b""] * len(PARTS)], strict=False):
        if written is not None:
            if written.get(name) == part:
                continue
            written[name] = part
        path = folder / name
        if not part:
            path.unlink(missing_ok=True)
        elif not name.endswith(".safetensors"):
            path.write_bytes(part)
        elif part.startswith(RAW):
            path.write_bytes(part[len(RAW) :])
        else:
            header, _, rest = part.partition(DATA)
            size, _, body = rest.partition(b"|")
            hole = min(int(size), HOLE_BYTES_MAX) if size.isdigit() and len(size) < 20 else 0
            content = struct.pack("<Q", len(header)) + header + body
            path.write_bytes(content)
            if hole:
                # ext4 ends at 2^44 bytes: there the file stays as short as it is
                with contextlib.suppress(OSError):
                    os.truncate(path, len(content) + hole)


def pack(folder: Path) -> bytes:
    """Return the input that stands for a checkpoint folder."""
    parts = []
    for name in PARTS:
        path = folder / name
        content = path.read_bytes() if path.exists() else b""
        if content and name.endswith(".safetensors"):
            base = 8 + struct.unpack("<Q", content[:8])[0]
            body = content[base:].rstrip(b"\0")
            hole = len(content) - base - len(body)
            content = content[8:base] + DATA + f"{hole}|".encode() + body
            assert content.count(DATA) == 1
        assert SEPARATOR not in content
        parts.append(content)
    return SEPARATOR.join(parts)


def seeds(folder: Path) -> list[bytes]:
    """Return sound checkpoints of every kind there is, and some broken ones."""

    def clear() -> None:
        for path in folder.iterdir():
            path.unlink()

    def one(*arrays: checkpoints.Array, **config: Any) -> bytes:
        clear()
        if config or not arrays:
            checkpoints.write_config(folder, **config)
        checkpoints.write_file(folder / "a.safetensors", arrays)
        return pack(folder)

    def table(counts: list[int], **how: Any) -> list[checkpoints.Array]:
        # rows as holes: an input stays small
        row_bytes = 6 * checkpoints.ITEM_BYTES[how.get("dtype", "F8_E4M3")]
        rows = checkpoints.table_bytes(sum(counts), row_bytes)
        return [a._replace(data=None) for a in checkpoints.shards(rows, counts, **how)]

    scale, buffers = checkpoints.scale(), checkpoints.hash_buffers()
    fused = checkpoints.Array(f"{checkpoints.root()}.ngram_embedding.weight", "BF16", (64, 6))
    second = [checkpoints.scale(5), *table([60, 60], layer=5)]
    found = [
        one(scale, *buffers, *table([16] * 4), seed=1234),
        one(scale, *table([22, 22, 20], style="shards.{}"), seed=1234),
        one(*table([64], dtype="F32")),
        one(fused, ple_embed_dim=None, eos_token_id=[7, 8]),
        one(fused, *buffers),
        one(scale, *table([64]), model_type="qwen4_exp", text_config=checkpoints.TINY_CONFIG),
        one(scale, *table([64]), *second, ple_layer_ids=[2, 6]),
        one(),
    ]
    clear()
    checkpoints.write_config(folder)
    halves = [[scale, *table([16] * 4)[:2]], [*buffers, *table([16] * 4)[2:]]]
    for name, arrays in zip(PARTS[2:], halves, strict=True):
        checkpoints.write_file(folder / name, arrays)
    files = {array.name: PARTS[2 + half] for half in (0, 1) for array in halves[half]}
    checkpoints.write_index(folder, files)
    found.append(pack(folder))
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for raw in (pointer, b"\xff" * 16, struct.pack("<Q", 100_000_000), b""):
        found.append(SEPARATOR.join([b"", b"", RAW + raw]))
    return found


def mutate(data: bytes, max_size: int, seed: int, fallback: Callable[[bytes, int], bytes]) -> bytes:
    """Change a value or a key in one of the JSON parts, or, as often, any bytes at all."""
    rng = random.Random(seed)
    parts = data.split(SEPARATOR)
    which = rng.randrange(len(parts))
    text, mark, rest = parts[which].partition(DATA)
    try:
        document = json.loads(text) if rng.random() < 0.5 else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not document:
        return fallback(data, max_size)
    for _ in range(rng.randint(1, 3)):
        if document:
            _change(document, rng)
    try:
        parts[which] = json.dumps(document, separators=(",", ":")).encode() + mark + rest
    except (RecursionError, ValueError):
        return fallback(data, max_size)
    return SEPARATOR.join(parts)[:max_size]


def _change(document: dict[str, Any], rng: random.Random) -> None:
    node: Any = document
    while True:
        keys: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = rng.choice(keys)
        if not (isinstance(node[key], (dict, list)) and node[key]) or rng.random() < 0.3:
            break
        node = node[key]
    kind = rng.randrange(6)
    if kind == 0:
        del node[key]
    elif kind == 1 and type(node[key]) is int:
        node[key] += rng.choice([-64, -8, -1, 1, 8, 64, 2**32])
    elif kind == 2 and isinstance(node, dict):
        node[str(rng.choice(keys)).replace("1", "2", rng.randint(0, 1)) + "0"] = node[key]
    elif kind == 3 and isinstance(node, dict) and isinstance(key, str):
        node[key.replace(str(rng.randint(0, 3)), str(rng.randint(0, 3)))] = node.pop(key)
    elif kind == 4:
        node[key] = node[rng.choice(keys)]
        # one object in two places would grow without end
        document.update(json.loads(json.dumps(document)))
    else:
        node[key] = json.loads(json.dumps(rng.choice(VALUES)))


def check(folder: Path) -> str:
    """Describe the folder's tables and check the property; return how it ended."""
    from rowstream.catalog import tables
    from rowstream.errors import ManifestError

    began = time.process_time()
    try:
        found = tables(folder)
    except (ManifestError, OSError) as error:
        text = str(error)
        assert text.isprintable(), "message of several lines"
        assert 0 < len(text) <= MESSAGE_CHARACTERS_MAX, "message without end"
        ended = type(error).__name__
    else:
        assert found, "no table and no error"
        for manifest in found:
            for plane in manifest.planes:
                row = 0
                for extent in plane.extents:
                    size = os.stat(manifest.files[extent.file].path).st_size
                    end = extent.offset + extent.num_rows * plane.row_bytes
                    assert 8 < extent.offset < end <= size, "rows outside their file"
                    assert extent.first_row == row, "rows twice or not at all"
                    row += extent.num_rows
                assert row == manifest.num_rows
                assert 0 < plane.row_bytes <= 1 << 20, "a row that no buffer should hold"
            assert manifest.hash is None or manifest.hash.num_rows <= manifest.num_rows
        ended = "tables"
    assert time.process_time() - began < CPU_S, "too slow"
    return ended


def fuzz(folder: Path, arguments: list[str]) -> None:
    """Run the fuzzer in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=["rowstream"]):
        import rowstream.catalog  # noqa: F401
        from rowstream.families import ple_config
    # most of the time of most inputs, and the same for most of them
    names = vars(ple_config)
    names["layer_constants"] = functools.lru_cache(10_000)(names["layer_constants"])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    work = folder / "checkpoint"
    work.mkdir()

    written: dict[str, bytes] = {}

    def one_input(data: bytes) -> None:
        unpack(data, work, written)
        check(work)

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        return mutate(data, max_size, seed, atheris.Mutate)

    atheris.Setup([sys.argv[0], *arguments], one_input, custom_mutator=mutator)
    atheris.Fuzz()


def main() -> int:
    """Prepare seeds and dictionary, and fuzz in a child process; its exit status is ours."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=0, help="how long (default: -runs decides)")
    parser.add_argument("--corpus", type=Path, help="folder of inputs, kept and added to")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.child:
        fuzz(args.child, rest)
        return 0
    # in memory where possible: every input is up to four files
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        folder = Path(name)
        (folder / "seeds").mkdir()
        (folder / "scratch").mkdir()
        for number, seed in enumerate(seeds(folder / "scratch")):
            (folder / "seeds" / str(number)).write_bytes(seed)
        (folder / "words").write_text("".join(f'"{_escaped(word)}"\n' for word in WORDS))
        corpus = args.corpus or folder / "corpus"
        corpus.mkdir(exist_ok=True)
        options = [f"-dict={folder / 'words'}", f"-rss_limit_mb={RSS_MIB}", "-timeout=30"]
        options += ["-max_len=8192", "-print_final_stats=1"]
        options += [f"-max_total_time={args.seconds}"] if args.seconds else []
        command = [sys.executable, __file__, "--child", name, *options, *rest]
        return subprocess.run([*command, corpus, folder / "seeds"], check=False).returncode


def _escaped(word: str) -> str:
    return "".join(
        character if character.isalnum() or character in "._/" else f"\\x{ord(character):02x}"
        for character in word
    )


if __name__ == "__main__":
    raise SystemExit(main())
