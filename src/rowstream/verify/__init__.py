"""Proves a user's own table right: constants, geometry, identity, and rows read in several ways.

Rows and row ids are compared with a second path that shares no code with the first. Reads only.
"""

from __future__ import annotations

from rowstream.verify.checksums import Checksums
from rowstream.verify.report import FAILED, OK, SKIPPED, WARNING, Check, Report, TableReport
from rowstream.verify.verification import verify

__all__ = [
    "FAILED",
    "OK",
    "SKIPPED",
    "WARNING",
    "Check",
    "Checksums",
    "Report",
    "TableReport",
    "verify",
]
