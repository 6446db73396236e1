"""What clients get: OpenAI's completion and chat objects, whole and as stream events.

Plain dictionaries; knows no HTTP.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rowstream.runtime.engine import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class Choice:
    """The complete answer to one prompt."""

    text: str
    finish_reason: FinishReason | None


class Answer(Protocol):
    """The two kinds of answer: every method returns JSON-ready objects."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, object]:
        """Return the answer of a call without `stream`."""

    def opening(self, index: int) -> list[dict[str, object]]:
        """Return the events before the first piece of a choice."""

    def piece(
        self, index: int, text: str, finish_reason: FinishReason | None
    ) -> list[dict[str, object]]:
        """Return the events of one chunk."""

    def usage(self, usage: Usage) -> dict[str, object]:
        """Return the event that closes a stream with `include_usage`."""


class _Answer:
    """Fields that all objects of one answer share."""

    prefix: str

    def __init__(self, model: str, *, include_usage: bool = False) -> None:
        self._model = model
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._include_usage = include_usage

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

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, object]:
        return self._object(
            "text_completion",
            [_text(i, choice.text, choice.finish_reason) for i, choice in enumerate(choices)],
            usage,
        )

    def opening(self, index: int) -> list[dict[str, object]]:
        return []

    def piece(
        self, index: int, text: str, finish_reason: FinishReason | None
    ) -> list[dict[str, object]]:
        return [self._object("text_completion", [_text(index, text, finish_reason)], None)]

    def usage(self, usage: Usage) -> dict[str, object]:
        return self._object("text_completion", [], usage)


class ChatAnswer(_Answer):
    """Objects of /v1/chat/completions."""

    prefix = "chatcmpl"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, object]:
        turns = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return self._object("chat.completion", turns, usage)

    def opening(self, index: int) -> list[dict[str, object]]:
        return [self._event(index, {"role": "assistant", "content": ""}, None)]

    def piece(
        self, index: int, text: str, finish_reason: FinishReason | None
    ) -> list[dict[str, object]]:
        events = [self._event(index, {"content": text}, None)] if text else []
        if finish_reason is not None:
            events.append(self._event(index, {}, finish_reason))
        return events

    def usage(self, usage: Usage) -> dict[str, object]:
        return self._object("chat.completion.chunk", [], usage)

    def _event(
        self, index: int, delta: dict[str, str], finish_reason: FinishReason | None
    ) -> dict[str, object]:
        turn = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._object("chat.completion.chunk", [turn], None)


def _text(index: int, text: str, finish_reason: FinishReason | None) -> dict[str, object]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
