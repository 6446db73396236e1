"""What a server needs of a language model: token ids in, chunks of text out.

Knows no HTTP and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from rowstream.errors import UnavailableError

if TYPE_CHECKING:
    from rowstream.runtime.generation import Generation

FinishReason = Literal["stop", "length"]


class QueueFullError(UnavailableError):
    """Say that the engine has as many requests waiting as it accepts."""


class PromptError(ValueError):
    """Say that the tokenizer or its chat template refuses a prompt."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop; None leaves the choice to the engine's defaults.

    `temperature` 0 takes the most likely token. `max_tokens` None goes on to the context's end.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as token ids, and how to continue it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer: whole characters, and the tokens generated since the chunk before.

    The tokens may be ahead of the text, which waits for the rest of a character or a stop string.
    The last chunk, and no other, has a finish reason.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt and of the answer; an end-of-sequence token counts."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Engine(Protocol):
    """A loaded model that answers requests on its own threads. Any thread may call any method."""

    @property
    def name(self) -> str:
        """Name the model, as clients ask for it."""

    @property
    def context_tokens(self) -> int:
        """Count the tokens that a prompt and its answer may have together."""

    @property
    def vocab_size(self) -> int:
        """Bound the token ids of a prompt from above."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Turn text into token ids. Raises PromptError."""

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Turn a conversation into the ids of a prompt for its next turn. Raises PromptError."""

    def submit(self, requests: Sequence[Request]) -> list[Generation]:
        """Queue requests, all or none, and return at once.

        Raises QueueFullError, and UnavailableError once the engine is closed.
        """

    def stats(self) -> Mapping[str, object]:
        """Return what `/health` shows, as JSON values, without waiting for the model.

        `tables` is a list with the counters of each table; `closed` says that `close` was called.
        """

    def close(self) -> None:
        """End what runs and what waits, then the engine's threads. May be called twice."""
