"""`rowstream serve` in a process of its own, and the signals that end it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from live_server import until

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
