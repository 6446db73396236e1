"""The command line, run in this process or in one of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from rowstream.cli import main

Capture = pytest.CaptureFixture[str]


def answer(capsys: Capture, *argv: str) -> Any:
    """Run a command that must succeed silently and return its JSON."""
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def failure(capsys: Capture, *argv: str, status: int = 1) -> str:
    """Run a command that must fail without output and return its only line."""
    assert main(argv) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rowstream: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("rowstream: error: ").strip()


def python(code: str, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False, **options
    )


HEAVY = ("torch", "transformers", "starlette", "uvicorn", "accelerate", "tokenizers")
