"""Tries every fault on every way to read a table and writes what comes of it into
docs/reliability.md: python tools/fault_matrix.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from fault_cells import markdown, matrix, replaced  # noqa: E402


def main() -> None:
    """Run and write."""
    document = ROOT / "docs" / "reliability.md"
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        table = markdown(matrix(Path(folder)))
    document.write_text(replaced(document.read_text(), table))
    print(table, end="")


if __name__ == "__main__":
    main()
