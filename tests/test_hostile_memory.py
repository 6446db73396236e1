"""Checkpoints that ask for more memory than there is: refused, or opened, in little of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checkpoints import FILE, Array, write_file, write_header
from children import unmeasured
from hostile_files import HEADERS, NAME, NAMES, Write
from hostile_tables import CONFIGS, TABLES, config_of
from rowstream import ManifestError, RowStore, tables

GREEDY: dict[str, Write] = {
    "a header that is a hole": HEADERS["a header that is a hole"][0],
    "a hole behind a name": HEADERS["a hole behind a name"][0],
    "a header of brackets": lambda folder: write_header(
        folder / FILE, b'{".ple_embedding.":[' + b"[]," * 2_000_000 + b"1]}"
    ),
    "a config of brackets": config_of(b'{"a":[' + b"[]," * 2_000_000 + b"1]}"),
    "a config of a terabyte": CONFIGS["a terabyte"][0],
    "a config that never ends": NAMES["a config that never ends"][0],
    "a config without a size": NAMES["a config without a size"][0],
    "an index of a terabyte": NAMES["an index of a terabyte"][0],
    "a row no reader can hold": TABLES["a row no reader can hold"][0],
    "the most primes": CONFIGS["the most primes that are allowed"][0],
}

# the interpreter with NumPy takes a good part of these
INSPECT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from rowstream.cli import main
sys.exit(main(["inspect", sys.argv[1]]))
"""


@pytest.mark.parametrize("case", GREEDY)
def test_in_a_gibibyte_of_memory(case: str, tmp_path: Path) -> None:
    GREEDY[case](tmp_path)
    argv = [sys.executable, "-c", INSPECT, os.fspath(tmp_path)]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=120, env=unmeasured()
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("rowstream: error: ")
    assert done.stderr.count("\n") == 1
    assert "MemoryError" not in done.stderr


def test_the_widest_row_that_is_allowed_opens_in_bounded_memory(tmp_path: Path) -> None:
    row = np.arange(65536, dtype="<f4")
    write_file(tmp_path / FILE, [Array(f"{NAME}.weight", "F32", (1, 65536), row.tobytes())])
    with RowStore.open(tmp_path, backend="disk") as store:
        assert np.array_equal(store.values(store.gather([0]))[0], row)
        assert store.stats()["memory_bytes"] < 64 << 20


def test_a_table_of_a_petabyte_is_refused_where_offsets_do_not_fit(tmp_path: Path) -> None:
    # a sparse file of that size is possible on xfs, btrfs and tmpfs
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    path = folder / f"rowstream-{os.getpid()}.safetensors"
    try:
        try:
            write_file(path, [Array(f"{NAME}.weight", "BF16", (2**42, 64))])
        except OSError:
            pytest.skip("no file system for so large a file")
        with pytest.raises(ManifestError, match=f"end needs {2**48} at most"):
            tables(path)
    finally:
        path.unlink(missing_ok=True)
