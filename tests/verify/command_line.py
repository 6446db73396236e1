"""The command, run as the tests of verify run it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rowstream.cli import main

Capture = pytest.CaptureFixture[str]


def answer(capsys: Capture, *argv: str, status: int = 0) -> Any:
    assert main(["verify", *argv, "--json"]) == status
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def failure(capsys: Capture, *argv: str) -> str:
    """Run a command that must fail with one line and nothing on stdout."""
    assert main(["verify", *argv]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rowstream: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("rowstream: error: ").strip()
