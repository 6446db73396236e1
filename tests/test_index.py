"""Which files an index names for the keys that are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import INDEX, write_index
from rowstream.catalog import tables
from rowstream.errors import ManifestError
from rowstream.formats import index
from rowstream.formats.index import indexed_files

MARKER = b".ple_embedding."


def _write_raw_index(folder: Path, text: bytes) -> None:
    (folder / INDEX).write_bytes(text)


def test_files_of_marked_keys_are_taken_from_the_index(tmp_path: Path) -> None:
    assert indexed_files(tmp_path, MARKER) == []
    write_index(
        tmp_path,
        {
            "x.ple_embedding.a": "2.safetensors",
            "x.ple_embedding.b": "1.safetensors",
            "x.ple_embedding.c": "2.safetensors",
            "x.other.d": "3.safetensors",
        },
    )
    assert indexed_files(tmp_path, MARKER) == ["1.safetensors", "2.safetensors"]


@pytest.mark.parametrize("chunk_bytes", [7, 50, 64, 1000, 4096, 5000])
def test_entries_over_the_edge_of_a_chunk_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    files = {f"{'x' * (key % 7)}.ple_embedding.{key}": f"{key}.safetensors" for key in range(150)}
    files.update({f"{'y' * 97}.other.{key}": "other.safetensors" for key in range(20)})
    write_index(tmp_path, dict(sorted(files.items())))
    monkeypatch.setattr(index, "_CHUNK_BYTES", chunk_bytes)
    assert indexed_files(tmp_path, MARKER) == sorted(f"{key}.safetensors" for key in range(150))


@pytest.mark.parametrize("before", range((1 << 20) - 80, (1 << 20) + 8, 3))
def test_an_entry_at_the_edge_of_the_real_chunk_is_found(tmp_path: Path, before: int) -> None:
    entry = b'"a.ple_embedding.b":"c.safetensors"'
    _write_raw_index(tmp_path, b'{"weight_map":{' + b" " * before + entry + b"}}")
    assert indexed_files(tmp_path, MARKER) == ["c.safetensors"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (b'{"a.ple_embedding.b" : "c"}', ["c"]),
        (b'{"a.ple_embedding.b"\n\t:\r\n"c"}', ["c"]),
        (b'{"a.ple_embedding.b":"\\u0063"}', ["c"]),
        (b'{"a":"c.ple_embedding.d"}', []),
        (b'{"note":"a.ple_embedding.b","x":"y"}', []),
        (b'{"a.ple_embedding.b":["c"]}', []),
        (b'{"a.ple_embedding.b":"c', []),
        (b'{"a.ple_embedding.b":"\\q"}', []),
        (b'{"a.ple_embedding.b":"\xff"}', []),
        (b".ple_embedding.", []),
        (b'"' + b"x" * 10_000 + b'.ple_embedding.":"c"', []),
        (b'".ple_embedding.":"' + b"c" * 10_000 + b'"', []),
        (b"", []),
    ],
)
def test_only_a_key_with_its_file_counts(tmp_path: Path, text: bytes, names: list[str]) -> None:
    _write_raw_index(tmp_path, text)
    assert indexed_files(tmp_path, MARKER) == names


@pytest.mark.parametrize(
    "name", ["../c", "/c", "a/c", "a\\\\c", "..", ".", "", "\\u0000", "\\ud800", "a\\nb"]
)
def test_file_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    _write_raw_index(tmp_path, b'{"a.ple_embedding.b":"' + name.encode() + b'"}')
    with pytest.raises(ManifestError, match="needs a file of the same folder") as caught:
        tables(tmp_path)
    assert caught.value.file == INDEX
