"""Logprobs: the model's own probabilities, at the right characters, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import json
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from model_runs import step  # noqa: E402
from rowstream.runtime.detokenize import TextStream  # noqa: E402
from rowstream.runtime.emission import Emission  # noqa: E402
from rowstream.runtime.engine import Candidate, Chunk, Request, SamplingParams  # noqa: E402
from rowstream.runtime.generate import TransformersEngine  # noqa: E402
from rowstream.runtime.generation import Generation  # noqa: E402
from rowstream.runtime.logprobs import token_bytes  # noqa: E402
from rowstream.serve.app import create_app  # noqa: E402

PROMPT = "The river runs through"


@pytest.fixture(scope="module")
def engine(synth_model: Any, synth_tokenizer: Any) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(synth_model, synth_tokenizer, name="tiny")
    yield engine
    engine.close()


def answer(engine: TransformersEngine, sampling: SamplingParams) -> list[Chunk]:
    (generation,) = engine.submit([Request(engine.encode(PROMPT), sampling)])
    return list(generation)


def teacher(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Any:
    """Return log-probabilities [tokens, vocab] from one cached forward for each token."""
    with torch.no_grad():
        logits, cache = step(model, torch.tensor([prompt]))
        rows = [logits[0, -1]]
        for token in tokens[:-1]:
            logits, cache = step(model, torch.tensor([[token]]), cache)
            rows.append(logits[0, -1])
    return torch.log_softmax(torch.stack(rows).float(), dim=-1)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=10, temperature=0.0, logprobs=5),
        # filters and temperature change what is drawn, not what is said of it
        SamplingParams(max_tokens=10, temperature=1.7, top_p=0.9, seed=3, logprobs=3),
    ],
)
def test_logprobs_are_those_of_the_model(
    engine: TransformersEngine,
    synth_model: Any,
    sampling: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(synth_model.generation_config, "repetition_penalty", 3.0)
    chunks = answer(engine, sampling)
    ids = [token for chunk in chunks for token in chunk.token_ids]
    found = [token for chunk in chunks for token in chunk.logprobs]
    assert [token.chosen.token_id for token in found] == ids
    expected = teacher(synth_model, engine.encode(PROMPT), ids)
    for row, token in zip(expected, found, strict=True):
        assert token.chosen.logprob == pytest.approx(float(row[token.chosen.token_id]), abs=1e-4)
        best = torch.sort(row, descending=True).values[: sampling.logprobs].tolist()
        assert [candidate.logprob for candidate in token.top] == pytest.approx(best, abs=1e-4)
        for candidate in token.top:
            assert candidate.logprob == pytest.approx(float(row[candidate.token_id]), abs=1e-4)


def test_who_does_not_ask_gets_none_and_leaves_no_hook(
    engine: TransformersEngine, synth_model: Any
) -> None:
    chunks = answer(engine, SamplingParams(max_tokens=3, temperature=0.0, logprobs=0))
    tokens = [token for chunk in chunks for token in chunk.logprobs]
    assert [token.top for token in tokens] == [()] * 3
    chunks = answer(engine, SamplingParams(max_tokens=3, temperature=0.0))
    assert not any(chunk.logprobs for chunk in chunks)
    assert not synth_model._forward_hooks


@given(st.text(max_size=30))
@example("émigré ☺ 😀😀 日本語 \ufffd <|im_end|>")
@example("e\u0301 \U0002f800")  # not in the form that normalizes
def test_bytes_of_tokens_join_to_the_text(synth_tokenizer: Any, text: str) -> None:
    ids = synth_tokenizer(text)["input_ids"]
    # the tokenizer normalizes what it reads; as older transformers build it, it does not
    if synth_tokenizer.backend_tokenizer.normalizer is not None:
        text = unicodedata.normalize("NFC", text)
    assert b"".join(token_bytes(synth_tokenizer, token) for token in ids) == text.encode()


def test_bytes_that_have_tokens_of_their_own() -> None:
    class Sentencepiece:
        names = ("<0xE2>", "▁odd", "☺")

        def decode(self, ids: Sequence[int], **settings: Any) -> str:
            return ("\ufffd", "\ufffd odd", "☺")[ids[0]]

        def convert_ids_to_tokens(self, token: int) -> str:
            return self.names[token]

    found = [token_bytes(Sentencepiece(), token) for token in range(3)]
    # of the second nothing better is known than what the decoder says
    assert found == [b"\xe2", "\ufffd odd".encode(), "☺".encode()]


class FixedScores:
    """Stands for `TokenScores`: token i is the i-th byte string, with -i as its logprob."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens

    def score(self, token: int) -> Any:
        chosen = Candidate(token, self.tokens[token], -float(token))
        return chosen, (chosen,)


def emit(tokens: Sequence[bytes], stops: Sequence[str], eos: bool) -> list[Chunk]:
    def decode(ids: Sequence[int]) -> str:
        return b"".join(tokens[i] for i in ids if i < len(tokens)).decode(errors="replace")

    generation = Generation(Request((1,)))
    emission = Emission(
        generation,
        TextStream(decode, stops),
        max_tokens=len(tokens) + 1 if eos else len(tokens),
        eos={len(tokens)},
        scores=FixedScores(tokens),  # type: ignore[arg-type]
    )
    for token in range(len(tokens) + eos):
        if bool(emission(torch.tensor([[token]]), torch.zeros(1))):
            break
    return list(generation)


@given(
    st.text("ab€😀", min_size=1, max_size=24),
    st.lists(st.text("ab€😀", min_size=1, max_size=3), max_size=2),
    st.lists(st.integers(0, 5), max_size=40),
    st.booleans(),
)
@example("a€b", [], [1, 1, 1, 1, 1], False)
@example("aab€", ["ab"], [1, 2], True)
@example("😀😀", ["😀"], [5], False)
def test_offsets_and_what_a_stop_string_cuts_off(
    text: str, stops: list[str], sizes: list[int], eos: bool
) -> None:
    data, tokens = text.encode(), []
    for size in sizes:
        tokens.append(data[:size])
        data = data[size:]
    tokens.append(data)
    chunks = emit(tokens, stops, eos)
    whole = "".join(chunk.text for chunk in chunks)
    # by the definition: the characters that are complete before a token's first byte
    starts = [len(b"".join(tokens[:i]).decode(errors="ignore")) for i in range(len(tokens))]
    stopped = whole != text
    expected = [i for i, start in enumerate(starts) if not stopped or start < len(whole)]
    found = [token for chunk in chunks for token in chunk.logprobs]
    assert [token.chosen.token_id for token in found] == expected
    assert [token.text_offset for token in found] == [starts[i] for i in expected]
    given_chars = 0
    for chunk in chunks[:-1]:
        # nothing is said of a token before its text is out
        given_chars += len(chunk.text)
        assert all(token.text_offset < given_chars for token in chunk.logprobs)


def test_bytes_that_never_become_a_character_have_offsets_too() -> None:
    tokens = [b"a", b"\xff", b"\xff", b"bc", b"d"]
    found = [token for chunk in emit(tokens, [], True) for token in chunk.logprobs]
    assert [token.text_offset for token in found] == [0, 1, 1, 3, 5]


def post(engine: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json={"model": "tiny", "temperature": 0} | body)

    answer = asyncio.run(call())
    assert answer.status_code == 200, answer.text
    return answer


def events(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("stop", [None, 25])
def test_completions(engine: TransformersEngine, stop: int | None) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "logprobs": 2}
    if stop is not None:
        full = post(engine, "/v1/completions", body).json()["choices"][0]["text"]
        body["stop"] = [full[stop : stop + 4]]
    (choice,) = post(engine, "/v1/completions", body).json()["choices"]
    text, logprobs = choice["text"], choice["logprobs"]
    assert sorted(logprobs) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    count = len(logprobs["tokens"])
    assert count > 1
    for index in range(count):
        token, at = logprobs["tokens"][index], logprobs["text_offset"][index]
        assert at < len(text)
        if not token.startswith("bytes:"):
            assert text[at:].startswith(token[: len(text) - at])
        top = logprobs["top_logprobs"][index]
        # greedy: the chosen one is among the likeliest
        assert next(iter(top)) == token
        assert top[token] == logprobs["token_logprobs"][index] <= 0
        assert len(top) == 2

    parts = events(post(engine, "/v1/completions", body | {"stream": True}))
    choices = [part["choices"][0] for part in parts]
    assert "".join(one["text"] for one in choices) == text
    for key, values in logprobs.items():
        joined = [value for one in choices if one["logprobs"] for value in one["logprobs"][key]]
        assert joined == values


def test_chats(engine: TransformersEngine) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    asked = body | {"logprobs": True, "top_logprobs": 3}
    (choice,) = post(engine, "/v1/chat/completions", asked).json()["choices"]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert len(content) == 8
    data = b"".join(bytes(token["bytes"]) for token in content)
    assert data.decode(errors="replace") == choice["message"]["content"]
    for token in content:
        assert sorted(token) == ["bytes", "logprob", "token", "top_logprobs"]
        top = token.pop("top_logprobs")
        assert len(top) == 3
        assert top[0] == token
        assert top[0]["logprob"] >= top[1]["logprob"] >= top[2]["logprob"]

    parts = events(post(engine, "/v1/chat/completions", asked | {"stream": True}))
    streamed = [
        token
        for part in parts
        if part["choices"][0]["logprobs"]
        for token in part["choices"][0]["logprobs"]["content"]
    ]
    assert [token["token"] for token in streamed] == [token["token"] for token in content]

    (plain,) = post(engine, "/v1/chat/completions", body).json()["choices"]
    assert plain["logprobs"] is None
    (bare,) = post(engine, "/v1/chat/completions", body | {"logprobs": True}).json()["choices"]
    assert [token["top_logprobs"] for token in bare["logprobs"]["content"]] == [[]] * 8


def test_parts_of_characters_are_shown_as_bytes() -> None:
    from rowstream.serve.answer import CompletionAnswer

    (chunk, *_) = emit(["€".encode()[:2], "€".encode()[2:]], [], True)
    (event,) = CompletionAnswer("m", logprobs=True).piece(0, chunk)
    choices: Any = event["choices"]
    logprobs = choices[0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xe2\\x82", "bytes:\\xac"]
    assert logprobs["text_offset"] == [0, 0]
