"""Which rows verify reads, by which ways, and in how much memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowstream import RowStore, catalog
from rowstream.manifest import Manifest
from rowstream.synth import write_checkpoint
from rowstream.verify import verify
from rowstream.verify.second_path import SecondPath
from verify.layouts import Table
from verify.reports import found

MIB = 1 << 20


def test_the_rows_sampled(synth: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    real = SecondPath.rows

    def rows(self: SecondPath, row_ids: Any) -> Table:
        seen.append(np.ravel(row_ids).tolist())
        return real(self, row_ids)

    monkeypatch.setattr(SecondPath, "rows", rows)
    (shard,) = {extent.num_rows for extent in catalog.tables(synth)[0].planes[0].extents}
    total = shard * 128
    for seed in (5, 5, 6):
        report = verify(synth, rows=500, seed=seed)
        assert report.seed == seed
    tokens, sampled = seen[0], seen[1]
    assert seen[2:4] == seen[:2]
    assert seen[5] != sampled
    assert len(tokens) == 256 * 16
    assert len(sampled) == len(set(sampled))
    borders = {b for n in range(129) for b in (n * shard - 1, n * shard) if 0 <= b < total}
    assert borders <= set(sampled)
    assert 256 < len(sampled) <= 756
    assert sampled != sorted(sampled)
    assert verify(synth).seed != verify(synth).seed
    seen.clear()
    verify(synth, rows=total)
    assert sorted(seen[1]) == list(range(total))


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        ({"backends": ["mmap"]}, ["mmap"]),
        ({"backends": ["mmap", "pinned"], "readers": ["pool"]}, ["mmap", "pinned"]),
        ({"readers": ["pool"]}, ["disk/pool"]),
        ({"backends": ["auto", "disk"], "readers": ["pool"]}, ["disk/pool"]),
    ],
)
def test_the_ways_asked_for(
    tiny: tuple[Path, Table], options: dict[str, Any], ways: list[str]
) -> None:
    checks = found(verify(tiny[0], **options))
    assert [name for name in checks if name.startswith("rows")] == [f"rows {w}" for w in ways]


@pytest.mark.parametrize("refused", [False, True])
def test_the_ways_chosen(
    tiny: tuple[Path, Table], monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    with RowStore.open(tiny[0]) as store:
        first = f"disk/{store.stats()['reader']}"
    if refused:
        from rowstream.verify import rows

        def open_store(manifest: Manifest, *, backend: str, reader: str) -> RowStore:
            return RowStore(manifest, backend=backend, reader="pool")

        monkeypatch.setattr(rows, "RowStore", open_store)
        first = "disk/pool"
    second = "mmap" if first == "disk/pool" else "disk/pool"
    checks = found(verify(tiny[0]))
    ways = [name for name in checks if name.startswith("rows")]
    assert ways == [f"rows {first}", f"rows {second}"]


PEAK = """
import sys
from rowstream.cli import main
status = main(sys.argv[1:])
with open("/proc/self/status") as file:
    peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
print(peak * 1024, file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize(("gib", "options"), [(48.0, []), (0.25, ["--full"])])
def test_memory_is_bounded(tmp_path: Path, gib: float, options: list[str]) -> None:
    write_checkpoint(tmp_path / "model", table_gib=gib, sparse=True)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "verify", str(tmp_path / "model"), *options],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stderr) < 128 * MIB
