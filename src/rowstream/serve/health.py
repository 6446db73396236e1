"""What `/health` says: ready, degraded and why, or closed.

Owns the time of the last read that failed a request; all else is the engine's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

RECENT_S = 60.0


class Health:
    """Judge an engine by its counters and by the reads that failed lately."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed_reads = 0
        self._last_failed_s: float | None = None

    def read_failed(self) -> None:
        """Remember that a read failed a request just now."""
        with self._lock:
            self._failed_reads += 1
            self._last_failed_s = time.monotonic()

    def report(self, name: str, stats: Mapping[str, object]) -> tuple[int, dict[str, object]]:
        """Return the HTTP status and the body for a model's name and its engine's counters.

        A degraded server answers, so its status is 200 too.
        """
        shown = dict(stats)
        closed, draining = bool(shown.pop("closed", False)), bool(shown.pop("draining", False))
        if closed or draining:
            return 503, {"status": "closed" if closed else "draining", "model": name, **shown}
        tables = shown.get("tables")
        reasons = self._reasons(tables if isinstance(tables, Sequence) else ())
        if reasons:
            return 200, {"status": "degraded", "reason": reasons, "model": name, **shown}
        return 200, {"status": "ok", "model": name, **shown}

    def _reasons(self, tables: Sequence[Mapping[str, Any]]) -> str:
        reasons = []
        for table in tables:
            if zeroed := int(table.get("zeroed_rows", 0)):
                reasons.append(
                    f"{table.get('table')}: {zeroed} rows could not be read and were zeroes"
                )
        with self._lock:
            if self._last_failed_s is not None:
                ago_s = time.monotonic() - self._last_failed_s
                if ago_s < RECENT_S:
                    reasons.append(
                        f"a read failed {ago_s:.0f} s ago, {self._failed_reads} since the start"
                    )
        return "; ".join(reasons)
