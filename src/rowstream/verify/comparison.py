"""Rows compared byte for byte, and what to say about those that differ."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rowstream.verify.report import Check

__all__ = ["Comparison"]


class Comparison:
    """Counts rows that should be equal; remembers the first place where two are not."""

    def __init__(self, name: str, found: str, needed: str) -> None:
        """`found` and `needed` say where the two sides come from."""
        self.name = name
        self.rows = 0
        self.differing = 0
        self._sides = (found, needed)
        self._first = ""

    def add(
        self,
        row_ids: NDArray[np.int64] | range,
        found: NDArray[np.uint8],
        needed: NDArray[np.uint8],
    ) -> None:
        """Compare rows uint8 [n, row_bytes] of so many ids."""
        self.rows += len(row_ids)
        if np.array_equal(found, needed):
            return
        unequal = found != needed
        different = np.flatnonzero(unequal.any(axis=1))
        if not self._first:
            row = int(different[0])
            byte = int(np.flatnonzero(unequal[row])[0])
            self._first = (
                f"row {row_ids[row]} at byte {byte},"
                f" {found[row, byte]:02x} against {needed[row, byte]:02x}"
            )
        self.differing += len(different)

    def check(self, seen: str = "rows") -> Check:
        """Return what came of it."""
        found, needed = self._sides
        problem = (
            f"{found} differs from {needed} in {self.differing:,} of {self.rows:,} {seen},"
            f" first in {self._first}"
        )
        return Check.of(
            self.name,
            problem if self.differing else None,
            f"{self.rows:,} {seen}: {found} equals {needed}",
        )
