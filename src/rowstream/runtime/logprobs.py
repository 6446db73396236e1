"""Probabilities of tokens as the model gave them: its raw logits, seen at each forward.

Owns the hook on the model and the bytes of single tokens; which tokens are shown, and with what
text, is decided in `emission`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from rowstream.runtime.engine import Candidate

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# what JSON can say of a probability of zero; the number is vLLM's
_LOGPROB_FLOOR = -9999.0


class TokenScores:
    """Score each token of one request by the logits that it was chosen from; a context manager.

    Inside, `score` belongs to the thread that runs the model: a forward of batch size one keeps
    the logits of its last position, before any logits processor.
    """

    def __init__(self, model: Any, token_bytes: Callable[[int], bytes], count: int) -> None:
        """Show `count` of the likeliest tokens beside the chosen one."""
        self._model = model
        self._token_bytes = token_bytes
        self._count = count
        self._logits: Tensor | None = None

    def __enter__(self) -> TokenScores:
        self._hook = self._model.register_forward_hook(self._keep)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hook.remove()
        self._logits = None

    def score(self, token: int) -> tuple[Candidate, tuple[Candidate, ...]]:
        """Return the token that was chosen after the last forward, and the likeliest ones."""
        assert self._logits is not None
        logprobs = torch.log_softmax(self._logits.float(), dim=-1)
        chosen = float(logprobs[token])
        top = torch.topk(logprobs, min(self._count, logprobs.numel()))
        likeliest = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        if likeliest and chosen >= min(likeliest.values()):
            # of equals, topk may have taken others
            likeliest[token] = chosen
        ranked = sorted(likeliest.items(), key=lambda pair: (-pair[1], pair[0] != token))
        return (
            self._candidate(token, chosen),
            tuple(self._candidate(*pair) for pair in ranked[: self._count]),
        )

    def _keep(self, module: Any, inputs: Any, output: Any) -> None:
        self._logits = output.logits[0, -1].detach()

    def _candidate(self, token: int, logprob: float) -> Candidate:
        known = logprob if math.isfinite(logprob) else _LOGPROB_FLOOR
        return Candidate(token, self._token_bytes(token), known)


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes that a token stands for; they need not be whole characters."""
    text = str(
        tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
    if _REPLACEMENT not in text:
        return text.encode()
    # a part of a character, which decoders show as a replacement: the vocabulary has its bytes
    name = str(tokenizer.convert_ids_to_tokens(token))
    if single := _BYTE_TOKEN.fullmatch(name):
        return bytes([int(single[1], 16)])
    try:
        return bytes(_BYTE_OF[character] for character in name)
    except KeyError:
        return text.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character in the vocabularies of byte-level tokenizers.

    A printable byte is its own character, the others follow from U+0100 on (GPT-2's rule).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
