"""The text that caches are measured with, as tokens: documentation, dictionaries and sources.

Debian's python3-doc, dict-foldoc and dict-wn (installed, or their .deb files unpacked below
build/bench/text), and the standard library of the Python that runs this. The tokenizer is
qwen.tiktoken from the wheel of dashscope, through tiktoken. What is made is kept, by content, in
build/bench/text or the folder that BENCH_TEXT names; where text or tokenizer are missing, tokens
that were kept there are enough.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

__all__ = ["Corpus", "CorpusMissing", "kept_at", "load_corpus"]

_BUILD = Path(__file__).resolve().parents[1] / "build" / "bench"
_TEXT = _BUILD / "text"
_PACKAGES = "python3.11-doc dict-foldoc dict-wn"
_HOW = (
    f"`apt-get install {_PACKAGES}` (as root), or `apt-get download {_PACKAGES}` in {_BUILD}; "
    f"`pip install tiktoken` and `pip download --no-deps -d {_BUILD} dashscope`"
)

# the tokenizer's own way to cut text, as published with Qwen
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DICTIONARY_PART_BYTES = 256 << 10  # a dictionary is cut into documents of about this size
_WORDNET_BYTES = 6 << 20  # of 31 MB: more would outweigh everything else
_NOT_SOURCES = {"test", "tests", "site-packages", "idlelib", "lib2to3", "turtledemo", "ensurepip"}


class CorpusMissing(RuntimeError):
    """Text or tokenizer are not here; the message says how to get them."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents as token ids, in a fixed order that mixes the sources."""

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]  # [documents + 1]
    names: tuple[str, ...]
    digest: str  # of text, order and tokenizer

    def __len__(self) -> int:
        return len(self.names)

    def document(self, index: int) -> NDArray[np.int32]:
        """Return the tokens of one document."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]


def kept_at() -> Path:
    """Return the folder of tokens that were made before."""
    return Path(os.environ.get("BENCH_TEXT") or _TEXT)


def load_corpus() -> Corpus:
    """Return the corpus, made if this text was not seen before. Raises CorpusMissing."""
    try:
        return _made()
    except CorpusMissing:
        kept = sorted(kept_at().glob("tokens-*.npy"), key=lambda path: path.stat().st_mtime)
        if not kept:
            raise
        return _kept(kept[-1].stem.removeprefix("tokens-"))


def _kept(digest: str) -> Corpus:
    tokens, starts = (np.load(kept_at() / f"{part}-{digest}.npy") for part in ("tokens", "starts"))
    names = kept_at() / f"names-{digest}.json"
    return Corpus(tokens, starts, tuple(json.loads(names.read_text(encoding="utf-8"))), digest)


def _made() -> Corpus:
    documents = dict(_documents())
    ranks = _tokenizer_file()
    # order by digest of the name: fixed, and no source stays together
    names = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest())
    whole = hashlib.sha256(ranks + _PATTERN.encode())
    for name in names:
        whole.update(f"{name} {len(documents[name])} ".encode())
        whole.update(documents[name].encode())
    digest = whole.hexdigest()[:12]
    place = kept_at()
    parts = [place / f"tokens-{digest}.npy", place / f"starts-{digest}.npy"]
    if not all(part.exists() for part in parts):
        pieces = _tokenized([documents[name] for name in names], ranks)
        starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
        place.mkdir(parents=True, exist_ok=True)
        np.save(parts[0], np.concatenate(pieces))
        np.save(parts[1], starts.astype(np.int64))
    (place / f"names-{digest}.json").write_text(json.dumps(names), encoding="utf-8")
    return _kept(digest)


def _tokenized(texts: list[str], ranks: bytes) -> list[NDArray[np.int32]]:
    try:
        tiktoken = importlib.import_module("tiktoken")
    except ImportError as failure:
        raise CorpusMissing(f"tiktoken is not installed: {_HOW}") from failure
    lines = (line.split() for line in ranks.splitlines() if line)
    encoding = tiktoken.Encoding(
        "qwen",
        pat_str=_PATTERN,
        mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in lines},
        special_tokens={},
    )
    return [np.array(encoding.encode_ordinary(text), np.int32) for text in texts]


def _tokenizer_file() -> bytes:
    wheels = sorted(_BUILD.glob("**/dashscope-*.whl"))
    if not wheels:
        raise CorpusMissing(f"no wheel of dashscope in {_BUILD}: {_HOW}")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        return wheel.read("dashscope/resources/qwen.tiktoken")


def _documents() -> Iterator[tuple[str, str]]:
    root = _packages_root()
    pages = root / "usr/share/doc/python3.11/html/_sources"
    for path in sorted(pages.rglob("*.txt")):
        yield f"doc/{path.relative_to(pages).as_posix()}", _text(path.read_bytes())
    for name, limit in (("foldoc", None), ("wn", _WORDNET_BYTES)):
        with gzip.open(root / f"usr/share/dictd/{name}.dict.dz") as file:
            yield from _parts(name, file.read()[:limit])
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if not _NOT_SOURCES.intersection(inside.parts):
            yield f"python/{inside.as_posix()}", _text(path.read_bytes())


def _parts(name: str, dictionary: bytes) -> Iterator[tuple[str, str]]:
    begin, number = 0, 0
    while begin < len(dictionary):
        # an entry begins at a line that is not indented
        end = begin + _DICTIONARY_PART_BYTES
        while 0 < (end := dictionary.find(b"\n", end) + 1) < len(dictionary):
            if dictionary[end : end + 1] not in (b" ", b"\n"):
                break
        end = end or len(dictionary)
        yield f"{name}/{number:04d}", _text(dictionary[begin:end])
        begin, number = end, number + 1


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def _packages_root() -> Path:
    parts = (
        "usr/share/doc/python3.11/html/_sources",
        "usr/share/dictd/foldoc.dict.dz",
        "usr/share/dictd/wn.dict.dz",
    )
    unpacked = _TEXT / "root"
    for root in (Path("/"), unpacked):
        if all((root / part).exists() for part in parts):
            return root
    packages = sorted(_BUILD.glob("**/*.deb"))
    for package in packages:
        unpacked.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg", "-x", str(package), str(unpacked)], check=True)
    for part in parts:
        if not (unpacked / part).exists():
            raise CorpusMissing(f"{part} is neither installed nor in a package: {_HOW}")
    return unpacked


def main() -> None:
    corpus = load_corpus()
    print(f"{len(corpus)} documents, {len(corpus.tokens)} tokens, digest {corpus.digest}")
    sizes = np.diff(corpus.starts)
    for source in ("doc", "foldoc", "wn", "python"):
        of = [i for i, name in enumerate(corpus.names) if name.startswith(f"{source}/")]
        print(f"{source:8}{len(of):6} documents{int(sizes[of].sum()):10} tokens")


if __name__ == "__main__":
    main()
