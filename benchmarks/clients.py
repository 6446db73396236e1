"""Many clients at one server, a third of them leaving half-way: text, leaks and stuck requests.

Writes a small checkpoint, starts `rowstream serve` as a process of its own, learns the greedy
answers one by one, then lets the clients loose. Fails when a text differs, when memory, open files
or the queue do not go back to where they were, or when a request hangs.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

# before the package: run as a file, Python puts benchmarks/ itself on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.device import Device

RESULTS = Path(__file__).parent / "results"
PROMPTS = ("The river runs through", "one two three", "a", "émigré ☺ and so on", "Tables on disk")
# short answers, so that many clients have their turn with an engine that answers one by one
MAX_TOKENS = (4, 9, 16)
# a client that waits longer than this is stuck; all clients' longest answers take a part of it
STUCK_S = 300.0
MIB = 1 << 20


@dataclass
class Report:
    """What the clients saw, from all their threads."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    outcomes: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def count(self, outcome: str, wait_s: float | None = None) -> None:
        with self.lock:
            self.outcomes[outcome] += 1
            if wait_s is not None:
                self.waits_s.append(wait_s)

    def problem(self, text: str) -> None:
        with self.lock:
            self.outcomes["wrong"] += 1
            self.problems.append(text)


class Server:
    """`rowstream serve` in a process, and what is known of that process from outside."""

    def __init__(self, checkpoint: Path, queue: int) -> None:
        command = [sys.executable, "-m", "rowstream", "serve", str(checkpoint), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--max-queue", str(queue)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r" at http://(\S+):(\d+)/v1$", line):
                self.host, self.port = found[1], int(found[2])
                return
        raise SystemExit(f"the server ended with status {self.process.wait()}")

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def metrics(self) -> dict[str, float]:
        url = f"http://{self.host}:{self.port}/metrics"
        with urllib.request.urlopen(url, timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def idle(self) -> bool:
        found = self.metrics()
        return found["rowstream_requests_running"] == found["rowstream_requests_queued"] == 0

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()


class Client:
    """One client after the other in one thread: it asks, and reads to the end or leaves."""

    def __init__(self, server: Server, model: str, seed: int) -> None:
        self._server = server
        self._model = model
        self._random = random.Random(seed)

    def work(self, deadline: float, expected: dict[tuple[str, int], str], report: Report) -> None:
        while time.monotonic() < deadline:
            prompt = self._random.choice(PROMPTS)
            max_tokens = self._random.choice(MAX_TOKENS)
            stream = self._random.random() < 0.7
            leaves = self._random.random() < 1 / 3
            began = time.monotonic()
            try:
                if leaves:
                    self._leave(prompt, max_tokens, stream)
                    report.count("left")
                    continue
                status, text = self.ask(prompt, max_tokens, stream)
            except (OSError, HTTPException, ValueError) as error:
                report.problem(f"{prompt!r}: {type(error).__name__}: {error}")
                continue
            if status == 429:
                report.count("turned away")
                time.sleep(self._random.random())
            elif status != 200 or text != expected[prompt, max_tokens]:
                report.problem(f"{prompt!r}, {max_tokens} tokens: status {status}, {text!r}")
            else:
                report.count("answered", time.monotonic() - began)

    def ask(self, prompt: str, max_tokens: int, stream: bool) -> tuple[int, str]:
        """Return the status and the text of an answer."""
        connection = self._send(prompt, max_tokens, stream)
        try:
            answer = connection.getresponse()
            body = answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            return answer.status, body
        if not stream:
            return 200, str(json.loads(body)["choices"][0]["text"])
        events = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
        if events.pop() != "[DONE]":
            raise ValueError("the stream broke off")
        return 200, "".join(json.loads(event)["choices"][0]["text"] for event in events)

    def _leave(self, prompt: str, max_tokens: int, stream: bool) -> None:
        """Ask and be gone: while the request waits, or after some bytes of the answer."""
        connection = self._send(prompt, max_tokens, stream)
        try:
            connection.sock.settimeout(self._random.choice((0.0, 0.01, 0.3, 3.0, STUCK_S)))
            connection.sock.recv(self._random.randrange(1, 2000))
        except (TimeoutError, BlockingIOError):
            pass
        finally:
            connection.close()

    def _send(self, prompt: str, max_tokens: int, stream: bool) -> HTTPConnection:
        call: dict[str, Any] = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens}
        call |= {"temperature": 0, "stream": stream}
        connection = HTTPConnection(self._server.host, self._server.port, timeout=STUCK_S)
        connection.request("POST", "/v1/completions", json.dumps(call))
        return connection


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300, help="of load (default: 300)")
    parser.add_argument("--warm-up", type=float, default=None, help="default: a tenth of it, 5 up")
    parser.add_argument(
        "--max-growth-mib", type=float, default=16, help="of resident memory after the warm-up"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--no-csv", action="store_true", help="print the results alone")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = Path(tempfile.mkdtemp(prefix="rowstream-clients-"))
    try:
        return measure(folder, arguments)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, arguments: argparse.Namespace) -> int:
    checkpoint = folder / "tiny"
    synth = [sys.executable, "-m", "rowstream", "synth", str(checkpoint), "--table-gib", "0.05"]
    subprocess.run(synth, check=True)
    server = Server(checkpoint, arguments.clients)
    print(f"seed {arguments.seed}, process {server.process.pid}")
    try:
        row, problems = load(server, checkpoint.name, arguments)
    finally:
        status = server.stop()
    if status != 0:
        problems.append(f"the server ended with status {status}")
    for name, value in row.items():
        print(f"{name:<24} {value}")
    if not arguments.no_csv:
        write(Device(RESULTS.parent).machine(), row)
    for problem in problems[:20]:
        print(f"PROBLEM: {problem}")
    print("failed" if problems else "passed")
    return 1 if problems else 0


def load(
    server: Server, model: str, arguments: argparse.Namespace
) -> tuple[dict[str, Any], list[str]]:
    alone = Client(server, model, 0)
    expected = {}
    for prompt in PROMPTS:
        for max_tokens in MAX_TOKENS:
            status, text = alone.ask(prompt, max_tokens, False)
            assert status == 200, text
            expected[prompt, max_tokens] = text
    settle(server.idle)
    files = server.open_files()
    warm_up_s = arguments.warm_up or max(5.0, arguments.seconds / 10)
    crowd(server, model, arguments.clients, warm_up_s, arguments.seed, expected, Report())
    settle(server.idle)
    resident, before = server.resident_bytes(), server.metrics()

    report, peaks = Report(), []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            peaks.append(server.resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    stuck = crowd(
        server, model, arguments.clients, arguments.seconds, arguments.seed + 1, expected, report
    )
    elapsed_s = time.monotonic() - began
    done.set()
    watcher.join()
    problems = list(report.problems)
    if stuck:
        problems.append(f"{stuck} clients are stuck")
    if not settle(server.idle):
        problems.append("requests still wait or run after the last client has left")
    if not settle(lambda: server.open_files() <= files):
        problems.append(f"{server.open_files()} files are open, {files} were before")
    grown = server.resident_bytes() - resident
    if grown > arguments.max_growth_mib * MIB:
        problems.append(f"memory grew by {grown / MIB:.1f} MiB")
    after = server.metrics()
    cancelled = "rowstream_cancelled_requests_total"
    tokens = "rowstream_completion_tokens_total"
    waits = sorted(report.waits_s) or [0.0]
    return {
        "clients": arguments.clients,
        "seconds": round(elapsed_s, 1),
        "answered": report.outcomes["answered"],
        "left": report.outcomes["left"],
        "turned_away": report.outcomes["turned away"],
        "wrong": report.outcomes["wrong"],
        "stuck": stuck,
        "cancelled_by_server": int(after[cancelled] - before[cancelled]),
        "tokens_per_s": round((after[tokens] - before[tokens]) / elapsed_s, 1),
        "wait_p50_s": round(waits[len(waits) // 2], 2),
        "wait_p99_s": round(waits[len(waits) * 99 // 100], 2),
        "resident_mib": round(resident / MIB, 1),
        "resident_grown_mib": round(grown / MIB, 2),
        "resident_peak_mib": round(max(peaks, default=resident) / MIB, 1),
        "open_files_before": files,
        "open_files_after": server.open_files(),
    }, problems


def crowd(
    server: Server,
    model: str,
    clients: int,
    seconds: float,
    seed: int,
    expected: dict[tuple[str, int], str],
    report: Report,
) -> int:
    """Let clients loose for a time and return how many did not come back."""
    deadline = time.monotonic() + seconds
    threads = [
        threading.Thread(
            target=Client(server, model, seed * clients + index).work,
            args=(deadline, expected, report),
            daemon=True,
        )
        for index in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline + 2 * STUCK_S - time.monotonic()))
    return sum(thread.is_alive() for thread in threads)


def settle(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Wait until something is so, and say whether it came to be."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def write(machine: str, row: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"clients-{machine}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
