"""An `Engine` without a model: it answers with a script, when it is told to."""

from __future__ import annotations

from collections.abc import Sequence

from rowstream.runtime.engine import Chunk, Message, PromptError, QueueFullError, Request
from rowstream.runtime.generation import Generation

SCRIPT = (Chunk("Hel", (7,)), Chunk("", (8, 9)), Chunk("lo ☺\u2028", (10, 11), "stop"))


class ScriptedEngine:
    """Encode a character as its code point below 128; answer every request with `script`.

    With `held` the chunks after the first wait for the test, or until the generation is cancelled;
    with `open_ended` all come and no end. `error` comes after the script's chunks.
    """

    name = "org/tiny"
    context_tokens = 64
    vocab_size = 128

    def __init__(
        self,
        script: Sequence[Chunk] = SCRIPT,
        *,
        held: bool = False,
        open_ended: bool = False,
        full: bool = False,
        error: Exception | None = None,
    ) -> None:
        self.script = tuple(script)
        self.held = held
        self.open_ended = open_ended
        self.drained = False
        self.full = full
        self.error = error
        self.closed = False
        self.tables: list[dict[str, object]] = [{"backend": "disk", "reads": 3}]
        self.generations: list[Generation] = []
        self.conversations: list[tuple[Message, ...]] = []

    def encode(self, text: str) -> tuple[int, ...]:
        if "\0" in text:
            raise PromptError("the tokenizer does not take this")
        return tuple(ord(character) % 128 for character in text)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        self.conversations.append(tuple(messages))
        if messages[-1].role == "assistant":
            raise PromptError("the user must have the last word")
        return self.encode("".join(f"{message.role}:{message.content}\n" for message in messages))

    def submit(self, requests: Sequence[Request]) -> list[Generation]:
        if self.full:
            raise QueueFullError("queue: 1 requests wait, at most 1 may")
        generations = [Generation(request) for request in requests]
        self.generations += generations
        for generation in generations:
            for chunk in self.script[: 1 if self.held else None]:
                generation.put(chunk)
            if self.error is not None:
                generation.fail(self.error)
        return generations

    def stats(self) -> dict[str, object]:
        return {"closed": self.closed, "waiting": 0, "tables": self.tables}

    def drain(self) -> None:
        self.drained = self.full = True

    def close(self) -> None:
        self.closed = True
