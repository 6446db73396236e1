"""The server over a real socket, asked with the `openai` client, and clients that leave it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import uvicorn  # noqa: E402

from rowstream.engines.transformers import stores  # noqa: E402
from rowstream.errors import UnavailableError  # noqa: E402
from rowstream.runtime.generate import TransformersEngine  # noqa: E402
from rowstream.serve import serve  # noqa: E402
from rowstream.serve.app import create_app  # noqa: E402
from rowstream.serve.server import bind, model_name, url  # noqa: E402

PROMPT = "The river runs through"
CHATML = "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n"
TURNS: Any = [{"role": "user", "content": [{"type": "text", "text": "hi there"}]}]


@pytest.fixture(scope="module")
def address(synth_model: Any, synth_tokenizer: Any) -> Iterator[str]:
    """Serve the synthetic checkpoint from this process."""
    tables = stores(synth_model)
    engine = TransformersEngine(
        synth_model, synth_tokenizer, name="tiny-qwen", tables=tables, max_queue=4
    )
    config = uvicorn.Config(create_app(engine), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    with bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        until(lambda: server.started)
        yield url(listener)
        server.should_exit = True
        thread.join()
    engine.close()


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def health(address: str) -> Any:
    return httpx.get(f"{address}/health", timeout=60).json()


def begin(address: str, call: dict[str, Any]) -> socket.socket:
    """Send a request as a bare client, which can leave or stop reading."""
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps(call).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(head.encode() + body)
    return connection


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def expected(synth_model: Any, synth_tokenizer: Any) -> Callable[[str, int], str]:
    """Continue a prompt with transformers alone."""

    def generate(prompt: str, max_tokens: int) -> str:
        ids = torch.tensor([synth_tokenizer(prompt)["input_ids"]])
        out = synth_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
        )
        text: str = synth_tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return text

    return generate


def test_a_completion_is_what_generate_says(
    client: openai.OpenAI, expected: Callable[[str, int], str], synth_tokenizer: Any
) -> None:
    answer = client.completions.create(
        model="tiny-qwen", prompt=PROMPT, max_tokens=12, temperature=0
    )
    assert answer.choices[0].text == expected(PROMPT, 12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(synth_tokenizer(PROMPT)["input_ids"])
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_chat_and_its_stream_are_what_generate_says(
    client: openai.OpenAI, expected: Callable[[str, int], str], synth_tokenizer: Any
) -> None:
    settings: dict[str, Any] = {
        "model": "tiny-qwen",
        "messages": TURNS,
        "max_completion_tokens": 10,
        "temperature": 0,
    }
    text = expected(CHATML, 10)
    answer = client.chat.completions.create(**settings)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(synth_tokenizer(CHATML)["input_ids"])

    *parts, last = client.chat.completions.create(
        **settings, stream=True, stream_options={"include_usage": True}
    )
    pieces = [part.choices[0].delta.content or "" for part in parts]
    assert "".join(pieces) == text
    assert sum(piece != "" for piece in pieces) > 2
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage == answer.usage


def test_several_prompts_as_text_and_as_ids(
    client: openai.OpenAI, expected: Callable[[str, int], str], synth_tokenizer: Any
) -> None:
    prompts = [PROMPT, "one two"]
    ids = [list(synth_tokenizer(prompt)["input_ids"]) for prompt in prompts]
    texts = [expected(prompt, 4) for prompt in prompts]
    forms: list[Any] = [prompts, ids]
    for form in forms:
        answer = client.completions.create(
            model="tiny-qwen", prompt=form, max_tokens=4, temperature=0
        )
        assert [choice.text for choice in answer.choices] == texts
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 8
    streamed = ["", ""]
    for part in client.completions.create(
        model="tiny-qwen", prompt=prompts, max_tokens=4, temperature=0, stream=True
    ):
        streamed[part.choices[0].index] += part.choices[0].text
    assert streamed == texts


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_not_part_of_the_text(
    client: openai.OpenAI, expected: Callable[[str, int], str], stream: bool
) -> None:
    full = expected(PROMPT, 12)
    stop = full[10:14]
    answer: Any = client.completions.create(
        model="tiny-qwen",
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        stop=[stop, "never"],
        stream=stream,
    )
    choices = [part.choices[0] for part in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == full[: full.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_seeds_reproduce(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        answer = client.completions.create(
            model="tiny-qwen", prompt=PROMPT, max_tokens=8, temperature=1, top_p=0.9, seed=seed
        )
        return answer.choices[0].text

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_models_and_health(client: openai.OpenAI, address: str) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny-qwen"
    assert client.models.retrieve("tiny-qwen") == model
    before = httpx.get(f"{address}/health", timeout=60).json()
    assert (before["status"], before["model"]) == ("ok", "tiny-qwen")
    (table,) = before["tables"]
    assert table["backend"] in ("disk", "mmap", "pinned")
    client.completions.create(model="tiny-qwen", prompt="a", max_tokens=2, temperature=0)
    (after,) = httpx.get(f"{address}/health", timeout=60).json()["tables"]
    assert after["rows"] > table["rows"]


def test_errors_reach_the_client_as_its_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny-qwen", prompt="a", n=2)
    assert refused.value.param == "n"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny-qwen", prompt=[5] * 40_000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as unknown:
        client.completions.create(model="tiny-qwen", prompt="a", extra_body={"top_k": 3})
    assert (unknown.value.code, unknown.value.param) == ("unknown_parameter", "top_k")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="tiny-qwen", prompt="a" * 2_000_000)
    assert large.value.status_code == 413


def test_a_full_queue_turns_clients_away(client: openai.OpenAI, address: str) -> None:
    call = {"model": "tiny-qwen", "prompt": PROMPT, "max_tokens": 20_000, "stream": True}
    clients = [begin(address, call) for _ in range(5)]
    try:
        until(lambda: health(address)["waiting"] == 4)  # the loop answers while the model works
        with pytest.raises(openai.RateLimitError) as full:
            client.completions.create(model="tiny-qwen", prompt="a", max_tokens=1)
        assert full.value.code == "queue_full"
    finally:
        # those that wait and the one that is answered
        for one in clients:
            one.close()
    until(lambda: (health(address)["running"], health(address)["waiting"]) == (0, 0))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_model(
    client: openai.OpenAI, address: str, stream: bool
) -> None:
    call = {"model": "tiny-qwen", "prompt": PROMPT, "max_tokens": 20_000, "temperature": 0}
    with pytest.raises((httpx.ReadTimeout, StopIteration)):  # noqa: PT012
        if stream:
            with httpx.stream(
                "POST", f"{address}/v1/completions", json=call | {"stream": True}, timeout=60
            ) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: ")
                raise StopIteration
        httpx.post(f"{address}/v1/completions", json=call, timeout=httpx.Timeout(60, read=1))
    # the model would need minutes for the rest of the answer
    answered = client.completions.create(
        model="tiny-qwen", prompt="a", max_tokens=2, temperature=0, timeout=45
    )
    assert answered.choices[0].finish_reason == "length"
    health = httpx.get(f"{address}/health", timeout=60).json()
    assert health["waiting"] == 0


def test_a_port_in_use_is_said_in_one_line(synth_checkpoint: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=rf"^127.0.0.1:{port}: address already in use$"):
            serve(str(synth_checkpoint), port=port)


def test_an_address_that_cannot_be_had() -> None:
    # an address for documentation, which no machine has
    with pytest.raises(UnavailableError, match=r"^192\.0\.2\.1:0: "):
        bind("192.0.2.1", 0)
    for port in (-1, 99999):
        with pytest.raises(ValueError, match=rf"^port: .* got {port}$"):
            bind("127.0.0.1", port)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"starlette, uvicorn.*pip install"):
        serve("anything", port=0)


def test_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_name(str(tmp_path)) == tmp_path.name
    monkeypatch.chdir(tmp_path)
    assert model_name(".") == tmp_path.name
    assert model_name("Org/Model") == "Org/Model"


def test_addresses() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url(listener))
    with socket.socket(socket.AF_INET6) as other:
        assert url(other) == "http://[::]:0"


def test_the_whole_server_and_its_end(
    synth_checkpoint: Path, expected: Callable[[str, int], str]
) -> None:
    """Start `serve` as a process, and send it SIGTERM in the middle of an answer."""
    code = "import sys; from rowstream.serve import serve; serve(sys.argv[1], port=0)"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(synth_checkpoint)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        try:
            assert process.stdout is not None
            device, table, serving = (process.stdout.readline() for _ in range(3))
            assert re.match(r"device .+ random reads/s, .+; queue depth \d+", device)
            assert re.match(r"table layers\.1\.ple: backend \w+, reader \w+ \(.+\)$", table)
            found = re.match(r"serving tiny-qwen at (http://127\.0\.0\.1:\d+/v1)$", serving)
            assert found is not None
            client = openai.OpenAI(base_url=found[1], api_key="none", max_retries=0)
            stream = client.completions.create(
                model="tiny-qwen", prompt=PROMPT, max_tokens=12, temperature=0, stream=True
            )
            text = next(stream).choices[0].text
            process.send_signal(signal.SIGTERM)
            text += "".join(part.choices[0].text for part in stream)
            assert text == expected(PROMPT, 12)
            client.close()
            assert process.wait(120) == 0
        finally:
            process.kill()
