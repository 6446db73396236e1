"""A progress bar on stderr. Writes nothing where stderr is not a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import Final, TextIO

from rowstream.cli.text import size

__all__ = ["Progress"]

_EVERY_S: Final = 0.1


class Progress:
    """A bar for bytes done of bytes in all; call it with both, leave its context to clear it."""

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty()
        self._began = time.monotonic()
        self._drawn: float | None = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Draw the bar, at most ten times a second and once at the end."""
        now = time.monotonic()
        ended = done_bytes >= total_bytes
        if not self._shown or not (ended or self._drawn is None or now - self._drawn >= _EVERY_S):
            return
        self._drawn = now
        share = min(1.0, done_bytes / total_bytes) if total_bytes else 1.0
        per_s = done_bytes / max(now - self._began, 1e-9)
        text = f"{share:4.0%}  {size(done_bytes)} of {size(total_bytes)}  {size(int(per_s))}/s"
        room = shutil.get_terminal_size().columns - len(self._label) - len(text) - 6
        filled = round(share * max(room, 0))
        bar = "#" * filled + "." * (max(room, 0) - filled)
        self._stream.write(f"\r{self._label} [{bar}] {text}\x1b[K")
        self._stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.clear()

    def clear(self) -> None:
        """Leave the line as if nothing had been drawn."""
        if self._drawn is not None:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
