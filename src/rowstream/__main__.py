"""Runs the command line as `python -m rowstream`."""

from __future__ import annotations

import sys

from rowstream.cli import main

if __name__ == "__main__":
    sys.exit(main())
