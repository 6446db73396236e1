"""Clients that are slow, gone, many or hostile, and the end of the server under them.

Everything goes over real sockets, most of it to a scripted engine.
"""

from __future__ import annotations

import contextlib
import errno
import functools
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
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from rowstream.errors import ReadError
from rowstream.runtime.engine import Chunk, Engine
from rowstream.serve import server as serving
from rowstream.serve.connection import MAX_HEAD_BYTES, Connection
from rowstream.serve.http import HttpServer
from rowstream.serve.server import bind, url
from scripted import ScriptedEngine

CALL: dict[str, Any] = {"model": "org/tiny", "prompt": "hello"}
BIG = "x" * 65536


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def served(engine: Engine, **options: Any) -> Iterator[Any]:
    """Run the server in a thread; `server.address` is its address."""
    server: Any = HttpServer(engine, **options)
    with bind("127.0.0.1", 0) as listener:
        server.address = listener.getsockname()[:2]
        server.url = url(listener)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            until(lambda: bool(server.started))
            yield server
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive()


def connect(server: Any, sent: bytes = b"", **options: int) -> socket.socket:
    client = socket.socket()
    for name, value in options.items():
        client.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    client.settimeout(60)
    client.connect(server.address)
    client.sendall(sent)
    return client


def message(call: dict[str, Any], *headers: str, length: int | None = None) -> bytes:
    body = json.dumps(call).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def read_all(client: socket.socket) -> bytes:
    """Read until the other side closes, or resets."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            data += part
    return data


def connections(server: Any) -> int:
    return len(server.server_state.connections)


def test_a_stream_that_nobody_reads_is_cancelled() -> None:
    chunks = [Chunk("a", (1,)), *(Chunk(BIG, (2,)) for _ in range(300))]
    engine = ScriptedEngine(chunks, open_ended=True)
    with served(engine, stall_s=0.5) as server:
        with connect(server, message(CALL | {"stream": True}), SO_RCVBUF=4096) as stuck:
            until(lambda: bool(engine.generations))
            (generation,) = engine.generations
            until(lambda: generation.cancelled)
            # meanwhile others are served
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
            assert stuck.recv(12) == b"HTTP/1.1 200"
        until(lambda: connections(server) == 0)
        found = httpx.get(f"{server.url}/metrics", timeout=60).text
        assert "rowstream_cancelled_requests_total 1.0" in found


def test_a_slow_reader_gets_everything() -> None:
    chunks = [*(Chunk(BIG, (2,)) for _ in range(150)), Chunk("", (), "stop")]
    engine = ScriptedEngine(chunks)
    with served(engine, stall_s=4) as server:
        head = message(CALL | {"stream": True}, "Connection: close")
        with connect(server, head, SO_RCVBUF=1 << 16) as slow:
            received = bytearray()
            began = time.monotonic()
            while part := slow.recv(1 << 18):
                received += part
                if time.monotonic() < began + 6:
                    time.sleep(0.1)
    assert received.count(b"x") >= 150 * len(BIG)
    assert b"data: [DONE]" in received


def test_an_answer_that_nobody_reads_ends_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(serving._KEEPALIVE, "TCP_USER_TIMEOUT", 1000)
    engine = ScriptedEngine([Chunk(BIG, (1,))] * 300 + [Chunk("", (), "stop")])
    with served(engine) as server, connect(server, message(CALL), SO_RCVBUF=4096):
        until(lambda: bool(engine.generations))
        until(lambda: connections(server) == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_leaves_while_it_waits_is_not_answered(stream: bool) -> None:
    engine = ScriptedEngine([], open_ended=True)
    with served(engine) as server:
        client = connect(server, message(CALL | {"stream": stream}))
        until(lambda: bool(engine.generations))
        client.close()
        until(lambda: engine.generations[0].cancelled)


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_does_not_come(sent: bytes) -> None:
    class Impatient(Connection):
        head_timeout_s = 0.3

    with served(ScriptedEngine(), connection=Impatient) as server, connect(server) as client:
        with contextlib.suppress(ConnectionError):  # a busy machine may need longer to begin
            client.sendall(sent)
        assert read_all(client) == b""


def test_a_head_that_does_not_come_after_an_answer() -> None:
    class Impatient(Connection):
        head_timeout_s = 60.0

    with (
        served(ScriptedEngine(), connection=Impatient) as server,
        connect(server, message(CALL)) as client,
    ):
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        Impatient.head_timeout_s = 0.3
        # bytes now and then would keep uvicorn's own timer quiet
        until(lambda: is_broken(client, b"X"))


def is_broken(client: socket.socket, sent: bytes) -> bool:
    time.sleep(0.05)
    try:
        client.sendall(sent)
    except ConnectionError:
        return True
    return False


def test_what_takes_its_time_after_its_head_is_not_touched() -> None:
    class Impatient(Connection):
        head_timeout_s = 3.0

    engine = ScriptedEngine((Chunk("a", (1,)), Chunk("b", (2,), "stop")), held=True)
    with (
        served(engine, connection=Impatient) as server,
        connect(server, message(CALL, "Connection: close")) as client,
    ):
        until(lambda: bool(engine.generations))
        time.sleep(3.3)
        engine.generations[-1].put(engine.script[1])
        assert b'"text": "ab"' in read_all(client)


def test_a_body_that_does_not_come() -> None:
    with served(ScriptedEngine(), body_timeout_s=0.3) as server:
        with connect(server, message(CALL, length=1000)) as client:
            answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"code": "request_timeout"' in answer


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 40,
        b"GET / HTTP/1.1 HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 20 * MAX_HEAD_BYTES,
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * MAX_HEAD_BYTES,
    ],
)
def test_what_is_not_http(sent: bytes) -> None:
    with served(ScriptedEngine()) as server:
        with connect(server) as client:
            # the server may answer and close before all of it is sent
            with contextlib.suppress(ConnectionError):
                client.sendall(sent)
            assert re.match(rb"HTTP/1\.1 (400|431) |$", read_all(client))
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


def test_connections_have_a_limit() -> None:
    class Few(Connection):
        max_connections = 3

    with served(ScriptedEngine(), connection=Few) as server:
        clients = [connect(server) for _ in range(3)]
        until(lambda: connections(server) == 3)
        with connect(server) as one_more:
            assert read_all(one_more).startswith(b"HTTP/1.1 503 ")
        for client in clients:
            client.close()
        until(lambda: connections(server) == 0)
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


def test_an_end_waits_for_what_runs_and_refuses_connections() -> None:
    engine = ScriptedEngine([], open_ended=True)
    with served(engine) as server, connect(server, message(CALL)) as client:
        until(lambda: bool(engine.generations))
        server.should_exit = True
        until(lambda: engine.drained)
        until(lambda: refuses(server))
        engine.generations[0].put(Chunk("late", (1,), "stop"))
        assert b'"text": "late"' in read_all(client)


def refuses(server: Any) -> bool:
    with socket.socket() as client:
        return client.connect_ex(server.address) == errno.ECONNREFUSED


# --- the whole server -------------------------------------------------------------------------


HELD_TOKENS = 50
# an answer of so many tokens is begun once a line has come
SERVE = f"""
import sys
from rowstream.cli import main
from rowstream.runtime.generate import TransformersEngine

def held(self, generation, answer=TransformersEngine._answer):
    if generation.request.sampling.max_tokens == {HELD_TOKENS}:
        sys.stdin.readline()
    answer(self, generation)

TransformersEngine._answer = held
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def process(synth_checkpoint: Path) -> Iterator[tuple[Any, str]]:
    """Start `rowstream serve` and return the process and its address."""
    pytest.importorskip("torch")
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, "serve", str(synth_checkpoint), "--port", "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        try:
            assert process.stdout is not None
            said = (re.search(r" at (http://\S+)/v1$", line) for line in process.stdout)
            yield process, next(found[1] for found in said if found)
        finally:
            process.kill()


def ask(address: str, results: list[Any], **changes: Any) -> threading.Thread:
    """Ask in a thread; the answer's status and text come into `results`."""

    def run() -> None:
        call = {"model": "tiny-qwen", "prompt": "a", "temperature": 0} | changes
        try:
            answer = httpx.post(f"{address}/v1/completions", json=call, timeout=120)
            results.append((answer.status_code, answer.text))
        except httpx.HTTPError as error:
            results.append((0, str(error)))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def queue(address: str) -> Any:
    stats = httpx.get(f"{address}/health", timeout=60).json()
    return stats["running"], stats["waiting"]


def turns_away(address: str) -> bool:
    try:
        httpx.get(f"{address}/health", timeout=60)
    except httpx.ConnectError:
        return True
    return False


def test_a_signal_lets_running_answers_end_and_turns_waiting_ones_away(
    process: tuple[Any, str],
) -> None:
    server, address = process
    first: list[Any] = []
    waiting: list[Any] = []
    threads = [ask(address, first, max_tokens=HELD_TOKENS)]
    until(lambda: queue(address) == (1, 0))
    threads += [ask(address, waiting, max_tokens=3, stream=stream) for stream in (False, True)]
    until(lambda: queue(address) == (1, 2))
    server.send_signal(signal.SIGTERM)
    for thread in threads[1:]:
        thread.join(60)
    assert len(waiting) == 2, "the waiting ones are told before the running one ends"
    for status, text in waiting:
        assert status == 503
        assert json.loads(text)["error"]["code"] == "shutting_down"
    until(lambda: turns_away(address))
    assert not first
    server.stdin.write("\n")
    server.stdin.flush()
    threads[0].join(120)
    ((status, text),) = first
    assert status == 200
    assert json.loads(text)["usage"]["completion_tokens"] == HELD_TOKENS
    assert server.wait(60) == 0
    said = server.stderr.read()
    assert "Traceback" not in said
    assert "Exception" not in said


def test_a_second_signal_ends_at_once(process: tuple[Any, str]) -> None:
    server, address = process
    results: list[Any] = []
    thread = ask(address, results, max_tokens=30_000)
    until(lambda: queue(address) == (1, 0))
    server.send_signal(signal.SIGTERM)
    until(lambda: turns_away(address))
    assert server.poll() is None
    server.send_signal(signal.SIGINT)
    assert server.wait(30) == -signal.SIGINT  # the answer would take minutes
    thread.join(60)
    assert results[0][0] == 0


def test_a_failed_read_fails_its_request_alone(
    synth_model: Any, synth_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rowstream.engines.transformers import stores
    from rowstream.runtime.generate import TransformersEngine

    (store,) = stores(synth_model)
    gather, calls = store.gather, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        # the first request: in its prefill; the third: in the middle of its answer
        if len(calls) in (1, 9):
            raise ReadError(5, "input/output error", "/secret/path")
        return gather(*args, **kwargs)

    monkeypatch.setattr(store, "gather", failing)
    engine = TransformersEngine(synth_model, synth_tokenizer, name="org/tiny", tables=[store])
    try:
        with served(engine) as server:
            call = CALL | {"max_tokens": 5, "temperature": 0}

            def post(**changes: Any) -> httpx.Response:
                return httpx.post(
                    f"{server.url}/v1/completions",
                    json=call | changes,
                    timeout=120,
                )

            failed, fine, cut, again = post(), post(), post(stream=True), post()
            assert (failed.status_code, fine.status_code) == (500, 200)
            assert failed.json()["error"]["code"] == "read_error"
            assert cut.status_code == 200
            *pieces, last = cut.text.strip().split("\n\n")
            assert len(pieces) > 0
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "read_error"
            assert again.json()["choices"] == fine.json()["choices"]
            for answer in (failed, cut):
                assert "secret" not in answer.text
            status = httpx.get(f"{server.url}/health", timeout=60).json()
            assert status["status"] == "degraded"
            assert not synth_model._forward_hooks
    finally:
        engine.close()


@pytest.mark.parametrize("on_read_error", ["raise", "zero-rows"])
def test_a_table_that_cannot_be_read(
    synth_checkpoint: Path,
    synth_tokenizer: Any,
    on_read_error: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rowstream import _core
    from rowstream.engines.transformers import close, load_model, observe, stores
    from rowstream.runtime.generate import TransformersEngine
    from rowstream.serve.metrics import Metrics

    faults = [_core.Fault(0, 10**9, result=-errno.EIO)]
    failing = functools.partial(_core.DiskTable, faults=faults)
    with monkeypatch.context() as patch:
        patch.setattr(_core, "DiskTable", failing)
        model = load_model(
            synth_checkpoint, table_backend="disk", reader="pool", on_read_error=on_read_error
        )
    engine = TransformersEngine(model, synth_tokenizer, name="org/tiny", tables=stores(model))
    metrics = Metrics(engine)
    observe(model, metrics.lookup)
    try:
        with served(engine, metrics=metrics) as server:
            assert httpx.get(f"{server.url}/health", timeout=60).json()["status"] == "ok"
            call = CALL | {"max_tokens": 4, "temperature": 0}
            answer = httpx.post(f"{server.url}/v1/completions", json=call, timeout=120)
            state = httpx.get(f"{server.url}/health", timeout=60).json()
            text = httpx.get(f"{server.url}/metrics", timeout=60).text
            assert state["status"] == "degraded"
            label = '{table="layers.1.ple"}'
            assert f"rowstream_table_read_errors_total{label} 0.0" not in text
            if on_read_error == "raise":
                assert answer.status_code == 500
                assert answer.json()["error"]["code"] == "read_error"
                assert state["reason"].startswith("a read failed ")
                assert 'rowstream_errors_total{kind="read_error"} 1.0' in text
                assert f"rowstream_table_zeroed_rows_total{label} 0.0" in text
            else:
                assert answer.status_code == 200
                zeroed = r"layers\.1\.ple: (\d+) rows could not be read and were zeroes$"
                count = re.match(zeroed, state["reason"])
                assert count is not None
                assert f"rowstream_table_zeroed_rows_total{label} {count[1]}.0" in text
    finally:
        engine.close()
        close(model)
