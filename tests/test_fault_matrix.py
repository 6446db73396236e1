"""The table in docs/reliability.md is what happens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import raw_tables
from fault_cells import markdown, matrix, replaced
from rowstream import UnavailableError, _core

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"


def test_the_fault_matrix_is_what_happens(tmp_path: Path) -> None:
    raw = raw_tables.write(tmp_path, np.random.default_rng())
    try:
        table = raw.open("uring-direct")
    except UnavailableError as error:
        pytest.skip(str(error))
    assert isinstance(table, _core.DiskTable)
    if not all(file.direct for file in table.files()):
        pytest.skip("the file system takes no direct reads")
    text = DOCUMENT.read_text(encoding="utf-8")
    assert replaced(text, markdown(matrix(tmp_path))).splitlines() == text.splitlines()
