"""The HTTP side over a scripted engine: objects, streams, errors, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from rowstream.errors import ReadError, UnavailableError
from rowstream.runtime.engine import Chunk, Engine, SamplingParams
from rowstream.serve.app import create_app
from scripted import SCRIPT, ScriptedEngine

COMPLETION: dict[str, Any] = {"model": "org/tiny", "prompt": "hello"}
CHAT: dict[str, Any] = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = "".join(chunk.text for chunk in SCRIPT)


class Client:
    """Call the app in this process, each time in an event loop of its own."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def get(self, path: str) -> httpx.Response:
        return asyncio.run(self.call("GET", path))

    def post(self, path: str, **content: Any) -> httpx.Response:
        return asyncio.run(self.call("POST", path, **content))

    async def call(self, method: str, path: str, **content: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **content)


def client(engine: Engine | None = None, **settings: Any) -> Client:
    return Client(create_app(engine or ScriptedEngine(), **settings))


async def chunked(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 100):
        yield body[start : start + 100]


def events(answer: Any) -> list[Any]:
    """Parse a stream of server-sent events."""
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def error(answer: Any, status: int) -> dict[str, Any]:
    """Check the shape of an error and return what is in it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert isinstance(body["error"]["message"], str)
    found: dict[str, Any] = body["error"]
    return found


def test_health_shows_the_engine_and_its_tables() -> None:
    engine = ScriptedEngine()
    answer = client(engine).get("/health")
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "ok",
        "model": "org/tiny",
        "waiting": 0,
        "tables": [{"backend": "disk", "reads": 3}],
    }
    engine.close()
    answer = client(engine).get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "closed")


def test_models() -> None:
    listed = client().get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"]) == ("org/tiny", "model")
    assert client().get("/v1/models/org/tiny").json() == card


def test_a_completion() -> None:
    engine = ScriptedEngine()
    body = client(engine).post("/v1/completions", json=COMPLETION | {"seed": 5}).json()
    assert body["object"] == "text_completion"
    assert body["model"] == "org/tiny"
    assert body["choices"] == [
        {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    (generation,) = engine.generations
    assert generation.request.prompt == tuple(b"hello")
    assert generation.request.sampling == SamplingParams(max_tokens=16, seed=5)


def test_a_chat() -> None:
    engine = ScriptedEngine()
    body = client(engine).post("/v1/chat/completions", json=CHAT).json()
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == TEXT
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 8, "completion_tokens": 5, "total_tokens": 13}
    assert engine.generations[0].request.sampling.max_tokens is None


def test_several_prompts_give_several_choices() -> None:
    engine = ScriptedEngine([Chunk("x", (1,), "length")])
    prompts = [[5, 6], [7]]
    body = client(engine).post("/v1/completions", json=COMPLETION | {"prompt": prompts}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert [generation.request.prompt for generation in engine.generations] == [(5, 6), (7,)]


def test_a_stream_of_completions() -> None:
    call = COMPLETION | {"prompt": ["a", "bc"], "stream": True}
    answer = client().post("/v1/completions", json=call)
    *parts, done = events(answer)
    assert done == "[DONE]"
    assert {part["object"] for part in parts} == {"text_completion"}
    assert len({(part["id"], part["created"]) for part in parts}) == 1
    for index in (0, 1):
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == TEXT
        reasons = [choice["finish_reason"] for choice in mine]
        assert reasons == [None] * (len(mine) - 1) + ["stop"]
    assert all("usage" not in part for part in parts)
    assert "\u2028" not in answer.text  # some clients take it for the end of a line


def test_a_stream_of_a_chat_with_usage() -> None:
    call = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    *parts, usage, done = events(client().post("/v1/chat/completions", json=call))
    assert done == "[DONE]"
    assert {part["object"] for part in (*parts, usage)} == {"chat.completion.chunk"}
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    assert [part["choices"][0]["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert all(part["usage"] is None for part in parts)
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 8, "completion_tokens": 5, "total_tokens": 13}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", COMPLETION | {"n": 2}, "n"),
        ("/v1/completions", COMPLETION | {"top_k": 2}, "top_k"),
        ("/v1/completions", {"model": "org/tiny"}, "prompt"),
        ("/v1/completions", {"prompt": "x"}, "model"),
        ("/v1/completions", COMPLETION | {"prompt": ""}, "prompt"),
        ("/v1/completions", COMPLETION | {"prompt": ["a", ""]}, "prompt[1]"),
        ("/v1/completions", COMPLETION | {"prompt": [5, 128]}, "prompt"),
        ("/v1/completions", COMPLETION | {"prompt": [[5], [128]]}, "prompt[1]"),
        ("/v1/completions", COMPLETION | {"prompt": "\0"}, "prompt"),
        ("/v1/chat/completions", CHAT | {"tools": [{}]}, "tools"),
        ("/v1/chat/completions", CHAT | {"temperature": 3}, "temperature"),
        (
            "/v1/chat/completions",
            CHAT | {"messages": [{"role": "assistant", "content": "x"}]},
            "messages",
        ),
    ],
)
def test_a_bad_request_is_refused_by_field(path: str, body: Any, param: str) -> None:
    engine = ScriptedEngine()
    found = error(client(engine).post(path, json=body), 400)
    assert (found["type"], found["param"]) == ("invalid_request_error", param)
    assert not engine.generations


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", COMPLETION | {"prompt": "x" * 64}, "prompt"),
        ("/v1/completions", COMPLETION | {"prompt": [[1], [1] * 65]}, "prompt[1]"),
        ("/v1/completions", COMPLETION | {"max_tokens": 60}, "max_tokens"),
        ("/v1/completions", COMPLETION | {"prompt": "x" * 49}, "max_tokens"),
        (
            "/v1/chat/completions",
            CHAT | {"messages": [{"role": "user", "content": "x" * 80}]},
            "messages",
        ),
        ("/v1/chat/completions", CHAT | {"max_tokens": 60}, "max_tokens"),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 60}, "max_completion_tokens"),
    ],
)
def test_what_does_not_fit_the_context(path: str, body: Any, param: str) -> None:
    found = error(client().post(path, json=body), 400)
    assert (found["code"], found["param"]) == ("context_length_exceeded", param)


def test_the_context_can_be_filled() -> None:
    engine = ScriptedEngine()
    call = COMPLETION | {"prompt": "x" * 60, "max_tokens": 4}
    assert client(engine).post("/v1/completions", json=call).status_code == 200


def test_another_model_is_not_found() -> None:
    for answer in (
        client().post("/v1/completions", json=COMPLETION | {"model": "gpt"}),
        client().post("/v1/chat/completions", json=CHAT | {"model": "gpt"}),
        client().get("/v1/models/gpt"),
    ):
        found = error(answer, 404)
        assert (found["code"], found["param"]) == ("model_not_found", "model")


def test_unknown_paths_and_methods() -> None:
    found = error(client().get("/v1/embeddings"), 404)
    assert found["code"] == "unknown_url"
    answer = client().get("/v1/completions")
    assert error(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"
    assert error(client().post("/health"), 405)["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"model": NaN}', b"[" * 100_000])
def test_malformed_json(body: bytes) -> None:
    found = error(client().post("/v1/completions", content=body), 400)
    assert (found["code"], found["param"]) == ("invalid_json", None)


@pytest.mark.parametrize("size", [1001, 20_000])
def test_the_body_has_a_limit(size: int) -> None:
    limited = client(max_body_bytes=1000)
    padding = b" " * (size - len(json.dumps(COMPLETION)))
    body = json.dumps(COMPLETION).encode() + padding
    found = error(limited.post("/v1/completions", content=body), 413)
    assert found["code"] == "request_too_large"
    # a client that does not announce its length
    assert limited.post("/v1/completions", content=chunked(body)).status_code == 413
    assert limited.post("/v1/completions", content=body[:1000]).status_code == 200


def test_a_full_queue() -> None:
    for stream in (False, True):
        answer = client(ScriptedEngine(full=True)).post(
            "/v1/completions", json=COMPLETION | {"stream": stream}
        )
        found = error(answer, 429)
        assert (found["type"], found["code"]) == ("rate_limit_error", "queue_full")
        assert answer.headers["retry-after"] == "1"


SECRET = ReadError(5, "input/output error", "/secret/path")


def test_an_unexpected_error_has_an_id_and_no_details(caplog: pytest.LogCaptureFixture) -> None:
    answer = client(ScriptedEngine([], error=SECRET)).post("/v1/completions", json=COMPLETION)
    found = error(answer, 500)
    assert found["type"] == "server_error"
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "secret" in caplog.text
    error_id = found["message"].split()[-1]
    assert error_id.startswith("err-")
    assert error_id in record.getMessage()


def test_a_closed_engine_is_unavailable() -> None:
    closed = UnavailableError("engine: is closed")
    answer = client(ScriptedEngine([], error=closed)).post("/v1/completions", json=COMPLETION)
    assert error(answer, 503)["code"] == "unavailable"


def test_an_error_in_a_stream_is_its_last_event(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(SCRIPT[:1], error=SECRET)
    answer = client(engine).post("/v1/chat/completions", json=CHAT | {"stream": True})
    *_, piece, last = events(answer)
    assert piece["choices"][0]["delta"] == {"content": "Hel"}
    assert last["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert "secret" in caplog.text


async def leave_early(engine: ScriptedEngine, stream: bool, spec_version: str) -> list[Any]:
    """Call the app by hand and disconnect once it works on the answer."""
    app = create_app(engine)
    body = json.dumps(COMPLETION | {"stream": stream}).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": spec_version},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [],
    }
    inbox = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        while not engine.generations or (stream and len(sent) < 2):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if spec_version == "2.4" and len(sent) == 1:
            raise OSError("the client is gone")
        sent.append(message)

    await asyncio.wait_for(app(scope, receive, send), 60)
    return sent


@pytest.mark.parametrize(("stream", "spec"), [(False, "2.3"), (True, "2.3"), (True, "2.4")])
def test_a_client_that_goes_away_cancels_its_generation(stream: bool, spec: str) -> None:
    engine = ScriptedEngine(held=True)
    sent = asyncio.run(leave_early(engine, stream, spec))
    (generation,) = engine.generations
    assert generation.cancelled
    assert sent[0]["status"] == (200 if stream else 499)
