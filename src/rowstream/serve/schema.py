"""What clients may ask: the fields of OpenAI's requests, checked and turned into dataclasses.

Fields without support are accepted where they ask for nothing. What needs the model to judge (its
name, the length of a prompt, token ids) is left to `app`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rowstream.runtime.engine import Message, SamplingParams
from rowstream.serve.checks import (
    Check,
    RequestError,
    boolean,
    choice,
    fields,
    ignored,
    integer,
    number,
    only,
    refuse,
    required,
    text,
)

MAX_PROMPTS = 128
MAX_STOPS = 4
MAX_LOGPROBS = 5
# what a completion without max_tokens gets, by OpenAI's rule; a chat goes on to the context's end
DEFAULT_COMPLETION_TOKENS = 16
_MAX_INT = 2**63 - 1

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A checked body of POST /v1/completions."""

    model: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    stream: bool = False
    include_usage: bool = False


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A checked body of POST /v1/chat/completions."""

    model: str
    messages: tuple[Message, ...]
    sampling: SamplingParams
    max_tokens_field: str
    stream: bool = False
    include_usage: bool = False


def parse_json(body: bytes) -> Any:
    """Parse strict JSON. Raises RequestError."""
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    # ValueError: syntax, encoding, or an integer of thousands of digits
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"body: is not JSON: {reason}", code="invalid_json") from None


def parse_completion(body: Any) -> CompletionCall:
    """Check the body of a completion. Raises RequestError."""
    found = fields(_COMPLETION, "", body)
    return CompletionCall(
        model=required(found, "model"),
        prompts=required(found, "prompt"),
        sampling=_sampling(
            found, found.get("max_tokens", DEFAULT_COMPLETION_TOKENS), found.get("logprobs")
        ),
        stream=found.get("stream", False),
        include_usage=found.get("stream_options", False),
    )


def parse_chat(body: Any) -> ChatCall:
    """Check the body of a chat completion. Raises RequestError."""
    found = fields(_CHAT, "", body)
    given = [name for name in ("max_completion_tokens", "max_tokens") if name in found]
    if len(given) == 2 and found[given[0]] != found[given[1]]:
        refuse("max_tokens", "equal to max_completion_tokens", found["max_tokens"])
    asked, top = found.get("logprobs", False), found.get("top_logprobs", 0)
    if top and not asked:
        refuse("top_logprobs", "0 unless logprobs is true", top)
    return ChatCall(
        model=required(found, "model"),
        messages=required(found, "messages"),
        sampling=_sampling(found, found[given[0]] if given else None, top if asked else None),
        max_tokens_field=given[0] if given else "max_completion_tokens",
        stream=found.get("stream", False),
        include_usage=found.get("stream_options", False),
    )


def _sampling(
    found: dict[str, Any], max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=found.get("temperature"),
        top_p=found.get("top_p"),
        seed=found.get("seed"),
        stop=found.get("stop", ()),
        logprobs=logprobs,
    )


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _stop(path: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (str, list)):
        refuse(path, f"a string or a list of at most {MAX_STOPS}", value, "invalid_type")
    if isinstance(value, str):
        value, paths = [value], [path]
    else:
        paths = [f"{path}[{index}]" for index in range(len(value))]
    if len(value) > MAX_STOPS:
        refuse(path, f"a list of at most {MAX_STOPS} strings", value)
    for inner, stop in zip(paths, value, strict=True):
        if not text(inner, stop):
            refuse(inner, "a string that is not empty", stop)
    return tuple(value)


_token_id = integer(0, _MAX_INT)


def _prompt(path: str, value: Any) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (text(path, value),)
    if not isinstance(value, list):
        refuse(path, "a string, a list of token ids, or a list of those", value, "invalid_type")
    if not value:
        refuse(path, "a list that is not empty", value)
    if all(isinstance(item, int) for item in value):
        return (_token_ids(path, value),)
    if len(value) > MAX_PROMPTS:
        raise RequestError(
            f"{path}: must be at most {MAX_PROMPTS} prompts, got {len(value)}",
            param=path,
            code="invalid_value",
        )
    kind = str if isinstance(value[0], str) else list
    prompts: list[Prompt] = []
    for index, item in enumerate(value):
        inner = f"{path}[{index}]"
        if not isinstance(item, kind):
            refuse(inner, "of one kind with the other prompts", item, "invalid_type")
        prompts.append(text(inner, item) if isinstance(item, str) else _token_ids(inner, item))
    return tuple(prompts)


def _token_ids(path: str, value: list[Any]) -> tuple[int, ...]:
    if not value:
        refuse(path, "a list of token ids that is not empty", value)
    return tuple(_token_id(f"{path}[{index}]", item) for index, item in enumerate(value))


def _messages(path: str, value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list):
        refuse(path, "a list of messages", value, "invalid_type")
    if not value:
        refuse(path, "a list that is not empty", value)
    messages = []
    for index, item in enumerate(value):
        inner = f"{path}[{index}]"
        found = fields(_MESSAGE, inner, item)
        role, content = required(found, "role", inner), required(found, "content", inner)
        messages.append(Message(role, content))
    return tuple(messages)


def _content(path: str, value: Any) -> str:
    if isinstance(value, str):
        return text(path, value)
    if not isinstance(value, list):
        refuse(path, "a string or a list of text parts", value, "invalid_type")
    parts = []
    for index, item in enumerate(value):
        inner = f"{path}[{index}]"
        kind = item.get("type") if isinstance(item, dict) else None
        if kind not in (None, "text"):
            # named first: an image part has other fields too, which are not what is wrong with it
            refuse(f"{inner}.type", '"text", as the model is text only', kind, "unsupported_value")
        found = fields(_PART, inner, item)
        required(found, "type", inner)
        parts.append(required(found, "text", inner))
    return "".join(parts)


_count = integer(0, MAX_LOGPROBS)


def _completion_logprobs(path: str, value: Any) -> int | None:
    # false asks for nothing; some clients say so though the field is a number here
    return None if value is False else int(_count(path, value))


def _stream_options(path: str, value: Any) -> bool:
    found = fields(_STREAM_OPTIONS, path, value)
    return bool(found.get("include_usage", False))


_STREAM_OPTIONS: dict[str, Check] = {"include_usage": boolean, "include_obfuscation": only(False)}

_PART: dict[str, Check] = {"type": choice("text"), "text": text}

_MESSAGE: dict[str, Check] = {
    "role": choice("system", "user", "assistant"),
    "content": _content,
    "name": only(),
    # what an answer of a server carries when a client sends it back
    "refusal": only(),
    "annotations": only([]),
    "audio": only(),
    "function_call": only(),
    "tool_calls": only([]),
}

_COMMON: dict[str, Check] = {
    "model": text,
    "max_tokens": integer(1, _MAX_INT),
    "temperature": number(0.0, 2.0),
    "top_p": number(0.0, 1.0),
    "seed": integer(-_MAX_INT - 1, _MAX_INT),
    "stop": _stop,
    "stream": boolean,
    "stream_options": _stream_options,
    "user": text,
    "n": only(1),
    "presence_penalty": only(0),
    "frequency_penalty": only(0),
    "logit_bias": only({}),
}

_COMPLETION: dict[str, Check] = _COMMON | {
    "prompt": _prompt,
    "best_of": only(1),
    "echo": only(False),
    "logprobs": _completion_logprobs,
    "suffix": only(""),
}

_CHAT: dict[str, Check] = _COMMON | {
    "messages": _messages,
    "max_completion_tokens": integer(1, _MAX_INT),
    "logprobs": boolean,
    "top_logprobs": _count,
    "response_format": only({"type": "text"}),
    "modalities": only(["text"]),
    "tools": only([]),
    "tool_choice": only("none", "auto"),
    "parallel_tool_calls": only(True, False),
    "functions": only([]),
    "function_call": only("none", "auto"),
    "audio": only(),
    "prediction": only(),
    "web_search_options": only(),
    "reasoning_effort": only(),
    "verbosity": only(),
    "service_tier": only("auto", "default"),
    "store": only(False),
    "metadata": ignored,
    "prompt_cache_key": text,
    "safety_identifier": text,
}
