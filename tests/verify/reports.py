"""What a report of verify says."""

from __future__ import annotations

from rowstream.verify import Check, Report


def found(report: Report, table: int = 0) -> dict[str, Check]:
    """The checks of a table by name; each has a name of its own."""
    checks = {check.name: check for check in report.tables[table].checks}
    assert len(checks) == len(report.tables[table].checks)
    return checks


def failed(report: Report) -> set[str]:
    checks = [check for table in report.tables for check in table.checks]
    names = {check.name for check in checks if check.status == "failed"}
    assert report.sound == (not names)
    assert all("\n" not in check.text for check in checks)
    return names
