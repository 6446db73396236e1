"""Checks of single JSON values: each takes a path and a value, and returns or refuses the value.

The rules of whole requests are in `schema`; the shape of an answer that refuses is here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from rowstream.errors import shown

Check = Callable[[str, Any], Any]


class RequestError(Exception):
    """A request that is not answered: HTTP status, message, field, and a code for programs."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.kind = kind
        self.headers = headers

    def body(self) -> dict[str, object]:
        """Return OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def refuse(path: str, need: str, value: object, code: str = "invalid_value") -> NoReturn:
    """Raise the error for a value that is not what its field needs."""
    raise RequestError(f"{path}: must be {need}, got {_described(value)}", param=path, code=code)


def _described(value: object) -> str:
    # containers by kind only: a deeply nested one parses, and overflows the stack when rendered
    if isinstance(value, (list, dict)):
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} of {len(value)}" if value else f"an empty {kind.split()[1]}"
    rendered = json.dumps(value)
    return rendered if len(rendered) <= 60 else rendered[:57] + "..."


def boolean(path: str, value: Any) -> bool:
    """Accept true and false."""
    if not isinstance(value, bool):
        refuse(path, "true or false", value, "invalid_type")
    return value


def text(path: str, value: Any) -> str:
    """Accept a string of whole characters."""
    if not isinstance(value, str):
        refuse(path, "a string", value, "invalid_type")
    # JSON can spell half of a surrogate pair, which no tokenizer takes
    if any("\ud800" <= character <= "\udfff" for character in value):
        refuse(path, "a string without lone surrogates", value)
    return value


def integer(low: int, high: int) -> Check:
    """Accept integers from low to high, both included."""
    need = f"an integer from {low} to {high}"

    def check(path: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            refuse(path, need, value, "invalid_type")
        if not low <= value <= high:
            refuse(path, need, value)
        return value

    return check


def number(low: float, high: float) -> Check:
    """Accept numbers from low to high, both included, as float."""
    need = f"a number from {low:g} to {high:g}"

    def check(path: str, value: Any) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            refuse(path, need, value, "invalid_type")
        if not low <= value <= high:
            refuse(path, need, value)
        return float(value)

    return check


def choice(*values: str) -> Check:
    """Accept one of some strings."""
    need = "one of " + ", ".join(map(json.dumps, values))

    def check(path: str, value: Any) -> str:
        if value not in values:
            refuse(path, need, value)
        return str(value)

    return check


def only(*values: Any) -> Check:
    """Accept null and the values that ask for nothing: the field is not supported otherwise."""
    need = " or ".join(["null", *map(json.dumps, values)])

    def check(path: str, value: Any) -> None:
        # 1 == True in Python, but not in JSON
        if not any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in values
        ):
            refuse(path, f"{need}, as the server supports nothing else", value, "unsupported_value")

    return check


def ignored(path: str, value: Any) -> None:
    """Accept any value of a field that has no influence on the answer."""


def fields(known: Mapping[str, Check], path: str, value: Any) -> dict[str, Any]:
    """Check an object's fields and return those that are not null; unknown ones are refused."""
    if not isinstance(value, dict):
        refuse(path or "body", "an object", value, "invalid_type")
    found = {}
    for name, item in value.items():
        inner = f"{path}.{shown(name)}" if path else shown(name)
        if name not in known:
            raise RequestError(
                f"{inner}: is not a field that the server knows",
                param=inner,
                code="unknown_parameter",
            )
        if item is not None:
            found[name] = known[name](inner, item)
    return found


def required(found: Mapping[str, Any], name: str, path: str = "") -> Any:
    """Return a field that must be there."""
    inner = f"{path}.{name}" if path else name
    if name not in found:
        raise RequestError(f"{inner}: is required", param=inner, code="missing_required_parameter")
    return found[name]
