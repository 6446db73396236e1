"""Reads that fail under a served model: which request fails, and what the server says of it."""

from __future__ import annotations

import errno
import functools
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from live_server import CALL, served
from rowstream.errors import ReadError


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
