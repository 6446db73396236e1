"""Text from tokens: pieces join to the whole, characters stay whole, stop strings never leak."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rowstream.runtime.detokenize import Detokenizer, StopMatcher, TextStream


class Bytes:
    """A byte-level tokenizer whose token ids index a list of byte strings."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = list(tokens)
        self.decoded = 0

    @property
    def ids(self) -> range:
        return range(len(self.tokens))

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return b"".join(self.tokens[i] for i in ids).decode("utf-8", errors="replace")


def cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


sizes = st.lists(st.integers(0, 5), max_size=120)


@given(st.text(max_size=120), sizes)
@example("a\ufffdb\ufffd", [1, 1, 1, 1, 1, 1, 1])
@example("\U0001f600" * 40, [1] * 120)
def test_pieces_are_prefixes_of_the_text_and_join_to_it(text: str, sizes: list[int]) -> None:
    tokens = Bytes(cut(text.encode(), sizes))
    detokenizer = Detokenizer(tokens.decode)
    out = ""
    for token in tokens.ids:
        out += detokenizer.push(token)
        assert text.startswith(out)  # half a character would show as a replacement
    assert out + detokenizer.flush() == text


@given(st.binary(max_size=150), sizes)
@example(b"\xff" * 150, [1] * 120)
@example(b"\xe2\x82" * 75, [1] * 120)
@example(b"\xf0\x9f\x98\x80\xf0\x9f\x98" * 20, [1] * 120)
def test_pieces_of_invalid_bytes_join_to_their_decoding(data: bytes, sizes: list[int]) -> None:
    tokens = Bytes(cut(data, sizes))
    detokenizer = Detokenizer(tokens.decode)
    pieces = [detokenizer.push(token) for token in tokens.ids]
    assert "".join(pieces) + detokenizer.flush() == data.decode("utf-8", errors="replace")


def test_a_character_waits_for_its_last_byte_and_no_longer() -> None:
    tokens = Bytes([b"a", b"\xe2", b"\x82", b"\xac", b"b"])
    detokenizer = Detokenizer(tokens.decode)
    assert [detokenizer.push(token) for token in tokens.ids] == ["a", "", "", "€", "b"]


def test_the_first_token_alone_loses_its_space() -> None:
    # as decoders made for sentencepiece do it
    words = ["▁one", "▁two", "▁three"] * 40

    def decode(ids: Sequence[int]) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    detokenizer = Detokenizer(decode)
    out = "".join(detokenizer.push(i) for i in range(len(words))) + detokenizer.flush()
    assert out == " ".join(["one", "two", "three"] * 40)


@pytest.mark.parametrize("byte", [b"a", b"\xff"])
def test_work_is_linear_in_tokens(byte: bytes) -> None:
    tokens = Bytes([byte] * 2000)
    detokenizer = Detokenizer(tokens.decode)
    for token in tokens.ids:
        detokenizer.push(token)
    assert tokens.decoded < 40 * len(tokens.tokens)


def stop_oracle(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Look for a stop string at the end of the text so far, character by character."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))], True
    return text, False


few_letters = st.text("ab€", max_size=24)


@given(
    few_letters,
    st.lists(st.text("ab€", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, 4), max_size=24),
)
@example("xabcdy", ["abcd", "c"], [6])
@example("aab", ["ab"], [1, 1, 1])
def test_stop_strings_do_not_depend_on_the_pieces(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    matcher = StopMatcher(stops)
    expected, stopped = stop_oracle(text, stops)
    out, rest = "", text
    for size in [*sizes, len(text)]:
        out += matcher.push(rest[:size])
        rest = rest[size:]
        assert expected.startswith(out)  # nothing of a stop string leaks, not even for a while
    assert (out + matcher.flush(), matcher.stopped) == (expected, stopped)


def test_only_a_possible_prefix_is_held_back() -> None:
    matcher = StopMatcher(["</end>"])
    assert [matcher.push(p) for p in ("text", " <", "/en", "x", "<", "/end>", "more")] == [
        "text",
        " ",
        "",
        "</enx",
        "",
        "",
        "",
    ]
    assert matcher.stopped


def test_a_stop_string_across_tokens_and_characters() -> None:
    tokens = Bytes([b"so ", b"\xe2\x82", b"\xac.", b"."])
    stream = TextStream(tokens.decode, ["€.."])
    assert [stream.push(token) for token in tokens.ids] == ["so ", "", "", ""]
    assert stream.stopped
    assert stream.flush() == ""


def test_the_end_gives_out_what_was_held() -> None:
    tokens = Bytes([b"a#", b"\xe2\x82"])
    stream = TextStream(tokens.decode, ["##"])
    assert [stream.push(token) for token in tokens.ids] == ["a", ""]
    assert stream.flush() == "#\ufffd"


def test_the_end_can_complete_a_stop_string() -> None:
    tokens = Bytes([b"a", b"\xe2\x82"])
    stream = TextStream(tokens.decode, ["\ufffd"])
    assert [stream.push(token) for token in tokens.ids] == ["a", ""]
    assert stream.flush() == ""
    assert stream.stopped
