"""Checkpoints that the tests of verify read, and may damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from rowstream.synth import write_checkpoint
from verify.layouts import Table, table_of, write_layout


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Path, Table]:
    """A checkpoint of 64 rows of 6 bytes in four shards, and its table."""
    table = table_of("F8_E4M3")
    write_layout(tmp_path / "tiny", table)
    return tmp_path / "tiny", table


@pytest.fixture
def synth(tmp_path: Path) -> Path:
    """A synthetic checkpoint of 4,096 rows or so that a test may damage."""
    folder = tmp_path / "synth"
    write_checkpoint(folder, base=250)
    return folder
