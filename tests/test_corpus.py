"""The benchmarks' text: dictionaries cut into documents, and what is missing named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import text


@pytest.mark.parametrize("size", [1, 40, 200, 10_000])
def test_a_dictionary_is_cut_between_entries(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_DICTIONARY_PART_BYTES", size)
    whole = "".join(f"word {n}\n\n   1. meaning\n   of {n}\n\n" for n in range(50))
    parts = list(text._parts("d", whole.encode()))
    assert "".join(part for _, part in parts) == whole
    assert all(part.startswith("word ") for _, part in parts)
    assert [name for name, _ in parts] == [f"d/{n:04d}" for n in range(len(parts))]
    # no part goes on beyond the end of the entry in which its size is reached
    longest = max(len(part) for _, part in parts)
    assert longest <= size + 2 * len(whole) // 50


def test_an_end_within_an_entry_ends_the_last_part() -> None:
    whole = b"word\n   meaning of the wo"
    assert list(text._parts("d", whole)) == [("d/0000", whole.decode())]


def test_a_missing_tokenizer_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_BUILD", tmp_path)
    with pytest.raises(text.CorpusMissing, match="pip download --no-deps"):
        text._tokenizer_file()
