"""What an engine answers to one request, as text and as ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rowstream.runtime.engine import Chunk, Request, SamplingParams


def answer(engine: Any, prompt: Sequence[int], sampling: SamplingParams) -> list[Chunk]:
    (generation,) = engine.submit([Request(tuple(prompt), sampling)])
    return list(generation)


def text_of(chunks: Sequence[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def ids_of(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]
