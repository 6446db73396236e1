"""What an open table costs in memory: the same for any size, what `stats` says, and nothing in the
page cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from benchmarks.places import cached_row_pages, forget

from rowstream import RowStore, tables
from rowstream.synth import write_checkpoint

MIB = 1 << 20

# in a process of its own: memory that other tests freed would hide what this one takes
GATHERS = """
import json, sys
import numpy as np
from rowstream import RowStore

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) * 1024

rng = np.random.default_rng()
warm = np.empty((8192, 16, 160), np.uint8)
warm.fill(1)
prompts = rng.integers(0, 320_000_000, (4, 8192, 16))
before = resident()
store = RowStore.open(sys.argv[1])
for step in range(10_000):
    store.gather(rng.integers(0, store.num_rows, (1, 16)), warm[:1])
    if step % 2500 == 0:
        store.gather(prompts[step // 2500], warm)
        first = resident() if step == 0 else first
after = resident()
print(json.dumps({"stats": store.stats(), "taken": after - before, "grown": after - first}))
"""


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The released table's geometry, 47.7 GiB, as a sparse file."""
    folder = tmp_path_factory.mktemp("full")
    write_checkpoint(folder / "model", base=20_000_000, sparse=True)
    return folder / "model"


def test_resident_size_over_ten_thousand_gathers(full_size: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", GATHERS, str(full_size)], capture_output=True, text=True, check=True
    )
    found = json.loads(run.stdout)
    stats = found["stats"]
    assert stats["table_bytes"] == 51_200_245_760
    assert stats["backend"] == "disk"
    assert stats["memory_bytes"] <= 64 * MIB
    # what it says is what it takes: threads and interpreter objects are the slack
    assert found["taken"] <= stats["memory_bytes"] + 4 * MIB
    assert found["grown"] <= 1 * MIB


@pytest.mark.parametrize("gib", [0.05, 48])
def test_memory_does_not_depend_on_the_table(gib: float, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", table_gib=gib, sparse=True)
    with RowStore.open(tmp_path / "model") as store:
        assert store.stats()["memory_bytes"] < 14 * MIB


def test_opening_reads_headers_only(full_size: Path) -> None:
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        RowStore.open(full_size).close()
        best = min(best, time.process_time() - began)
    assert best < 1  # of a processor; the table would take many


def test_the_page_cache_holds_no_row(tmp_path: Path, rng: np.random.Generator) -> None:
    write_checkpoint(tmp_path / "model", table_gib=0.05)
    (manifest,) = tables(tmp_path / "model")
    for file in manifest.files:
        forget(file.path)
    if cached_row_pages(manifest):
        pytest.skip("the page cache of this file system cannot be dropped")
    with RowStore.open(tmp_path / "model", backend="disk") as store:
        store.gather(rng.integers(0, store.num_rows, (2000, store.heads)))
        assert store.stats()["reads"] > 0
        assert cached_row_pages(manifest) == 0
    manifest.files[0].path.read_bytes()
    assert cached_row_pages(manifest) > 0
