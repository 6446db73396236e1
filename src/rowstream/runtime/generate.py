"""The engine over transformers: one thread drives `model.generate`, request after request.

Owns that thread and the queue before it. Chat templates, eos ids and sampling defaults are the
checkpoint's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from rowstream.errors import ReadError
from rowstream.runtime.detokenize import TextStream
from rowstream.runtime.emission import Emission
from rowstream.runtime.engine import (
    EngineClosedError,
    Message,
    PromptError,
    QueueFullError,
    Request,
)
from rowstream.runtime.generation import Generation
from rowstream.runtime.logprobs import TokenScores, token_bytes
from rowstream.runtime.sampling import Sampler

# a check that raises for ever must not hold the queue up
_MOST_CAUSES = 1000


class Table(Protocol):
    """What the engine wants of a row store: its counters, and rows read in time."""

    def stats(self) -> Mapping[str, object]:
        """Return JSON values."""

    def prefetch(self, runs: Sequence[tuple[None, Sequence[int]]]) -> object:
        """Start to read the rows of prompts; what is returned ends that when it is dropped."""


class TransformersEngine:
    """Serve a causal language model and its tokenizer; see `Engine` for the methods.

    Requests are answered one by one, in the order of their arrival.
    `max_queue` requests may wait while one runs. `tables` are the row stores shown in `stats()`;
    they and the model stay the caller's, and must outlive `close()`. `check` is called once a step
    has ended, before its token is sent, and raises where the step is of no use, each cause once.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        tables: Sequence[Table] = (),
        max_queue: int = 64,
        check: Callable[[], None] | None = None,
    ) -> None:
        config = model.config.get_text_config()
        self.name = name
        self.context_tokens = int(config.max_position_embeddings)
        self.vocab_size = int(config.vocab_size)
        self._model = model
        self._tokenizer = tokenizer
        self._tables = tuple(tables)
        self._max_queue = max_queue
        self._check = check
        self._eos = _token_ids(model.generation_config.eos_token_id)
        # a fast tokenizer changes its own settings in a call, which must not meet another call
        self._tokenizing = threading.Lock()
        self._changed = threading.Condition()
        # what was submitted together is begun together, and a drain lets it end together
        self._waiting: deque[deque[Generation]] = deque()
        self._begun: deque[Generation] = deque()
        self._running: Generation | None = None
        self._draining = False
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
            if self._draining:
                raise EngineClosedError("engine: is closed")
            self._forget_ended()
            waiting = self._count_waiting()
            if waiting + (self._running is not None) > self._max_queue:
                raise QueueFullError(
                    f"queue: {waiting} requests wait, at most {self._max_queue} may"
                )
            for generation in generations:
                generation.read_ahead = [
                    table.prefetch([(None, generation.request.prompt)]) for table in self._tables
                ]
            self._waiting.append(deque(generations))
            self._changed.notify()
        return generations

    def stats(self) -> dict[str, object]:
        with self._changed:
            counters: dict[str, object] = {
                "closed": self._closed,
                "draining": self._draining,
                "running": int(self._running is not None),
                "waiting": self._count_waiting(),
                "max_queue": self._max_queue,
                "answered": self._answered,
                "generated_tokens": self._generated_tokens,
            }
        return counters | {"tables": [dict(table.stats()) for table in self._tables]}

    def drain(self) -> None:
        with self._changed:
            self._draining = True
            left = [generation for batch in self._waiting for generation in batch]
            self._waiting.clear()
        for generation in left:
            generation.fail(EngineClosedError("engine: was closed before the answer was begun"))

    def close(self) -> None:
        self.drain()
        with self._changed:
            self._closed = True
            left = [*self._begun]
            if self._running is not None:
                left.append(self._running)
            self._begun.clear()
            self._changed.notify()
        for generation in left:
            generation.fail(EngineClosedError("engine: was closed before the answer was complete"))
        self._thread.join()

    def _count_waiting(self) -> int:
        return sum(not one.ended for batch in (self._begun, *self._waiting) for one in batch)

    def _forget_ended(self) -> None:
        # clients that left while they waited: their prompts would stay in memory until their turn
        living = (deque(one for one in batch if not one.ended) for batch in self._waiting)
        self._waiting = deque(batch for batch in living if batch)

    def _work(self) -> None:
        while (generation := self._next()) is not None:
            try:
                self._answer(generation)
            except Exception as error:
                generation.fail(self._cause(error))

    def _cause(self, error: Exception) -> Exception:
        """Return what made an answer fail with `error`; nothing is left to fail the next one.

        A void step may show by its NaN before anybody has checked, and more than one may be void.
        """
        if self._check is None:
            return error
        if self._model.device.type == "cuda":
            # of steps that have not ended nothing is known; a GPU that is gone has told by `error`
            with contextlib.suppress(RuntimeError):
                for device in {weight.device for weight in self._model.parameters()}:
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
        causes: list[Exception] = [error] if isinstance(error, ReadError) else []
        for _ in range(_MOST_CAUSES):
            try:
                self._check()
            except Exception as cause:
                causes.append(cause)
            else:
                break
        return next(iter(causes), error)

    def _next(self) -> Generation | None:
        with self._changed:
            self._running = None
            while not self._closed:
                while self._begun:
                    generation = self._begun.popleft()
                    if not generation.ended:
                        self._running = generation
                        return generation
                if self._waiting:
                    self._begun = self._waiting.popleft()
                else:
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
        max_tokens = wanted or room
        ids = torch.tensor([request.prompt], dtype=torch.long, device=self._model.device)
        processors, config = self._plan(request, max_tokens)
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(generation.read_ahead.clear)
            scores = None
            if (count := request.sampling.logprobs) is not None:
                data = functools.partial(token_bytes, self._tokenizer)
                scores = cleanup.enter_context(TokenScores(self._model, data, count))
            emission = Emission(
                generation,
                TextStream(self._decode, request.sampling.stop),
                max_tokens=max_tokens,
                eos=self._eos,
                scores=scores,
                check=self._check,
            )
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                logits_processor=processors,
                stopping_criteria=[emission],
            )
            # a limit of the checkpoint's own, such as max_time, can end the loop first
            emission.finish("length")
        with self._changed:
            self._answered += 1
            self._generated_tokens += emission.num_tokens

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


def _token_ids(ids: int | Sequence[int] | None) -> frozenset[int]:
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
