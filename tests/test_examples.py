"""What the README says runs: its Python blocks, against a small checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

README = Path(__file__).resolve().parent.parent / "README.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_python_blocks_of_the_readme(synth_checkpoint: Path) -> None:
    # those for a GPU: tests/gpu/test_documents.py
    found = [block for block in blocks() if "cuda" not in block]
    assert len(found) == 3
    names: dict[str, object] = {}  # a reader types them one after the other
    for block in found:
        code = re.sub(r'"/models/[^"]*"', repr(str(synth_checkpoint)), block)
        assert str(synth_checkpoint) in code
        exec(compile(code, str(README), "exec"), names)


def test_commands_of_the_readme_exist(capsys: pytest.CaptureFixture[str]) -> None:
    from rowstream.cli import main

    commands = set(re.findall(r"^\$ rowstream (\w+)", README.read_text(), re.MULTILINE))
    assert commands >= {"inspect", "doctor", "serve"}
    for command in commands:
        assert main([command, "--help"]) == 0
    verbs = set(re.findall(r"^\$ make (\w+)", README.read_text(), re.MULTILINE))
    makefile = (README.parent / "Makefile").read_text()
    for verb in verbs:
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE)
