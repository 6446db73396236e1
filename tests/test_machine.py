"""Memory and name of a machine, as /proc and control groups tell them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rowstream import machine


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"memory.max": "1073741824\n"}, 2**30),
        ({"memory.max": "max\n"}, None),
        ({"memory/memory.limit_in_bytes": "536870912\n"}, 2**29),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ({}, None),
    ],
)
def test_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], limit: int | None
) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "meminfo").write_text(
        "MemTotal:  4000 kB\nMemFree: 10 kB\nMemAvailable:  3000 kB\n"
    )
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.memory() == machine.Memory(3000 * 1024, limit)


def test_machine_is_named_even_without_a_processor_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Linux" in machine.machine()
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    assert os.uname().machine in machine.machine()
