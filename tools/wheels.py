"""Build a wheel for each CPython that needs one: 3.10, 3.11, and one abi3 wheel for 3.12 and later.

Takes the interpreters that are on the PATH or under pyenv; says which are missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12")


def works(python: str, version: str) -> bool:
    """Whether the interpreter runs and is of that version; a pyenv shim may do neither."""
    probe = "import sys; print('%d.%d' % sys.version_info[:2])"
    run = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False)
    return run.returncode == 0 and run.stdout.strip() == version


def find(version: str) -> str | None:
    """An interpreter of that version, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    under_pyenv = sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)
    candidates = [*([on_path] if on_path else []), *map(str, under_pyenv)]
    return next((python for python in candidates if works(python, version)), None)


def build(python: str) -> None:
    """Build the wheel in an environment of its own."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        inside = str(Path(folder) / "bin" / "python")
        subprocess.run([inside, "-m", "pip", "install", "--quiet", "build"], check=True)
        subprocess.run(
            [inside, "-m", "build", "--wheel", "--outdir", str(ROOT / "dist"), str(ROOT)],
            check=True,
        )


def main() -> int:
    missing = []
    for version in VERSIONS:
        python = find(version)
        if python is None:
            missing.append(version)
        else:
            build(python)
    for wheel in sorted((ROOT / "dist").glob("*.whl")):
        print(wheel.relative_to(ROOT))
    if missing:
        print(f"no interpreter found for {', '.join(missing)}: no wheel", file=sys.stderr)
    return 1 if len(missing) == len(VERSIONS) else 0


if __name__ == "__main__":
    sys.exit(main())
