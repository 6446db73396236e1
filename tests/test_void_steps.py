"""What a GPU adds to a served model: void steps, and what is counted and shown of its ways."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

import torch

from rowstream.device.embedding import StreamedEmbedding
from rowstream.engines import transformers as models
from rowstream.engines.model_tables import ModelTable
from rowstream.errors import ReadError
from rowstream.runtime.engine import Request, SamplingParams
from rowstream.runtime.generate import TransformersEngine
from rowstream.serve.app import create_app
from test_metrics import samples

CALL = {"model": "org/tiny", "prompt": "The river", "max_tokens": 5, "temperature": 0}
VOID = ReadError(5, "1 void steps: nobody answered in time", "layers.1.ple")
LINK = {
    "sync": "doorbell",
    "io_spins": True,
    "channels": 2,
    "channel_bytes": 32 << 20,
    "channel_bytes_used": 6 << 20,
    "rings": 41,
    "void_steps": 1,
    "late_answers": 2,
    "answer_s": 0.25,
}
ADDRESSED = {
    "addressed": "device",
    "addressed_bytes": 48 << 30,
    "fill_s": 20.5,
    "lookups": 7,
    "captured_lookups": 0,
}


class Way:
    """A GPU's way to a table that has counted, and of which a step is void."""

    def __init__(self, stats: dict[str, Any]) -> None:
        self._stats = stats
        self.checks = 0

    def stats(self) -> dict[str, Any]:
        return dict(self._stats)

    def check(self) -> None:
        self.checks += 1
        raise VOID

    def close(self) -> None:
        pass


class Steps:
    """A check after each step that fails where it is told to, and of each fault left."""

    def __init__(self) -> None:
        self.seen = 0
        self.failing: set[int] = set()
        self.pending: list[Exception] = []

    def __call__(self) -> None:
        self.seen += 1
        if self.pending:
            raise self.pending.pop(0)
        if self.seen in self.failing:
            raise VOID


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def app(synth_model: Any, synth_tokenizer: Any, steps: Steps) -> Iterator[Any]:
    engine = TransformersEngine(
        synth_model,
        synth_tokenizer,
        name="org/tiny",
        tables=models.model_tables(synth_model),
        check=steps,
    )
    yield create_app(engine)
    engine.close()


def ask(app: Any, method: str, path: str, **content: Any) -> httpx.Response:
    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **content)

    return asyncio.run(call())


def test_a_void_step_ends_its_request_and_shows_for_a_minute(
    app: Any, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = ask(app, "POST", "/v1/completions", json=CALL)
    assert (fine.status_code, steps.seen) == (200, 5)
    assert ask(app, "GET", "/health").json()["status"] == "ok"

    # the prefill of the next request, and the third token of the one after it; the check behind
    # each finds no more
    steps.failing = {6, 10}
    failed = ask(app, "POST", "/v1/completions", json=CALL)
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "read_error"
    health = ask(app, "GET", "/health").json()
    assert health["status"] == "degraded"
    assert re.fullmatch(r"a read failed \d{1,2} s ago, 1 since the start", health["reason"])

    cut = ask(app, "POST", "/v1/completions", json=CALL | {"stream": True})
    *pieces, last = cut.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "read_error"
    # the token of the void step is not sent
    text = "".join(json.loads(p.removeprefix("data: "))["choices"][0]["text"] for p in pieces)
    whole = fine.json()["choices"][0]["text"]
    assert whole.startswith(text)
    assert text != whole
    assert steps.seen == 11

    again = ask(app, "POST", "/v1/completions", json=CALL)
    assert again.json()["choices"] == fine.json()["choices"]
    assert "2 since the start" in ask(app, "GET", "/health").json()["reason"]
    found = samples(ask(app, "GET", "/metrics").text)
    assert found["rowstream_errors_total{kind=read_error}"] == 2
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 61)
    assert ask(app, "GET", "/health").json()["status"] == "ok"


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize(
    ("own", "pending", "code"),
    [
        (None, [VOID], "read_error"),
        (None, [VOID, IndexError("row id 9"), VOID], "read_error"),
        (None, [IndexError("row id 9")], "internal_error"),
        (RuntimeError("NaN somewhere"), [IndexError("row id 9"), VOID], "internal_error"),
        (RuntimeError("NaN somewhere"), [VOID, VOID], "read_error"),
        (VOID, [IndexError("row id 9"), VOID], "read_error"),
    ],
)
def test_a_request_fails_of_its_own_void_steps_and_the_next_one_of_none(
    app: Any,
    steps: Steps,
    synth_model: Any,
    temperature: float,
    own: Exception | None,
    pending: list[Exception],
    code: str,
) -> None:
    call = CALL | {"temperature": temperature, "seed": 3}
    fine = ask(app, "POST", "/v1/completions", json=call)
    assert fine.status_code == 200

    def void(module: Any, args: Any, output: Any) -> None:
        handle.remove()
        steps.pending = list(pending)
        if own is not None:
            raise own
        output.logits.fill_(float("nan"))

    handle = synth_model.register_forward_hook(void)
    failed = ask(app, "POST", "/v1/completions", json=call)
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, code)
    assert steps.pending == []
    assert ask(app, "GET", "/health").json()["status"] == (
        "degraded" if code == "read_error" else "ok"
    )
    again = ask(app, "POST", "/v1/completions", json=call)
    assert again.json()["choices"] == fine.json()["choices"]


def test_an_error_without_a_void_step_stays_what_it_is(app: Any, synth_model: Any) -> None:
    def fail(*arguments: Any) -> None:
        handle.remove()
        raise RuntimeError("not a read")

    handle = synth_model.register_forward_hook(fail)
    failed = ask(app, "POST", "/v1/completions", json=CALL)
    assert failed.json()["error"]["code"] == "internal_error"


def test_a_check_that_never_ends_holds_nothing_up(synth_model: Any, synth_tokenizer: Any) -> None:
    way = Way(LINK)
    engine = TransformersEngine(synth_model, synth_tokenizer, name="tiny", check=way.check)
    try:
        for _ in range(2):
            (generation,) = engine.submit([Request((5, 6), SamplingParams(max_tokens=3))])
            with pytest.raises(ReadError, match="void steps"):
                next(generation)
    finally:
        engine.close()


def test_what_a_gpu_has_in_flight_ends_before_the_cause_is_told(
    monkeypatch: pytest.MonkeyPatch, steps: Steps
) -> None:
    waited: list[Any] = []

    def synchronize(device: Any) -> None:
        waited.append(device.index)
        steps.pending.append(VOID)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    weights = [SimpleNamespace(device=torch.device(name)) for name in ("cuda:0", "cuda:1", "cpu")]
    for kind, expected in (("cuda", [0, 1]), ("cpu", [])):
        waited.clear()
        model = SimpleNamespace(device=torch.device(kind), parameters=lambda: weights * 2)
        engine: Any = SimpleNamespace(_check=steps, _model=model)
        error = ValueError("logits: need a finite maximum, have nan")
        found = TransformersEngine._cause(engine, error)
        assert found is (VOID if expected else error)
        assert sorted(waited) == expected
        assert steps.pending == []


def test_every_table_is_asked_and_the_first_failure_raised(
    synth_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (store,) = models.stores(synth_model)
    modules = [StreamedEmbedding(store) for _ in range(3)]
    ways = [Way(LINK) for _ in modules]
    errors: list[Exception | None] = [None, IndexError("row id 9"), VOID]

    def check(number: int) -> None:
        error, errors[number] = errors[number], None
        if error is not None:
            raise error

    for number, (module, way) in enumerate(zip(modules, ways, strict=True)):
        monkeypatch.setattr(way, "check", functools.partial(check, number))
        monkeypatch.setattr(module.lookup, "_paths", {0: way})
    fake = SimpleNamespace(modules=lambda: modules)
    with pytest.raises(IndexError, match="row id 9"):
        models.check(fake)
    assert errors == [None, None, None]
    models.check(fake)


def test_ways_to_gpus_are_shown_and_no_failure_is_taken_from_its_step(
    app: Any, synth_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (module,) = models._streamed(synth_model)
    link, place = Way(LINK), Way(ADDRESSED)
    monkeypatch.setattr(module.lookup, "_paths", {0: link, 1: place})
    monkeypatch.setattr(module.lookup, "sync_reason", "probed")

    (table,) = ask(app, "GET", "/health").json()["tables"]
    assert table["table"] == "layers.1.ple"
    assert table["gpus"] == {"cuda:0": LINK | {"sync_reason": "probed"}, "cuda:1": ADDRESSED}
    found = samples(ask(app, "GET", "/metrics").text)
    one, other = "{gpu=cuda:0,table=layers.1.ple}", "{gpu=cuda:1,table=layers.1.ple}"
    assert found[f"rowstream_table_gpu_rings_total{one}"] == 41
    assert found[f"rowstream_table_gpu_void_steps_total{one}"] == 1
    assert found[f"rowstream_table_gpu_late_answers_total{one}"] == 2
    assert found[f"rowstream_table_gpu_answer_seconds_total{one}"] == 0.25
    assert found[f"rowstream_table_gpu_channel_bytes{one}"] == 32 << 20
    assert found[f"rowstream_table_gpu_lookups_total{other}"] == 7
    assert found[f"rowstream_table_gpu_addressed_bytes{other}"] == 48 << 30
    assert f"rowstream_table_gpu_rings_total{other}" not in found
    labels = "{addressed=none,gpu=cuda:0,sync=doorbell,table=layers.1.ple}"
    assert found[f"rowstream_table_gpu_info{labels}"] == 1
    assert (link.checks, place.checks) == (0, 0)
    with pytest.raises(ReadError, match="void steps"):
        module.lookup.stats()
    assert ModelTable(module.lookup).ways() == [
        "cuda:0: sync doorbell (probed), 32 MiB pinned for channels",
        "cuda:1: addressed in device memory, 48.00 GiB in 20.5 s",
    ]


def test_on_a_cpu_there_is_no_way_to_show(app: Any, synth_model: Any) -> None:
    models.warm_up(synth_model)
    (table,) = ask(app, "GET", "/health").json()["tables"]
    assert table["gpus"] == {}
    assert table["backend"] == "disk"
    assert "rowstream_table_gpu_rings_total{" not in ask(app, "GET", "/metrics").text
