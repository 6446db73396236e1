"""Clients that are slow, gone, many or hostile, over real sockets to a scripted engine."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import socket
import time
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from live_server import CALL, served, until
from rowstream.runtime.engine import Chunk
from rowstream.serve import server as serving
from rowstream.serve.connection import MAX_HEAD_BYTES, Connection
from scripted import ScriptedEngine

BIG = "x" * 65536


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
