"""A client of OpenAI's chat API, for the terminal: streams answers with the standard library alone.

Knows no model and no engine; any server with that API will do.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rowstream.errors import RowstreamError, UnavailableError

__all__ = ["AnswerError", "ChatClient"]

_MAX_ERROR_BYTES = 1 << 16


class AnswerError(RowstreamError):
    """Say that the server refused a request, or that its answer broke off."""


class ChatClient:
    """Talk to the API at a base URL such as http://127.0.0.1:8000/v1."""

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        """Check the URL, without a connection. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: needs http://host:port/v1, got {url!r}")
        self.url = url
        self._host = parts.hostname
        self._port = parts.port
        self._path = parts.path.rstrip("/")
        self._secure = parts.scheme == "https"
        self._timeout_s = timeout_s

    def models(self) -> list[str]:
        """Return the names that are served. Raises UnavailableError, AnswerError."""
        connection = self._connect()
        try:
            answer = self._ask(connection, "GET", "/models", None)
            names = [str(model["id"]) for model in json.loads(answer.read())["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise AnswerError(f"{self.url}: /models is not a list of models") from error
        finally:
            connection.close()
        return names

    def chat(
        self, model: str, messages: Sequence[Mapping[str, str]], **settings: Any
    ) -> Generator[str, None, None]:
        """Yield the pieces of the next turn as they come; closing the generator ends the request.

        Raises UnavailableError where nobody answers, AnswerError with the server's words.
        """
        call = {"model": model, "messages": list(messages), "stream": True, **settings}
        connection = self._connect()
        try:
            answer = self._ask(connection, "POST", "/chat/completions", json.dumps(call))
            yield from self._pieces(answer)
        except (http.client.HTTPException, OSError) as error:
            raise AnswerError(f"{self.url}: the answer broke off: {_reason(error)}") from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.connect()
        except OSError as error:
            raise UnavailableError(f"{self.url}: {_reason(error)}") from error
        return connection

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: str | None
    ) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json"} if body is not None else {}
        try:
            connection.request(method, self._path + path, body, headers)
            answer = connection.getresponse()
        except (http.client.HTTPException, OSError) as error:
            raise AnswerError(f"{self.url}: {_reason(error)}") from error
        if answer.status != 200:
            text = answer.read(_MAX_ERROR_BYTES).decode(errors="replace")
            raise AnswerError(_error_text(text) or f"{self.url}: HTTP status {answer.status}")
        return answer

    def _pieces(self, answer: http.client.HTTPResponse) -> Iterator[str]:
        for line in answer:
            name, _, data = line.decode(errors="replace").strip().partition(": ")
            if name != "data":
                continue
            if data == "[DONE]":
                return
            if (refusal := _error_text(data)) is not None:
                raise AnswerError(refusal)
            try:
                choices = json.loads(data)["choices"]
                piece = choices[0]["delta"].get("content") if choices else None
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise AnswerError(f"{self.url}: an event is not one of a chat") from error
            if piece:
                yield str(piece)
        raise AnswerError(f"{self.url}: the answer broke off")


def _error_text(body: str) -> str | None:
    """Return the message of an error object."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text)[:1].lower() + str(text)[1:]
