"""Safetensors files that are refused for their header."""

from __future__ import annotations

from pathlib import Path

from broken_checkpoints import extent, header, junk
from checkpoints import FILE, root, write_tiny
from provocations import met
from rowstream import ManifestError
from rowstream.formats.safetensors import read_header

met(
    "<file> needs tensors, found a Git LFS pointer",
    ManifestError,
    junk(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
)
met("<file> needs at least 8 bytes, found <n>", ManifestError, junk(b"junk"))
met(
    "<file>: header needs <n> bytes, file has <n> after its length and the limit is 100000000",
    ManifestError,
    junk(b"\xff" * 8 + b"{}"),
)
met(
    "<file> needs a header that starts with {, found none",
    ManifestError,
    header(b" " + root().encode() + b"."),
)
entry = b'"%s.ngram_embedding.weight": {}' % root().encode()
met(
    "<file> needs each key once, found <key> twice",
    ManifestError,
    header(b"{%s, %s}" % (entry, entry)),
)
met(
    "<file> needs finite numbers, found <literal>",
    ManifestError,
    header(b'{"%s.x": NaN}' % root().encode()),
)
met(
    "<file>: __metadata__ needs an object of strings, found <value>",
    ManifestError,
    header({"__metadata__": [1]}),
)
met(
    "<file>: <tensor> entry needs an object, found <value>",
    ManifestError,
    header({"shard_0.weight": 5}),
)
met(
    "<file>: <tensor> dtype needs a string, found <value>",
    ManifestError,
    header({"shard_0.weight": {"dtype": 5}}),
)
met(
    "<file>: <tensor> shape needs a list of sizes, found <value>",
    ManifestError,
    header({"shard_0.weight": {"shape": [-1, 6]}}),
)
met(
    "<file>: <tensor> data_offsets needs a begin and an end, found <value>",
    ManifestError,
    header({"shard_0.weight": {"data_offsets": [9, 4]}}),
)
met(
    "<file>: <tensor> needs <n> bytes at <offset>, file has <n>",
    ManifestError,
    header({}, data=b"\0" * 300),
    extent(offset=1 << 40),
)
met(
    "<file>: <tensor> <dtype> <shape> needs <n> bytes, found <n>",
    ManifestError,
    header({"shard_0.weight": {"shape": [63, 6]}}),
)
met(
    "<file>: <tensor> data needs to start at <offset> or later, found <offset>",
    ManifestError,
    header({"weight_scale": {"data_offsets": [2, 6]}}),
)
met("<file> needs <n> bytes, found <n>", ManifestError, header({}, data=b"\0" * 400))


def rewritten(folder: Path) -> object:
    write_tiny(folder)
    tensor = read_header(folder / FILE).tensors()[0]
    with open(folder / FILE, "ab") as file:
        file.write(b"more")
    return tensor.read()


met(
    "<file>: <tensor> file needs as its header was read, found changed since",
    ManifestError,
    rewritten,
)
