"""Tests that need what they do to fall between two looks at a file, which a table takes once a
second.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

import pytest

from rowstream import ReadError

# after this pause a table looks again
PAUSE_S = 1.05
_SURELY_BETWEEN_S = 0.9
_ATTEMPTS = 20

P = ParamSpec("P")


def between_looks(test: Callable[P, None]) -> Callable[P, None]:
    """Give a test another folder and another try where it failed and had taken too long.

    A busy machine may let a second pass anywhere; a failure in less than that stands.
    """

    @functools.wraps(test)
    def tried(*args: P.args, **kwargs: P.kwargs) -> None:
        folder = kwargs["tmp_path"]
        assert isinstance(folder, Path)
        for attempt in range(_ATTEMPTS):
            kwargs["tmp_path"] = folder / f"attempt-{attempt}"
            (folder / f"attempt-{attempt}").mkdir()
            began = time.monotonic()
            try:
                return test(*args, **kwargs)
            except (AssertionError, ReadError, pytest.fail.Exception):
                if time.monotonic() - began < _SURELY_BETWEEN_S:
                    raise
        pytest.fail("the machine is too busy: a second passed between two gathers")

    return tried
