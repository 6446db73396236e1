"""Starts to read a prompt's rows when a model's forward begins, while its first layers still run.

Only a prompt from its start is read ahead: what a cache holds of the tokens before is the model's
own business. A wrong guess costs reads, never a value.
"""

from __future__ import annotations

from typing import Any

import torch

from rowstream.device.embedding import StreamedEmbedding
from rowstream.prefetch import Ticket
from rowstream.store import RowStore

__all__ = ["ReadAhead"]

# a shorter prompt is read in less time than it takes to hand it to another thread
_FROM_TOKENS = 64


class ReadAhead:
    """A forward pre-hook, registered with keyword arguments, for the text model.

    A copy of the model has a hook of its own; reads under way are not copied.
    """

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"_tickets": []}

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Drop what the prompt before did not use, and prefetch this one."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None or ids.ndim != 2 or ids.shape[1] < _FROM_TOKENS:
            return
        # a graph has no tokens yet, and what asks the device for them, or a cache, would break it
        if ids.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if not _starts(kwargs):
            return
        rows = ids.detach().cpu().numpy()
        mask = kwargs.get("attention_mask")
        if mask is not None and getattr(mask, "ndim", 0) == 2:
            kept = mask.detach().cpu().numpy()[:, -rows.shape[1] :] != 0
        else:
            kept = None
        self._tickets = [
            part.store.prefetch([(None, tokens) for tokens in _hashed(part.store, rows, kept)])
            for part in module.modules()
            if isinstance(part, StreamedEmbedding) and part.store.manifest.hash is not None
        ]


def _hashed(store: RowStore, rows: Any, kept: Any) -> Any:
    """Return the token ids as the model hashes them: what is masked reads as eos."""
    constants = store.manifest.hash
    if constants is None or ((rows < 0) | (rows >= constants.vocab_size)).any():
        return []
    if kept is None:
        return rows
    import numpy as np

    return np.where(kept, rows, constants.eos)


def _starts(kwargs: dict[str, Any]) -> bool:
    """Whether the forward begins a sequence: its cache, under any of its names, holds nothing."""
    cache = kwargs.get("cache")
    if cache is None:
        cache = kwargs.get("past_key_values")
    if cache is None:
        return True
    try:
        return int(cache.get_seq_length()) == 0
    except ValueError:  # a cache without an attention layer does not say
        return False
