"""`rowstream chat` in a terminal and in a pipe, against a server that answers as it is told."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rowstream.errors import UnavailableError
from rowstream.serve.client import AnswerError, ChatClient

COMMAND = "import sys; from rowstream.cli import main; sys.exit(main(['chat', *sys.argv[1:]]))"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "dumb"}


def event(text: str) -> bytes:
    body = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
    return f"data: {json.dumps(body)}\n\n".encode()


class Handler(BaseHTTPRequestHandler):
    """Answer turn by turn from the server's `script`; a number waits, None breaks off."""

    server: Any

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(200, {"object": "list", "data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        size = int(self.headers["content-length"])
        self.server.calls.append(json.loads(self.rfile.read(size)))
        turn = self.server.script[len(self.server.calls) - 1]
        if isinstance(turn, str):
            self.reply(400, {"error": {"message": turn, "type": "invalid_request_error"}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n: comment\n\n')
        try:
            for part in turn:
                if part is None:
                    return
                if isinstance(part, int):
                    self.wait_for_the_client_to_leave(part)
                else:
                    self.wfile.write(event(part))
            self.wfile.write(b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')
        except OSError:
            self.server.left.set()

    def wait_for_the_client_to_leave(self, seconds: int) -> None:
        readable, _, _ = select.select([self.connection], [], [], seconds)
        if readable and self.connection.recv(1) == b"":
            self.server.left.set()

    def reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.models, server.script, server.calls = ["tiny"], [], []
    server.left = threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def pipe(server: Any, typed: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "--url", server.url, *arguments],
        input=typed,
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
    )


def test_turns_add_up_and_settings_are_sent(server: Any) -> None:
    server.script = [["Hel", "lo ", "☺"], ["bye"], ["anew"]]
    done = pipe(
        server,
        "hi there\n\n  and now?  \n/reset\nhello\n/quit\nnever\n",
        *("--system", "be brief", "--temperature", "0", "--max-tokens", "7"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Hello ☺\nbye\n(a new conversation)\nanew\n"
    system = {"role": "system", "content": "be brief"}
    first = [system, {"role": "user", "content": "hi there"}]
    assert [call["messages"] for call in server.calls] == [
        first,
        [
            *first,
            {"role": "assistant", "content": "Hello ☺"},
            {"role": "user", "content": "and now?"},
        ],
        [system, {"role": "user", "content": "hello"}],
    ]
    for call in server.calls:
        assert (call["model"], call["stream"]) == ("tiny", True)
        assert (call["temperature"], call["max_tokens"]) == (0, 7)


def test_an_error_is_one_line_and_the_chat_goes_on(server: Any) -> None:
    server.models = []
    server.script = ["no\nroom", ["half", None], ["fine"]]
    done = pipe(server, "one\ntwo\n/what\nthree\n", "--model", "other")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "rowstream: error: no room",
        f"rowstream: error: {server.url}: the answer broke off",
        "rowstream: error: /what: is not a command",
    ]
    assert done.stdout == "\nhalf\nfine\n"
    # what was refused is forgotten, what was said is not
    assert server.calls[-1] == {
        "model": "other",
        "stream": True,
        "messages": [
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "half"},
            {"role": "user", "content": "three"},
        ],
    }


def test_control_sequences_do_not_reach_the_terminal(server: Any) -> None:
    server.script = [["a\x1b[2J\x07b\tc\nd\x9b"]]
    assert pipe(server, "x\n").stdout == "a\ufffd[2J\ufffdb\tc\nd\ufffd\n"


def test_nobody_there_and_nothing_served(server: Any) -> None:
    server.models = []
    done = pipe(server, "hi\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"rowstream: error: {server.url}: no model is served\n"
    server.url = "http://127.0.0.1:1/v1"
    done = pipe(server, "hi\n")
    assert done.returncode == 1
    assert done.stderr == "rowstream: error: http://127.0.0.1:1/v1: connection refused\n"
    server.url = "127.0.0.1:8000"
    assert pipe(server, "hi\n").stderr.startswith("rowstream: error: url: needs http://host")


# the leader of a new session owns the first terminal that it opens, and hears its Ctrl-C whatever
# our own parent ignores
IN_TERMINAL = (
    "import os, signal; os.close(os.open(os.ttyname(0), os.O_RDWR)); "
    f"signal.signal(signal.SIGINT, signal.default_int_handler); {COMMAND}"
)


class Terminal:
    """The chat on a pseudo-terminal."""

    def __init__(self, url: str) -> None:
        self.main, side = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, "--url", url],
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            env=ENVIRONMENT,
        )
        os.close(side)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    def wait_for(self, text: str) -> None:
        """Read until a text appears after what was waited for before."""
        deadline = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.main], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.main, 4096).decode()
                except OSError:  # the other side is closed
                    break
        assert text in self.seen, self.seen
        self.seen = self.seen[self.seen.index(text) + len(text) :]

    def wait_until_it_sleeps(self) -> None:
        """Wait until the chat has come to no step for a while: it waits for a key."""
        task = Path(f"/proc/{self.process.pid}/task/{self.process.pid}")
        deadline = time.monotonic() + 60
        before = ""
        while True:
            time.sleep(0.3)
            # its state, and the processor time that it has had
            now = (task / "stat").read_text().split()[2] + (task / "schedstat").read_text()
            if now == before and now[0] == "S":
                return
            before = now
            assert time.monotonic() < deadline

    def end(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            os.close(self.main)


def test_a_terminal_where_ctrl_c_stops_an_answer_and_ctrl_d_ends(server: Any) -> None:
    server.script = [["one ", "two ", 120, "never"], ["three"]]
    terminal = Terminal(server.url)
    terminal.wait_for("> ")
    terminal.type("half a line")
    terminal.wait_for("half a line")
    # readline misses a signal that comes just before it waits for a key
    terminal.wait_until_it_sleeps()
    terminal.type("\x03")
    terminal.wait_for("> ")
    terminal.type("count\r")
    terminal.wait_for("one two ")
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    terminal.wait_for("> ")
    # the server learns of it, so that the model is free
    assert server.left.wait(60)
    terminal.type("go on\r")
    terminal.wait_for("three")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert server.calls[1]["messages"] == [
        {"role": "user", "content": "count"},
        {"role": "assistant", "content": "one two "},
        {"role": "user", "content": "go on"},
    ]


@pytest.mark.parametrize(
    ("url", "path"),
    [("http://h/v1/", "/v1"), ("https://h:444/a/v1", "/a/v1"), ("http://[::1]:8000", "")],
)
def test_urls(url: str, path: str) -> None:
    assert ChatClient(url)._path == path


@pytest.mark.parametrize("url", ["", "h:8000/v1", "ftp://h/v1", "http:///v1", "http://h:x/v1"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match=r"url: needs http|[Pp]ort"):
        ChatClient(url)


def junk(body: bytes) -> Callable[[Any], None]:
    def reply(handler: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(body)

    return reply


@pytest.mark.parametrize(
    "body", [b"", b"data: {}\n\n", b"data: [\n\n", b'data: {"choices": [5]}\n\n', b"\xff" * 99]
)
def test_answers_that_are_none(server: Any, monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr(Handler, "do_POST", junk(body))
    monkeypatch.setattr(Handler, "do_GET", junk(body))
    client = ChatClient(server.url)
    with pytest.raises(AnswerError):
        list(client.chat("tiny", []))
    with pytest.raises(AnswerError, match="not a list of models"):
        client.models()


def test_a_server_that_hangs_up_or_says_nothing(server: Any) -> None:
    client = ChatClient(server.url, timeout_s=0.2)
    server.script = [[60]]  # or until the client has left
    with pytest.raises(AnswerError, match="timed out"):
        list(client.chat("tiny", []))
    with pytest.raises(UnavailableError, match=r"not known|resolution|service"):
        ChatClient("http://no-such-host.invalid/v1").models()
