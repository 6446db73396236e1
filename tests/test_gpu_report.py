"""tools/gpu_report.py on tests that need no GPU: one that hangs must cost its own file only."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "gpu_report.py"

TESTS = {
    "fine": "def test_a():\n    pass\n@pytest.mark.gpu\ndef test_b():\n    pass\n",
    "skips": "def test_a():\n    pytest.skip('no | GPU here')\n",
    "fails": "def test_a():\n    assert 1 + 1 == 3, 'sum'\ndef test_b():\n    pass\n",
    "hangs": (
        "import pathlib, time\ndef test_a():\n    pass\ndef test_long():\n"
        "    pathlib.Path(__file__).with_suffix('.hangs').touch()\n    time.sleep(999)\n"
    ),
    "dies": "import os\ndef test_a():\n    os.kill(os.getpid(), 11)\n",
}


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tool as a module; what it asks the machine takes seconds."""
    spec = importlib.util.spec_from_file_location("gpu_report", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_report", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "MACHINE", "print('- host: here'); raise SystemExit(3)")
    return module


class Patient(subprocess.Popen[str]):
    """Has the limit begin when a file has come to the test that hangs; a busy machine needs long
    to come anywhere.
    """

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None and isinstance(self.args, list):
            hangs = Path(self.args[-1]).with_suffix(".hangs")
            until = time.monotonic() + 240
            while self.poll() is None and not hangs.exists() and time.monotonic() < until:
                time.sleep(0.05)
        return super().wait(timeout)


def report(tool: Any, folder: Path, names: list[str], patch: pytest.MonkeyPatch) -> tuple[int, str]:
    files = []
    for name in names:
        files.append(folder / f"test_{name}.py")
        files[-1].write_text("import pytest\n" + TESTS[name])
    out = folder / "made" / "report.md"
    options = ["--out", str(out), "--limit-s", "2"]
    patch.setattr(subprocess, "Popen", Patient)
    patch.setattr(sys, "argv", ["gpu_report.py", *options, *map(str, files)])
    return tool.main(), out.read_text()


@pytest.mark.slow
def test_every_file_is_reported_whatever_the_others_do(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, text = report(tool, tmp_path, list(TESTS), monkeypatch)
    assert status == 1
    rows = {
        line.split(" | ")[0][2:]: line.split(" | ")[1:]
        for line in text.splitlines()
        if line.startswith("| ")
    }
    assert rows["test_fine.py"][:3] == ["2", "0", "0"]
    assert rows["test_skips.py"][:3] == ["0", "0", "1"]
    assert rows["test_fails.py"][:3] == ["1", "1", "0"]
    assert rows["test_hangs.py"][:3] == ["1", "0", "0"]
    assert rows["test_hangs.py"][-1] == "ended after 2 s |"
    assert rows["test_dies.py"][-1] == "exit status -11 |"
    assert rows["all"][:3] == ["4", "1", "1"]
    assert "- host: here\n\n(the machine was asked: exit status 3)" in text
    assert r"1 times: no \| GPU here" in text
    assert "test_a: AssertionError: sum" in text
    assert "test_hangs.py::test_long" in text  # what it was at


@pytest.mark.parametrize(("names", "status"), [(["fine", "skips"], 0), (["skips"], 1)])
def test_the_exit_status_is_good_where_something_passed(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], status: int
) -> None:
    assert report(tool, tmp_path, names, monkeypatch)[0] == status
