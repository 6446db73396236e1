"""Threads that tests start."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Worker(threading.Thread):
    """A thread whose exception is the test's."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def done(self) -> None:
        self.join(60)
        assert not self.is_alive(), "a thread hangs"
        if self._error is not None:
            raise self._error
