"""The OpenAI-compatible server over an `Engine`. Importing it needs neither starlette nor torch."""

from __future__ import annotations

from rowstream.serve.server import serve

__all__ = ["serve"]
