"""`/metrics` and `/health`: every count has one cause, and Prometheus can read them."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from rowstream.errors import ReadError
from rowstream.runtime.engine import Chunk
from rowstream.serve.app import create_app
from rowstream.serve.metrics import Metrics
from scripted import ScriptedEngine

COMPLETION: dict[str, Any] = {"model": "org/tiny", "prompt": "hello"}
TABLE: dict[str, object] = {
    "table": "layers.1.ple",
    "backend": "disk",
    "reader": "uring",
    "on_read_error": "zero-rows",
    "memory_bytes": 1000,
    "table_bytes": 48 << 30,
    "gathers": 2.0,
    "rows": 64.0,
    "reads": 7.0,
    "read_bytes": 28672.0,
    "duplicate_rows": 5.0,
    "missing_rows": 4.0,
    "retries": 3.0,
    "read_errors": 2.0,
    "timeouts": 1.0,
    "zeroed_rows": 0.0,
}
DISK = ReadError(5, "input/output error", "/secret/path")


class Server:
    """An app in this process, asked in event loops of its own."""

    def __init__(self, engine: ScriptedEngine, metrics: Metrics | None = None) -> None:
        self.engine = engine
        self.app = create_app(engine, metrics=metrics)

    def ask(self, method: str, path: str, **content: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **content)

        return asyncio.run(call())

    def complete(self, **changes: Any) -> httpx.Response:
        return self.ask("POST", "/v1/completions", json=COMPLETION | changes)

    def health(self) -> tuple[int, Any]:
        answer = self.ask("GET", "/health")
        return answer.status_code, answer.json()

    def metrics(self) -> dict[str, float]:
        """Return samples by name and labels: `name{a=b,c=d}`."""
        answer = self.ask("GET", "/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        return samples(answer.text)


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            name = sample.name + (f"{{{labels}}}" if labels else "")
            assert name not in found, "a sample is there twice"
            found[name] = sample.value
    return found


@pytest.fixture
def server() -> Server:
    engine = ScriptedEngine()
    engine.tables = [TABLE]
    return Server(engine)


def test_tables(server: Server) -> None:
    found = server.metrics()
    label = "{table=layers.1.ple}"
    for key in ("gathers", "rows", "reads", "read_bytes", "duplicate_rows", "missing_rows"):
        assert found[f"rowstream_table_{key}_total{label}"] == TABLE[key]
    for key in ("retries", "read_errors", "timeouts", "zeroed_rows"):
        assert found[f"rowstream_table_{key}_total{label}"] == TABLE[key]
    assert found[f"rowstream_table_memory_bytes{label}"] == 1000
    assert found[f"rowstream_table_bytes{label}"] == 48 << 30
    info = "{backend=disk,on_read_error=zero-rows,reader=uring,table=layers.1.ple}"
    assert found[f"rowstream_table_info{info}"] == 1


def test_requests_and_tokens(server: Server) -> None:
    server.complete()
    server.complete(stream=True)
    server.complete(n=2)
    server.ask("GET", "/v1/models/gpt")
    server.ask("GET", "/nowhere/7")
    server.ask("GET", "/nowhere/8")
    server.engine.full = True
    server.complete()
    found = server.metrics()
    requests = {key: value for key, value in found.items() if "requests_total" in key}
    assert requests == {
        "rowstream_requests_total{endpoint=/v1/completions,status=200}": 2,
        "rowstream_requests_total{endpoint=/v1/completions,status=400}": 1,
        "rowstream_requests_total{endpoint=/v1/completions,status=429}": 1,
        "rowstream_requests_total{endpoint=/v1/models,status=404}": 1,
        "rowstream_requests_total{endpoint=other,status=404}": 2,
        "rowstream_cancelled_requests_total": 0,
    }
    errors = {key: value for key, value in found.items() if "errors_total{kind" in key}
    assert errors == {
        "rowstream_errors_total{kind=unsupported_value}": 1,
        "rowstream_errors_total{kind=model_not_found}": 1,
        "rowstream_errors_total{kind=unknown_url}": 2,
        "rowstream_errors_total{kind=queue_full}": 1,
    }
    # two answers of five tokens in chunks of 1, 2 and 2
    assert found["rowstream_prompt_tokens_total"] == 10
    assert found["rowstream_completion_tokens_total"] == 10
    assert found["rowstream_time_to_first_token_seconds_count"] == 2
    assert found["rowstream_inter_token_seconds_count"] == 8
    # the request that asks has not ended yet; the one before it has
    assert server.metrics()["rowstream_requests_total{endpoint=/metrics,status=200}"] == 1


def test_the_queue(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = server.engine.stats() | {"running": 1, "waiting": 12}
    monkeypatch.setattr(server.engine, "stats", lambda: stats)
    found = server.metrics()
    assert found["rowstream_requests_running"] == 1
    assert found["rowstream_requests_queued"] == 12


def test_every_prompt_of_a_call_counts_once() -> None:
    server = Server(ScriptedEngine([Chunk("x", (1, 2)), Chunk("y", (3,), "length")]))
    server.complete(prompt=["ab", "c"])
    found = server.metrics()
    assert found["rowstream_prompt_tokens_total"] == 3
    assert found["rowstream_completion_tokens_total"] == 6
    assert found["rowstream_time_to_first_token_seconds_count"] == 1
    # between the two prompts there is no such time
    assert found["rowstream_inter_token_seconds_count"] == 2


def test_lookups_are_weighted_by_their_tokens() -> None:
    metrics = Metrics(ScriptedEngine())
    metrics.lookup("a", 1, 0.0003)
    metrics.lookup("a", 1000, 0.004)
    metrics.lookup("a", 0, 0.0)
    metrics.lookup("b", 2, 20.0)
    found = samples(metrics.text().decode())
    gather, wait = "rowstream_table_gather_seconds", "rowstream_table_wait_per_token_seconds"
    assert found[f"{gather}_count{{table=a}}"] == 3
    assert found[f"{gather}_sum{{table=a}}"] == pytest.approx(0.0043)
    assert found[f"{gather}_bucket{{le=0.0002,table=a}}"] == 1
    assert found[f"{gather}_bucket{{le=0.0005,table=a}}"] == 2
    assert found[f"{gather}_bucket{{le=0.005,table=a}}"] == 3
    assert found[f"{gather}_bucket{{le=10.0,table=b}}"] == 0
    assert found[f"{gather}_bucket{{le=+Inf,table=b}}"] == 1
    assert found[f"{wait}_count{{table=a}}"] == 1001
    assert found[f"{wait}_sum{{table=a}}"] == pytest.approx(0.0043)
    assert found[f"{wait}_bucket{{le=2e-06,table=a}}"] == 0
    assert found[f"{wait}_bucket{{le=5e-06,table=a}}"] == 1000
    assert found[f"{wait}_count{{table=b}}"] == 2


def test_a_failed_read_is_a_500_and_shows_in_health(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine([], error=DISK)
    server = Server(engine)
    assert server.health()[1]["status"] == "ok"
    for stream in (False, True):
        # nothing is out yet, so that a stream has a status too
        answer = server.complete(stream=stream)
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "read_error")
        error_id = error["message"].split()[-1]
        assert error_id in caplog.text
        assert "secret" not in answer.text
    assert "Traceback" not in caplog.text
    engine.script = (Chunk("a", (1,)),)
    answer = server.complete(stream=True)
    assert answer.status_code == 200
    last = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "read_error"
    found = server.metrics()
    # by what came of it, not by the status line that was out before
    assert found["rowstream_requests_total{endpoint=/v1/completions,status=500}"] == 3
    assert found["rowstream_errors_total{kind=read_error}"] == 3

    status, body = server.health()
    assert (status, body["status"]) == (200, "degraded")
    assert re.fullmatch(r"a read failed \d{1,2} s ago, 3 since the start", body["reason"])
    engine.error = None
    engine.script = (Chunk("a", (1,), "stop"),)
    assert server.complete().status_code == 200
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 61)
    assert server.health()[1]["status"] == "ok"


def test_zeroed_rows_show_in_health(server: Server) -> None:
    server.engine.tables = [TABLE | {"zeroed_rows": 12.0}, TABLE | {"table": "layers.3.ple"}]
    status, body = server.health()
    assert (status, body["status"]) == (200, "degraded")
    assert body["reason"] == "layers.1.ple: 12 rows could not be read and were zeroes"


def test_draining_and_closed_are_503(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = server.engine.stats()
    monkeypatch.setattr(server.engine, "stats", lambda: stats | {"draining": True})
    assert (server.health()[0], server.health()[1]["status"]) == (503, "draining")
    monkeypatch.setattr(server.engine, "stats", lambda: stats | {"draining": True, "closed": True})
    assert (server.health()[0], server.health()[1]["status"]) == (503, "closed")


@pytest.fixture
def observed(synth_model: Any) -> Iterator[Metrics]:
    from rowstream.engines import transformers

    metrics = Metrics(ScriptedEngine())
    transformers.observe(synth_model, metrics.lookup)
    yield metrics
    for module in synth_model.modules():
        if hasattr(module, "observe"):
            module.observe = None


def test_a_model_tells_of_its_lookups(observed: Metrics, synth_model: Any) -> None:
    import torch

    from rowstream.engines.transformers import stores

    (store,) = stores(synth_model)
    before = store.stats()
    with torch.no_grad():
        synth_model(torch.tensor([[5, 6, 7]]))
        # a copy of a model shares its tables and who looks at them
        copy.deepcopy(synth_model)(torch.tensor([[8]]))
    found = samples(observed.text().decode())
    label = f"{{table={store.manifest.name}}}"
    after = store.stats()
    assert found[f"rowstream_table_gather_seconds_count{label}"] == 2
    assert after["gathers"] - before["gathers"] == 2
    assert found[f"rowstream_table_wait_per_token_seconds_count{label}"] == 4
    waited = found[f"rowstream_table_wait_per_token_seconds_sum{label}"]
    assert waited == pytest.approx(found[f"rowstream_table_gather_seconds_sum{label}"])
    # the store's own clock runs inside of it
    assert waited >= after["gather_s"] - before["gather_s"]
