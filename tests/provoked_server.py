"""What clients of the server are told, and what its engine says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from provocations import Provoke, met
from rowstream import ReadError
from rowstream.runtime import sampling
from rowstream.runtime.engine import EngineClosedError, PromptError, QueueFullError, Request
from rowstream.runtime.engine import Message as Turn
from rowstream.runtime.generate import TransformersEngine
from rowstream.serve.app import create_app
from rowstream.serve.checks import RequestError
from rowstream.serve.refusal import Refusals
from scripted import ScriptedEngine

COMPLETION: dict[str, Any] = {"model": "org/tiny", "prompt": "hello"}
CHAT: dict[str, Any] = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}


def answer(path: str, content: Any, engine: Any, **settings: Any) -> None:
    """Ask the app, and raise what it tells the client."""
    told: list[tuple[RequestError, Exception]] = []
    original = Refusals.of

    def of(self: Refusals, error: Exception) -> RequestError:
        told.append((original(self, error), error))
        return told[-1][0]

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(engine or ScriptedEngine(), **settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            method = "GET" if content is None else "POST"
            return await client.request(method, path, content=content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Refusals, "of", of)
        answered = asyncio.run(ask())
    ((refusal, error),) = told
    assert answered.status_code == refusal.status
    assert answered.json()["error"]["message"] == str(refusal)
    if refusal is error:
        raise refusal
    raise refusal from error


def asked(path: str, content: Any = None, engine: Any = None, **settings: Any) -> Provoke:
    return lambda folder: answer(path, content, engine, **settings)


def completion(engine: Any = None, **changes: Any) -> Provoke:
    fields = {**COMPLETION, **changes}
    body = {name: value for name, value in fields.items() if value is not ...}
    return asked("/v1/completions", json.dumps(body), engine)


def chat(engine: Any = None, **changes: Any) -> Provoke:
    return asked("/v1/chat/completions", json.dumps({**CHAT, **changes}), engine)


def messages(*content: Any) -> Provoke:
    return chat(messages=[{"role": "user", "content": item} for item in content])


async def slowly() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.sleep(60)  # or until nobody wants it any more


def told(message: str, *provoke: Provoke) -> None:
    met(message, RequestError, *provoke)


told(
    "body: is not JSON: <reason>",
    asked("/v1/completions", "{"),
    asked("/v1/completions", '{"n": NaN}'),
)
told(
    "<field>: must be <need>, got <value>",
    asked("/v1/completions", "[]"),
    completion(stream=1),
    completion(model=1),
    completion(model="\ud800"),
    completion(max_tokens="1"),
    completion(max_tokens=0),
    completion(temperature="1"),
    completion(temperature=9),
    chat(messages=[{"role": "tool", "content": ""}]),
    completion(n=2),
    completion(stop=1),
    completion(stop=list("12345")),
    completion(stop=[""]),
    completion(prompt=1),
    completion(prompt=[]),
    completion(prompt=["a", [1]]),
    completion(prompt=[[], [1]]),
    chat(messages={}),
    chat(messages=[]),
    messages(1),
    messages([{"type": "image_url"}]),
    chat(max_tokens=1, max_completion_tokens=2),
    chat(top_logprobs=1),
)
told("<field>: is required", completion(prompt=...))
told("<field>: is not a field that the server knows", completion(max_token=1))
told("<field>: must be at most 128 prompts, got <n>", completion(prompt=["a"] * 129))
told("<field>: must have a token", completion(prompt=""))
told("<field>: token ids must be below <n>, got <id>", completion(prompt=[128]))
told(
    "<field>: has <n> tokens, which leaves no room in a context of <n>",
    completion(prompt="a" * 64),
)
told(
    "<field>: <n> tokens after <n> of the prompt do not fit a context of <n>",
    completion(max_tokens=60),
)
told("model: <name> is not served here, <name> is", completion(model="other"))
told("messages: <reason>", chat(messages=[{"role": "assistant", "content": "I"}]))
told("<field>: <reason>", completion(prompt="\0"))
told(
    "body: must be at most <n> bytes",
    asked("/v1/completions", json.dumps(COMPLETION), max_body_bytes=9),
)
told("body: did not come within <n> s", asked("/v1/completions", slowly(), body_timeout_s=0.05))
told("<path>: is not a path of this server", asked("/v1/nothing"))
told("<path>: does not take <method>", asked("/v1/completions"))
told("queue: <n> requests wait, at most <n> may", completion(ScriptedEngine(full=True)))
told("the server is shutting down", completion(ScriptedEngine((), error=EngineClosedError("x"))))
told(
    "the server failed to read its table, error id <id>",
    completion(ScriptedEngine((), error=ReadError(5, "input/output error"))),
)
told(
    "the server failed to answer, error id <id>",
    completion(ScriptedEngine((), error=RuntimeError("x"))),
)

# the engine


def engine(act: Callable[[TransformersEngine], object], **changes: Any) -> Provoke:
    """An engine whose model is never asked."""

    def provoke(folder: Path) -> object:
        config = SimpleNamespace(max_position_embeddings=8, vocab_size=9)
        model: Any = SimpleNamespace(
            config=SimpleNamespace(get_text_config=lambda: config),
            generation_config=SimpleNamespace(eos_token_id=1),
        )
        options: dict[str, Any] = {"name": "tiny", "tokenizer": None, "tables": (), **changes}
        made = TransformersEngine(model, **options)
        try:
            return act(made)
        finally:
            made.close()

    return provoke


def refuses(*args: object, **options: object) -> None:
    from jinja2 import TemplateError

    raise TemplateError("only user and assistant, please")


def encode(made: TransformersEngine) -> object:
    return made.encode_chat([Turn("user", "hi")])


def closed(made: TransformersEngine) -> object:
    made.close()
    return made.submit([Request((1,))])


met(
    "the model has no chat template",
    PromptError,
    engine(encode, tokenizer=SimpleNamespace(chat_template=None)),
)
met(
    "the chat template refuses the messages: <reason>",
    PromptError,
    engine(encode, tokenizer=SimpleNamespace(chat_template="x", apply_chat_template=refuses)),
)
met("engine: is closed", EngineClosedError, engine(closed))
met(
    "queue: <n> requests wait, at most <n> may",
    QueueFullError,
    engine(lambda made: made.submit([Request((1,))]), max_queue=-1),
)
met(
    "request: <n> prompt tokens and <n> new ones do not fit a context of <n>",
    ValueError,
    engine(lambda made: list(made.submit([Request(tuple(range(9)))])[0])),
)
met(
    "logits: need a finite maximum, have <value>",
    ValueError,
    lambda folder: sampling.choose(
        torch.tensor([float("nan")]), temperature=1.0, top_p=1.0, top_k=0, draw=0.5
    ),
)
