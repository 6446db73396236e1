"""Requests are checked field by field: each refusal names its field, and nothing is swallowed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowstream.runtime.engine import Message, SamplingParams
from rowstream.serve.checks import RequestError
from rowstream.serve.schema import MAX_PROMPTS, parse_chat, parse_completion, parse_json

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hello"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def refused(parse: Any, body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(body)
    assert caught.value.status == 400
    assert caught.value.kind == "invalid_request_error"
    return caught.value


def test_a_completion_with_every_supported_field() -> None:
    call = parse_completion(
        COMPLETION
        | {
            "max_tokens": 5,
            "temperature": 0,
            "top_p": 0.5,
            "seed": -3,
            "stop": ["a", "b"],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    assert call.prompts == ("hello",)
    assert call.sampling == SamplingParams(5, 0.0, 0.5, -3, ("a", "b"))
    assert (call.stream, call.include_usage) == (True, True)


def test_absent_fields_leave_the_choice_to_the_engine() -> None:
    assert parse_completion(COMPLETION).sampling == SamplingParams(max_tokens=16)
    assert parse_chat(CHAT).sampling == SamplingParams()
    assert not parse_chat(CHAT).stream


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ("hi",)),
        ([3, 4], ((3, 4),)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["x"] * MAX_PROMPTS, ("x",) * MAX_PROMPTS),
    ],
)
def test_prompts(prompt: Any, prompts: Any) -> None:
    assert parse_completion(COMPLETION | {"prompt": prompt}).prompts == prompts


def test_content_is_text_or_text_parts() -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": parts, "name": None},
        # as the openai client sends an answer back
        {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None},
    ]
    assert parse_chat(CHAT | {"messages": messages}).messages == (
        Message("system", "be brief"),
        Message("user", "hello"),
        Message("assistant", "yes"),
    )


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_max_tokens(name: str) -> None:
    call = parse_chat(CHAT | {name: 7})
    assert (call.sampling.max_tokens, call.max_tokens_field) == (7, name)
    assert parse_chat(CHAT | {"max_tokens": 7, "max_completion_tokens": 7}).sampling.max_tokens == 7
    error = refused(parse_chat, CHAT | {"max_tokens": 7, "max_completion_tokens": 8})
    assert error.param == "max_tokens"


NEUTRAL: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "user": "someone",
    "stream_options": {"include_usage": False, "include_obfuscation": False},
    "logprobs": False,
}
NEUTRAL_COMPLETION = NEUTRAL | {"best_of": 1, "echo": False, "suffix": ""}
NEUTRAL_CHAT = NEUTRAL | {
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "service_tier": "auto",
    "store": False,
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
}


def test_neutral_values_and_null_ask_for_nothing() -> None:
    plain_completion, plain_chat = parse_completion(COMPLETION), parse_chat(CHAT)
    for name, value in NEUTRAL_COMPLETION.items():
        assert parse_completion(COMPLETION | {name: value}) == plain_completion, name
        assert parse_completion(COMPLETION | {name: None}) == plain_completion, name
    for name, value in NEUTRAL_CHAT.items():
        assert parse_chat(CHAT | {name: value}) == plain_chat, name
        assert parse_chat(CHAT | {name: None}) == plain_chat, name
    for name in ("max_tokens", "temperature", "top_p", "seed", "stop", "stream"):
        assert parse_completion(COMPLETION | {name: None}) == plain_completion, name


def test_logprobs() -> None:
    assert parse_completion(COMPLETION | {"logprobs": 0}).sampling.logprobs == 0
    assert parse_completion(COMPLETION | {"logprobs": 5}).sampling.logprobs == 5
    assert parse_completion(COMPLETION).sampling.logprobs is None
    assert parse_chat(CHAT | {"logprobs": True}).sampling.logprobs == 0
    assert parse_chat(CHAT | {"logprobs": True, "top_logprobs": 5}).sampling.logprobs == 5
    assert parse_chat(CHAT | {"logprobs": False, "top_logprobs": 0}).sampling.logprobs is None


BAD_COMMON: list[tuple[str, Any]] = [
    ("n", 2),
    ("n", True),
    ("n", "1"),
    ("presence_penalty", 0.1),
    ("frequency_penalty", False),
    ("logit_bias", {"5": 1}),
    ("user", 5),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "0"),
    ("temperature", True),
    ("top_p", 1.5),
    ("top_p", [1]),
    ("seed", 1.0),
    ("seed", 2**63),
    ("seed", False),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", "5"),
    ("stop", 5),
    ("stop", ""),
    ("stop", ["a"] * 5),
    ("stop", {}),
    ("stream", 1),
    ("stream", "true"),
    ("stream_options", []),
    ("model", None),
    ("model", 5),
]
BAD_COMPLETION: list[tuple[str, Any]] = [
    ("prompt", None),
    ("prompt", 5),
    ("prompt", {}),
    ("prompt", []),
    ("prompt", ["x"] * (MAX_PROMPTS + 1)),
    ("best_of", 2),
    ("logprobs", 6),
    ("logprobs", -1),
    ("logprobs", True),
    ("logprobs", 1.0),
    ("echo", True),
    ("suffix", "x"),
]
BAD_CHAT: list[tuple[str, Any]] = [
    ("messages", None),
    ("messages", []),
    ("messages", "hello"),
    ("max_completion_tokens", 0),
    ("response_format", {"type": "json_object"}),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "required"),
    ("logprobs", 0),
    ("logprobs", "true"),
    # it needs logprobs
    ("top_logprobs", 2),
    ("top_logprobs", 6),
    ("top_logprobs", True),
    ("modalities", ["audio"]),
    ("reasoning_effort", "low"),
    ("store", True),
]


@pytest.mark.parametrize(("name", "value"), BAD_COMMON + BAD_COMPLETION)
def test_a_completion_is_refused_by_field(name: str, value: Any) -> None:
    error = refused(parse_completion, COMPLETION | {name: value})
    assert error.param == name
    assert error.message.startswith(f"{name}: ")
    assert error.code


@pytest.mark.parametrize(("name", "value"), BAD_COMMON + BAD_CHAT)
def test_a_chat_is_refused_by_field(name: str, value: Any) -> None:
    assert refused(parse_chat, CHAT | {name: value}).param == name


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": ["a", [5]]}, "prompt[1]"),
        ({"prompt": [[5], "a"]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], [2, 2.5]]}, "prompt[1][1]"),
        ({"prompt": "a\ud800"}, "prompt"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", None]}, "stop[1]"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": {"other": 1}}, "stream_options.other"),
        ({"top_k": 5}, "top_k"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
def test_inner_fields_of_a_completion_are_named(changes: Any, param: str) -> None:
    assert refused(parse_completion, COMPLETION | changes).param == param


USER: dict[str, Any] = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", ""),
        ({"content": "hi"}, ".role"),
        ({"role": "user"}, ".content"),
        (USER | {"content": None}, ".content"),
        (USER | {"content": 5}, ".content"),
        (USER | {"content": "\udfff"}, ".content"),
        (USER | {"role": "tool"}, ".role"),
        (USER | {"role": ["user"]}, ".role"),
        (USER | {"name": "bob"}, ".name"),
        (USER | {"mood": "good"}, ".mood"),
        (USER | {"tool_calls": [{}]}, ".tool_calls"),
        (USER | {"content": [{"type": "text"}]}, ".content[0].text"),
        (USER | {"content": [{"text": "a"}]}, ".content[0].type"),
        (USER | {"content": ["a"]}, ".content[0]"),
        (USER | {"content": [{"type": "image_url", "image_url": {}}]}, ".content[0].type"),
        (USER | {"content": [{"type": "text", "text": 1}]}, ".content[0].text"),
        (USER | {"content": [{"type": "text", "text": "a", "x": 1}]}, ".content[0].x"),
    ],
)
def test_inner_fields_of_a_message_are_named(message: Any, param: str) -> None:
    assert refused(parse_chat, CHAT | {"messages": [USER, message]}).param == f"messages[1]{param}"


@pytest.mark.parametrize("body", [None, 5, [], "text", True])
def test_a_body_is_an_object(body: Any) -> None:
    assert "body: must be an object" in refused(parse_completion, body).message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b"\xff\xfe",
        b'"\xff"',
        b"[" * 200_000,
        b"9" * 5000,
    ],
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    assert refused(parse_json, body).code == "invalid_json"


def test_a_message_is_short_and_printable_whatever_was_sent() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    bodies = [{"x\ud800" * 10_000: 1}, {"prompt": deep}, {"stop": "x" * 10_000, "n": "y" * 9999}]
    for body in bodies:
        error = refused(parse_completion, COMPLETION | body)
        assert len(json.dumps(error.body()).encode()) < 1500


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
names = st.sampled_from([*COMPLETION, *CHAT, *NEUTRAL_CHAT, *NEUTRAL_COMPLETION, "stop", "seed"])


@given(st.dictionaries(names, json_values, max_size=3))
def test_any_value_is_parsed_or_refused_with_a_field(changes: dict[str, Any]) -> None:
    for parse, base in ((parse_completion, COMPLETION), (parse_chat, CHAT)):
        try:
            parse(base | changes)
        except RequestError as error:
            assert error.param  # noqa: PT017
