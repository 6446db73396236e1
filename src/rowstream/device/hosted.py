"""Lookups of a GPU that cannot be linked: the host gathers, and its values are copied.

Each one waits for the stream, and none can be captured. What `auto` falls back to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from rowstream.errors import UnavailableError

__all__ = ["HostedRows"]

_log = logging.getLogger(__name__)
Gather = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]


class HostedRows:
    """Rows gathered by the host; `gather` fills an output on the CPU."""

    def __init__(self, gather: Gather, reason: str, name: str) -> None:
        self._gather = gather
        self._reason = reason
        _log.warning("%s: lookups of a GPU are gathered by the host (%s)", name, reason)

    def run(self, ids: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
        """Fill out; returns once the rows are there."""
        if torch.cuda.is_current_stream_capturing():
            raise UnavailableError(f"captured lookup: {self._reason}", probe="CUDA")
        values = torch.empty(out.shape, dtype=out.dtype, device="cpu")
        self._gather(ids.cpu(), None if live is None else live.cpu(), values)
        out.copy_(values)

    def check(self) -> None:
        """Nothing to find: what fails has raised."""

    def stats(self) -> dict[str, Any]:
        """How a stream waits: it does not, the host does."""
        return {"sync": "host"}

    def close(self) -> None:
        """Nothing to end."""
