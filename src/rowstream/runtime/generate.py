"""The engine over transformers: one thread drives `model.generate`, request after request.

Owns that thread and the queue before it. Chat templates, eos ids and sampling defaults are the
checkpoint's.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rowstream.errors import UnavailableError
from rowstream.runtime.detokenize import TextStream
from rowstream.runtime.engine import (
    Chunk,
    FinishReason,
    Message,
    PromptError,
    QueueFullError,
    Request,
)
from rowstream.runtime.generation import Generation
from rowstream.runtime.sampling import Sampler


class Table(Protocol):
    """What the engine wants of a row store: its counters."""

    def stats(self) -> Mapping[str, object]:
        """Return JSON values."""


class TransformersEngine:
    """Serve a causal language model and its tokenizer; see `Engine` for the methods.

    `max_queue` requests may wait while one runs. `tables` are the row stores shown in `stats()`;
    they and the model stay the caller's, and must outlive `close()`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        tables: Sequence[Table] = (),
        max_queue: int = 64,
    ) -> None:
        config = model.config.get_text_config()
        self.name = name
        self.context_tokens = int(config.max_position_embeddings)
        self.vocab_size = int(config.vocab_size)
        self._model = model
        self._tokenizer = tokenizer
        self._tables = tuple(tables)
        self._max_queue = max_queue
        self._eos = _token_ids(model.generation_config.eos_token_id)
        # a fast tokenizer changes its own settings in a call, which must not meet another call
        self._tokenizing = threading.Lock()
        self._changed = threading.Condition()
        self._waiting: deque[Generation] = deque()
        self._running: Generation | None = None
        self._closed = False
        self._answered = 0
        self._generated_tokens = 0
        self._thread = threading.Thread(target=self._work, name=f"engine {name}", daemon=True)
        self._thread.start()

    def encode(self, text: str) -> tuple[int, ...]:
        with self._tokenizing:
            return tuple(self._tokenizer(text)["input_ids"])

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        turns = [{"role": turn.role, "content": turn.content} for turn in messages]
        if self._tokenizer.chat_template is None:
            raise PromptError("the model has no chat template")
        from jinja2 import TemplateError

        try:
            with self._tokenizing:
                ids = self._tokenizer.apply_chat_template(
                    turns, add_generation_prompt=True, tokenize=True, return_dict=False
                )
        except TemplateError as error:
            raise PromptError(f"the chat template refuses the messages: {error}") from error
        return tuple(ids)

    def submit(self, requests: Sequence[Request]) -> list[Generation]:
        generations = [Generation(request) for request in requests]
        with self._changed:
            if self._closed:
                raise UnavailableError("engine: is closed")
            waiting = self._count_waiting()
            if waiting + (self._running is not None) > self._max_queue:
                raise QueueFullError(
                    f"queue: {waiting} requests wait, at most {self._max_queue} may"
                )
            self._waiting.extend(generations)
            self._changed.notify()
        return generations

    def stats(self) -> dict[str, object]:
        with self._changed:
            counters: dict[str, object] = {
                "closed": self._closed,
                "running": int(self._running is not None),
                "waiting": self._count_waiting(),
                "max_queue": self._max_queue,
                "answered": self._answered,
                "generated_tokens": self._generated_tokens,
            }
        return counters | {"tables": [dict(table.stats()) for table in self._tables]}

    def close(self) -> None:
        with self._changed:
            self._closed = True
            left = [*self._waiting]
            if self._running is not None:
                left.append(self._running)
            self._waiting.clear()
            self._changed.notify()
        for generation in left:
            generation.fail(UnavailableError("engine: was closed before the answer was complete"))
        self._thread.join()

    def _count_waiting(self) -> int:
        return sum(not generation.ended for generation in self._waiting)

    def _work(self) -> None:
        while (generation := self._next()) is not None:
            try:
                self._answer(generation)
            except Exception as error:
                generation.fail(error)

    def _next(self) -> Generation | None:
        with self._changed:
            self._running = None
            while not self._closed:
                while self._waiting:
                    generation = self._waiting.popleft()
                    if not generation.ended:
                        self._running = generation
                        return generation
                self._changed.wait()
            return None

    def _answer(self, generation: Generation) -> None:
        request = generation.request
        room = self.context_tokens - len(request.prompt)
        wanted = request.sampling.max_tokens
        if not request.prompt or room < 1 or (wanted or 1) > room:
            raise ValueError(
                f"request: {len(request.prompt)} prompt tokens and {wanted or 1} new ones"
                f" do not fit a context of {self.context_tokens}"
            )
        answer = _Answer(
            generation,
            TextStream(self._decode, request.sampling.stop),
            max_tokens=wanted or room,
            eos=self._eos,
        )
        ids = torch.tensor([request.prompt], dtype=torch.long, device=self._model.device)
        processors, config = self._plan(request, answer.max_tokens)
        self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=processors,
            stopping_criteria=[answer],
        )
        # a limit of the checkpoint's own, such as max_time, can end the loop first
        answer.finish("length")
        with self._changed:
            self._answered += 1
            self._generated_tokens += answer.num_tokens

    def _plan(self, request: Request, max_tokens: int) -> tuple[list[Sampler], Any]:
        """Return the sampler, if any, and the checkpoint's generation config, made greedy."""
        config = copy.deepcopy(self._model.generation_config)
        asked = request.sampling
        # a checkpoint that says so is greedy unless a request asks for more
        default = 0.0 if config.do_sample is False else _first(config.temperature, 1.0)
        temperature = _first(asked.temperature, default)
        top_p = _first(asked.top_p, config.top_p, 1.0)
        top_k = int(_first(config.top_k, 0))
        config.max_new_tokens, config.max_length = max_tokens, None
        config.do_sample, config.num_beams, config.num_return_sequences = False, 1, 1
        # generate() warns of these in a greedy run unless they have its defaults
        config.temperature, config.top_p, config.top_k = 1.0, 1.0, 50
        config.return_dict_in_generate = False
        if config.pad_token_id is None:
            config.pad_token_id = min(self._eos, default=0)
        if temperature == 0.0:
            return [], config
        sampler = Sampler(temperature=temperature, top_p=top_p, top_k=top_k, seed=asked.seed)
        return [sampler], config

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)


class _Answer:
    """A stopping criterion: it sees each new token, hands out text and says when to stop."""

    def __init__(
        self, generation: Generation, stream: TextStream, *, max_tokens: int, eos: Collection[int]
    ) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._generation = generation
        self._stream = stream
        self._eos = eos
        self._unsent: list[int] = []
        self._done = False

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        if not self._done:
            self._push(int(input_ids[0, -1]))
        return torch.full((1,), self._done, dtype=torch.bool, device=input_ids.device)

    def finish(self, reason: FinishReason) -> None:
        """Send the rest of the text and the reason, once."""
        if self._done:
            return
        text = self._stream.flush()
        self._send(text, "stop" if self._stream.stopped else reason)

    def _push(self, token: int) -> None:
        if self._generation.ended:  # cancelled, or the engine closes
            self._done = True
            return
        self.num_tokens += 1
        self._unsent.append(token)
        if token in self._eos:
            self.finish("stop")
            return
        text = self._stream.push(token)
        if self._stream.stopped:
            self._send(text, "stop")
        elif self.num_tokens == self.max_tokens:
            self._send(text + self._stream.flush(), "stop" if self._stream.stopped else "length")
        elif text:
            self._send(text, None)

    def _send(self, text: str, reason: FinishReason | None) -> None:
        self._generation.put(Chunk(text, tuple(self._unsent), reason))
        self._unsent.clear()
        self._done = reason is not None


def _token_ids(ids: int | Sequence[int] | None) -> frozenset[int]:
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
