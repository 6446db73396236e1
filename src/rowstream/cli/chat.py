"""`rowstream chat`: a conversation in the terminal with a server of OpenAI's chat API."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import unicodedata
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from rowstream.cli.arguments import Commands, add_command, positive
from rowstream.errors import RowstreamError, UnavailableError

if TYPE_CHECKING:
    from rowstream.serve.client import ChatClient

__all__ = ["add_to"]

_EXAMPLES = """\
  rowstream serve demo          # in another terminal
  rowstream chat
  rowstream chat --url http://gpu-box:8000/v1 --system 'Answer briefly.' --temperature 0

in the chat:
  /reset starts anew, /quit or Ctrl-D ends; Ctrl-C stops an answer
"""


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "chat",
        help="talk to a served model in the terminal",
        description="Talk to a model that `rowstream serve`, or another server with OpenAI's API, "
        "serves. Answers appear as they come, and the model sees all turns before.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000/v1",
        help="where the API is (default: http://127.0.0.1:8000/v1)",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="which model (default: the first that is served)"
    )
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before all turns")
    parser.add_argument(
        "--temperature", metavar="T", type=float, help="0 takes the likeliest token each time"
    )
    parser.add_argument(
        "--max-tokens", metavar="N", type=positive, help="tokens of one answer at most"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends."""
    from rowstream.serve.client import ChatClient

    client = ChatClient(args.url)
    model = args.model
    if model is None:
        names = client.models()
        if not names:
            raise UnavailableError(f"{args.url}: no model is served")
        model = names[0]
    settings = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    conversation = Conversation(
        client,
        model,
        system=args.system,
        settings={name: value for name, value in settings.items() if value is not None},
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        # where the terminal lacks a character the rest is still worth showing
        sys.stdout.reconfigure(errors="replace")
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() edits lines with it
        print(f"{model} at {args.url}; /reset starts anew, /quit or Ctrl-D ends")
    for line in _lines():
        if line == "/quit":
            break
        if line == "/reset":
            conversation.reset()
            print("(a new conversation)")
        elif line.startswith("/"):
            print(f"rowstream: error: {line.split()[0]}: is not a command", file=sys.stderr)
        else:
            _answer(conversation, line)
    return 0


class Conversation:
    """The turns so far, and the model that continues them."""

    def __init__(
        self, client: ChatClient, model: str, *, system: str | None, settings: dict[str, Any]
    ) -> None:
        self._client = client
        self._model = model
        self._settings = settings
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.turns = list(self._opening)

    def reset(self) -> None:
        """Forget all turns."""
        self.turns = list(self._opening)

    def say(self, text: str) -> Generator[str, None, None]:
        """Yield the answer in pieces; what came of it stays, unless nothing did.

        An interrupted answer is an answer too: the next turn can refer to it.
        """
        asked = {"role": "user", "content": text}
        pieces: list[str] = []
        stream = self._client.chat(self._model, [*self.turns, asked], **self._settings)
        try:
            for piece in stream:
                pieces.append(piece)
                yield piece
        finally:
            stream.close()
            if pieces:
                self.turns += [asked, {"role": "assistant", "content": "".join(pieces)}]


def _answer(conversation: Conversation, line: str) -> None:
    with contextlib.closing(conversation.say(line)) as pieces:
        try:
            for piece in pieces:
                print(_printable(piece), end="", flush=True)
            print()
        except KeyboardInterrupt:
            print(" (stopped)")
        except RowstreamError as error:
            print()
            print(f"rowstream: error: {' '.join(str(error).split())}", file=sys.stderr)


def _printable(text: str) -> str:
    # a model can write the control sequences of a terminal too
    return "".join(
        "\ufffd"
        if unicodedata.category(character) == "Cc" and character not in "\n\t"
        else character
        for character in text
    )


def _lines() -> Iterator[str]:
    """Yield what the user says, without empty lines, until the input ends."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            if sys.stdin.isatty():
                print()
            return
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            print()  # drops the line that was begun
            continue
        if line:
            yield line
