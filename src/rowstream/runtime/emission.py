"""What becomes of a request's tokens while they are generated: chunks, and the decision to stop.

Runs on the engine's thread, between one forward and the next; the model's loop calls it as a
stopping criterion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from rowstream.runtime.detokenize import TextStream
from rowstream.runtime.engine import Chunk, FinishReason, TokenLogprobs
from rowstream.runtime.generation import Generation
from rowstream.runtime.logprobs import TokenScores


class Emission:
    """See each new token, hand out text, and say when to stop."""

    def __init__(
        self,
        generation: Generation,
        stream: TextStream,
        *,
        max_tokens: int,
        eos: Collection[int],
        scores: TokenScores | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.num_tokens = 0
        self._generation = generation
        self._stream = stream
        self._max_tokens = max_tokens
        self._eos = eos
        self._scores = scores
        self._check = check
        self._unsent: list[int] = []
        # tokens whose text is not out yet: a stop string may still cut them off
        self._scored: deque[TokenLogprobs] = deque()
        self._sent_chars = 0
        self._done = False

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        if not self._done:
            token = int(input_ids[0, -1])
            # the step has ended by now: nothing is sent that was made of rows that did not come
            if self._check is not None:
                self._check()
            self._push(token)
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
        before = self._stream.decoded_chars
        text = self._stream.push(token)
        if self._scores is not None:
            self._score(self._scores, token, before)
        if self._stream.stopped:
            self._send(text, "stop")
        elif self.num_tokens == self._max_tokens:
            self._send(text + self._stream.flush(), "stop" if self._stream.stopped else "length")
        elif text:
            self._send(text, None)

    def _score(self, scores: TokenScores, token: int, before: int) -> None:
        chosen, top = scores.score(token)
        start, after = before, self._stream.decoded_chars
        try:
            own_chars = len(chosen.data.decode())
        except UnicodeDecodeError:
            pass  # it goes on with a character, or begins one
        else:
            # bytes that never became a character come out together with this token's text
            if own_chars <= after - before:
                start = after - own_chars
        self._scored.append(TokenLogprobs(chosen, top, start))

    def _send(self, text: str, reason: FinishReason | None) -> None:
        self._sent_chars += len(text)
        logprobs = tuple(self._take_scored(reason is not None and not self._stream.stopped))
        self._generation.put(Chunk(text, tuple(self._unsent), reason, logprobs))
        self._unsent.clear()
        self._done = reason is not None

    def _take_scored(self, everything: bool) -> list[TokenLogprobs]:
        taken = []
        while self._scored and (everything or self._scored[0].text_offset < self._sent_chars):
            taken.append(self._scored.popleft())
        return taken
