"""What verify found: named checks for each table, and whether they prove it sound."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from rowstream.verify.checksums import Checksums

__all__ = ["FAILED", "OK", "SKIPPED", "WARNING", "Check", "Report", "TableReport"]

OK: Final = "ok"
WARNING: Final = "warning"  # sound, but worth a look
SKIPPED: Final = "skipped"  # could not be checked, the text says why
FAILED: Final = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: its status and what was seen, in one line."""

    name: str
    status: str  # one of OK, WARNING, SKIPPED, FAILED
    text: str

    @classmethod
    def of(cls, name: str, problem: str | None, sound: str) -> Check:
        """Build the check that failed if there is a problem, and says what is sound otherwise."""
        return cls(name, OK, sound) if problem is None else cls(name, FAILED, problem)


@dataclass(frozen=True, slots=True)
class TableReport:
    """The checks of one table; `checksums` where all of it was read."""

    name: str
    checks: tuple[Check, ...]
    checksums: Checksums | None

    @property
    def sound(self) -> bool:
        """Whether no check failed."""
        return all(check.status != FAILED for check in self.checks)


@dataclass(frozen=True, slots=True)
class Report:
    """All tables that were verified, and the seed that chose the rows."""

    path: str
    against: str | None
    seed: int
    tables: tuple[TableReport, ...]

    @property
    def sound(self) -> bool:
        """Whether every table is."""
        return all(table.sound for table in self.tables)

    def count(self, status: str) -> int:
        """Return how many checks ended with a status."""
        return sum(check.status == status for table in self.tables for check in table.checks)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain lists and dictionaries."""
        return {
            "path": self.path,
            "against": self.against,
            "seed": self.seed,
            "sound": self.sound,
            "tables": [
                {
                    "name": table.name,
                    "sound": table.sound,
                    "checks": [asdict(check) for check in table.checks],
                    "checksums": table.checksums and table.checksums.as_json(),
                }
                for table in self.tables
            ],
        }
