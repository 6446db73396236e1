"""`rowstream serve` up to the server: arguments, and what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from commands import HEAVY, Capture, failure, python
from rowstream.cli import main


def test_serve_hands_its_arguments_on(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(
        "rowstream.serve.server.serve", lambda *args, **options: calls.append((args, options))
    )
    checked: list[str] = []
    monkeypatch.setattr("rowstream.cli.serve._check_device", checked.append)
    assert main(["serve", "model"]) == 0
    options = ["--host", "::1", "--port", "0", "--table-backend", "disk", "--reader", "pool"]
    options += ["--dtype", "float32", "--device", "cpu", "--served-model-name", "tiny"]
    options += ["--table-path", "/a", "--table-path", "/b", "--table-cache", "1GiB"]
    options += ["--sync", "kernel", "--max-queue", "3"]
    options += ["--read-timeout", "2.5", "--on-read-error", "zero-rows"]
    assert main(["serve", "model", *options]) == 0
    assert checked == ["cpu"]
    assert calls[0] == (
        ("model",),
        {
            "host": "127.0.0.1",
            "port": 8000,
            "table_backend": "auto",
            "sync": "auto",
            "reader": "auto",
            "read_timeout_s": 10.0,
            "on_read_error": "raise",
            "table_paths": [],
            "table_cache_bytes": 64 << 20,
            "dtype": "auto",
            "device": None,
            "served_model_name": None,
            "max_queue": 64,
        },
    )
    assert calls[1] == (
        ("model",),
        {
            "host": "::1",
            "port": 0,
            "table_backend": "disk",
            "sync": "kernel",
            "reader": "pool",
            "read_timeout_s": 2.5,
            "on_read_error": "zero-rows",
            "table_paths": ["/a", "/b"],
            "table_cache_bytes": 1 << 30,
            "dtype": "float32",
            "device": "cpu",
            "served_model_name": "tiny",
            "max_queue": 3,
        },
    )


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_serve_refuses_a_time_out_that_is_none(capsys: Capture, seconds: str) -> None:
    assert main(["serve", "model", "--read-timeout", seconds]) == 2
    assert "needs seconds from 0.001 to 86400" in capsys.readouterr().err


def test_serve_on_a_device_that_is_not_there_is_one_line(capsys: Capture) -> None:
    torch = pytest.importorskip("torch")
    assert "--device nonsense: " in failure(capsys, "serve", "model", "--device", "nonsense")
    if not torch.cuda.is_available():
        assert "--device cuda: " in failure(capsys, "serve", "model", "--device", "cuda")


@pytest.mark.parametrize("missing", ["uvicorn", "accelerate"])
def test_serve_without_its_extras_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, missing: str
) -> None:
    def serve(*args: object, **options: object) -> None:
        raise ModuleNotFoundError(f"No module named '{missing}'")

    monkeypatch.setattr("rowstream.serve.server.serve", serve)
    text = failure(capsys, "serve", "model")
    assert missing in text
    assert text.endswith("install with: pip install 'rowstream[serve]'")


def test_serve_on_numpy_alone_says_what_to_install() -> None:
    code = (
        "import sys, importlib.util as util; real = util.find_spec\n"
        f"heavy = {HEAVY}\n"
        "util.find_spec = lambda name, *rest: None if name in heavy else real(name, *rest)\n"
        "from rowstream.cli import main; sys.exit(main(['serve', 'model']))"
    )
    done = python(code)
    assert done.returncode == 1
    assert done.stderr.startswith("rowstream: error: serve: needs starlette")
    assert done.stderr.endswith("pip install 'rowstream[serve]'\n")
    assert done.stderr.count("\n") == 1
