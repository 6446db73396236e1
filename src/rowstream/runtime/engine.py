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


class EngineClosedError(UnavailableError):
    """Say that the engine ends, or has ended, and takes no more requests."""


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
    `logprobs` asks for the probability of each token and for that many of the likeliest in its
    place; None asks for nothing.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as token ids, and how to continue it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that can come at one place: its bytes and the logarithm of its probability."""

    token_id: int
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token of an answer, and the likeliest ones in its place, the most likely first.

    The probabilities are the model's own, before penalties, temperature, top_k and top_p.
    `text_offset` counts the characters of the answer before the one that the token begins in or
    goes on with.
    """

    chosen: Candidate
    top: tuple[Candidate, ...]
    text_offset: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer: whole characters, and the tokens generated since the chunk before.

    The tokens may be ahead of the text, which waits for the rest of a character or a stop string.
    `logprobs`, where asked for, keep step with the text: together they name the tokens that the
    text is made of, so neither the end token nor what a stop string cut off. The last chunk, and
    no other, has a finish reason.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


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

        Raises QueueFullError, and EngineClosedError once the engine drains or is closed.
        """

    def stats(self) -> Mapping[str, object]:
        """Return what `/health` shows, as JSON values, without waiting for the model.

        `running` and `waiting` count requests; `tables` is a list with the counters of each table;
        `draining` and `closed` say that `drain` and `close` were called.
        """

    def drain(self) -> None:
        """Take no more requests and end those that wait, with EngineClosedError; return at once.

        What has begun goes on, with all requests that were submitted together with it.
        """

    def close(self) -> None:
        """End what runs and what waits, then the engine's threads. May be called twice."""
