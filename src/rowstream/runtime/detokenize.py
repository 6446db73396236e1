"""Text from tokens, one at a time: whole characters only, and never a part of a stop string.

Owns the few tokens and characters that must be held back; knows the tokenizer as one `decode`
function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
# bytes of a character that still lacks one, which a decoder may show as so many replacements
_MAX_PARTIAL = 3
_WINDOW_TOKENS = 32
_CONTEXT_TOKENS = 8


class Detokenizer:
    """Turn tokens into text so that the pieces join to `decode` of all tokens.

    Only a short window of tokens is decoded for each new one, so the work is linear in tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that are out already

    def push(self, token: int) -> str:
        """Add a token and return the text that no later token can change."""
        self._window.append(token)
        text = self._decode(self._window)
        safe = len(text)
        while safe > max(self._given, len(text) - _MAX_PARTIAL) and text[safe - 1] == _REPLACEMENT:
            safe -= 1
        piece = text[self._given : safe]
        self._given = max(self._given, safe)
        if len(self._window) >= _WINDOW_TOKENS:
            self._shorten(text)
        return piece

    def flush(self) -> str:
        """Return what was held back, once no token follows."""
        piece = self._decode(self._window)[self._given :] if self._window else ""
        self._window, self._given = [], 0
        return piece

    def _shorten(self, text: str) -> None:
        # a few tokens stay as context: some decoders treat the first token of a text specially
        window = self._window[-_CONTEXT_TOKENS:]
        shorter = self._decode(window)
        held = text[self._given :]
        if shorter.endswith(held):
            self._window, self._given = window, len(shorter) - len(held)


class StopMatcher:
    """Find the first stop string in a stream of text pieces, the same however the text is cut.

    First is the one that is complete first; of several complete at once, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Add a piece and return what is certain not to belong to a stop string."""
        if self.stopped:
            return ""
        text = self._held + piece
        matches = [
            (at + len(stop), at) for stop in self._stops if stop and (at := text.find(stop)) >= 0
        ]
        if matches:
            self.stopped = True
            self._held = ""
            return text[: min(matches)[1]]
        keep = self._prefix_at_end(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text held back, once no piece follows."""
        text, self._held = self._held, ""
        return text

    def _prefix_at_end(self, text: str) -> int:
        longest = max(map(len, self._stops), default=0)
        for size in range(min(len(text), longest - 1), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


class TextStream:
    """Join both: tokens in, text out, until a stop string is complete."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(decode)
        self._matcher = StopMatcher(stops)
        # characters of the text so far, with those that wait for a stop string
        self.decoded_chars = 0

    @property
    def stopped(self) -> bool:
        return self._matcher.stopped

    def push(self, token: int) -> str:
        """Add a token and return the text that may go out."""
        piece = self._detokenizer.push(token)
        self.decoded_chars += len(piece)
        return self._matcher.push(piece)

    def flush(self) -> str:
        """Return the rest of the text; it may still complete a stop string."""
        return self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()
