"""What clients get: OpenAI's completion and chat objects, whole and as stream events.

Plain dictionaries; knows no HTTP.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rowstream.runtime.engine import Candidate, Chunk, FinishReason, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class Choice:
    """The complete answer to one prompt."""

    text: str
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Choice:
        """Join the chunks of one generation."""
        return cls(
            "".join(chunk.text for chunk in chunks),
            chunks[-1].finish_reason if chunks else None,
            tuple(token for chunk in chunks for token in chunk.logprobs),
        )


class Answer(Protocol):
    """The two kinds of answer: every method returns JSON-ready objects."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, object]:
        """Return the answer of a call without `stream`."""

    def opening(self, index: int) -> list[dict[str, object]]:
        """Return the events before the first piece of a choice."""

    def piece(self, index: int, chunk: Chunk) -> list[dict[str, object]]:
        """Return the events of one chunk."""

    def closing(self, usage: Usage) -> dict[str, object] | None:
        """Return the event that closes a stream with `include_usage`."""


class _Answer:
    """Fields that all objects of one answer share."""

    prefix: str
    event_kind: str

    def __init__(self, model: str, *, include_usage: bool = False, logprobs: bool = False) -> None:
        self._model = model
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._include_usage = include_usage
        self._logprobs = logprobs

    def closing(self, usage: Usage) -> dict[str, object] | None:
        return self._object(self.event_kind, [], usage) if self._include_usage else None

    def _object(
        self, kind: str, choices: Sequence[object], usage: Usage | None
    ) -> dict[str, object]:
        body: dict[str, object] = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": list(choices),
        }
        if usage is not None:
            body["usage"] = {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.total_tokens,
            }
        elif self._include_usage:
            body["usage"] = None
        return body


class CompletionAnswer(_Answer):
    """Objects of /v1/completions."""

    prefix = "cmpl"
    event_kind = "text_completion"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, object]:
        texts = [
            self._text(
                index,
                choice.text,
                choice.finish_reason,
                _completion_logprobs(choice.logprobs) if self._logprobs else None,
            )
            for index, choice in enumerate(choices)
        ]
        return self._object("text_completion", texts, usage)

    def opening(self, index: int) -> list[dict[str, object]]:
        return []

    def piece(self, index: int, chunk: Chunk) -> list[dict[str, object]]:
        logprobs = _completion_logprobs(chunk.logprobs) if chunk.logprobs else None
        text = self._text(index, chunk.text, chunk.finish_reason, logprobs)
        return [self._object("text_completion", [text], None)]

    def _text(
        self,
        index: int,
        text: str,
        finish_reason: FinishReason | None,
        logprobs: dict[str, object] | None,
    ) -> dict[str, object]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class ChatAnswer(_Answer):
    """Objects of /v1/chat/completions."""

    prefix = "chatcmpl"
    event_kind = "chat.completion.chunk"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, object]:
        turns = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": _chat_logprobs(choice.logprobs) if self._logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return self._object("chat.completion", turns, usage)

    def opening(self, index: int) -> list[dict[str, object]]:
        return [self._event(index, {"role": "assistant", "content": ""}, None)]

    def piece(self, index: int, chunk: Chunk) -> list[dict[str, object]]:
        events = []
        if chunk.text or chunk.logprobs:
            events.append(self._event(index, {"content": chunk.text}, None, chunk.logprobs))
        if chunk.finish_reason is not None:
            events.append(self._event(index, {}, chunk.finish_reason))
        return events

    def _event(
        self,
        index: int,
        delta: dict[str, str],
        finish_reason: FinishReason | None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> dict[str, object]:
        turn = {
            "index": index,
            "delta": delta,
            "logprobs": _chat_logprobs(logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }
        return self._object("chat.completion.chunk", [turn], None)


def _completion_logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, object]:
    return {
        "tokens": [_token_text(token.chosen) for token in tokens],
        "token_logprobs": [token.chosen.logprob for token in tokens],
        "top_logprobs": [_by_text((*token.top, token.chosen)) for token in tokens],
        "text_offset": [token.text_offset for token in tokens],
    }


def _chat_logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, object]:
    content = [
        _scored(token.chosen) | {"top_logprobs": [_scored(candidate) for candidate in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _by_text(candidates: Sequence[Candidate]) -> dict[str, float]:
    found: dict[str, float] = {}
    for candidate in candidates:
        # two tokens can have the same text: the likelier one came first
        found.setdefault(_token_text(candidate), candidate.logprob)
    return found


def _scored(candidate: Candidate) -> dict[str, object]:
    return {
        "token": _token_text(candidate),
        "logprob": candidate.logprob,
        "bytes": list(candidate.data),
    }


def _token_text(candidate: Candidate) -> str:
    """Return a token's text, or as OpenAI's completions do `bytes:\\xe2` for parts of characters.

    Replacement characters would be the same for many tokens.
    """
    try:
        return candidate.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in candidate.data)
