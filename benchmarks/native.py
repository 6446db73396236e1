"""Compiles a C++ source of the benchmarks into build/bench on demand and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from pathlib import Path

__all__ = ["compiled"]

_BUILD = Path(__file__).resolve().parents[1] / "build" / "bench"


def compiled(name: str) -> ctypes.CDLL:
    """Return the library made of `name`.cpp beside this file, compiled if its text is new."""
    source = Path(__file__).with_name(f"{name}.cpp")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    library = _BUILD / f"{name}-{digest}.so"
    if not library.exists():
        _BUILD.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CXX", "g++")
        command = [compiler, "-O2", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(made)]
        subprocess.run(command, check=True)
        made.rename(library)
    return ctypes.CDLL(str(library), use_errno=True)
