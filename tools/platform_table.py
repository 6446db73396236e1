"""Write docs/platforms.md: what `rowstream doctor` says on each platform that can be tried here.

    sudo python tools/platform_table.py

Runs tests/test_platforms.py and tests/test_file_systems.py and keeps the line of every case, or
why it was skipped.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "platforms.md"
TESTS = ("tests/test_platforms.py", "tests/test_file_systems.py")

HEAD = """\
# Platforms

Machines that refuse something and file systems of every kind, as `tests/test_platforms.py` and
`tests/test_file_systems.py` make them. In each case 6,000 random rows were read by `reader="auto"`
and compared with the bytes that were written, and where O_DIRECT is used the page cache was found
empty afterwards. The lines are those of `rowstream doctor`.

Made by `tools/platform_table.py` on {machine}; not written by hand.

| platform | io_uring | O_DIRECT | auto chooses |
|---|---|---|---|
"""


def main() -> int:
    """Run the tests and write the page; the exit status is that of the tests."""
    with tempfile.TemporaryDirectory() as name:
        found = Path(name) / "found"
        found.touch()
        argv = [sys.executable, "-m", "pytest", "-q", "-rs", *TESTS]
        environment = {**os.environ, "ROWSTREAM_PLATFORMS": os.fspath(found)}
        status = subprocess.run(argv, cwd=ROOT, env=environment, check=False).returncode
        cases = [json.loads(line) for line in found.read_text().splitlines()]
    PAGE.write_text(page(cases))
    print(f"{PAGE}: {len(cases)} cases")
    return status


def page(cases: list[dict[str, Any]]) -> str:
    """Return the page; cases that were skipped come last, with the reason."""
    machine = f"{platform.system()} {platform.release().split('-')[0]}, {platform.machine()}"
    rows = [
        [
            f"{case['case']}<br>({case['what']})",
            case["io_uring"].split("; sysctl ")[0] + _advice(case["io_uring"]),
            case["O_DIRECT"],
            case["auto chooses"],
        ]
        for case in cases
        if "skipped" not in case
    ]
    rows += [
        [case["case"], f"not tried: {case['skipped']}", "", ""]
        for case in cases
        if "skipped" in case
    ]
    return HEAD.format(machine=machine) + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _advice(text: str) -> str:
    parts = text.split("; ", 2)
    return f"<br>{parts[2]}" if len(parts) == 3 else ""


if __name__ == "__main__":
    raise SystemExit(main())
