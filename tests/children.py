"""Python processes that tests start: what they find in their environment."""

from __future__ import annotations

import os
import sys


def unmeasured() -> dict[str, str]:
    """The modules that the test itself sees, and no coverage.

    A process that gives up its rights could not write down what it measured.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
