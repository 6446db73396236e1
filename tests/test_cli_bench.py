"""`rowstream bench`: its figures, and when it doubts them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from commands import Capture
from rowstream.cli import main

BENCH_KEYS = {
    *("rows_per_s", "p50_us", "p99_us", "cpu_us_per_row", "reads", "device_reads", "rows"),
    *("rows_per_token", "tokens", "repeat", "table", "row_bytes", "backend", "reader"),
    *("queue_depth", "device", "device_kind", "file_system", "machine"),
}


@pytest.mark.parametrize("reader", ["auto", "pool"])
def test_bench_reader(synth_checkpoint: Path, capsys: Capture, reader: str) -> None:
    options = ["--rows", "300", "--reader", reader, "--queue-depth", "32", "--repeat", "2"]
    assert main(["bench", "reader", str(synth_checkpoint), *options, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)  # a warning depends on the machine's disk
    assert set(result) == BENCH_KEYS
    assert (result["rows"], result["queue_depth"], result["repeat"]) == (300, 32, 2)
    # different rows need a read each, but for those that share a block
    # rows that lie close to each other are one read
    assert 150 <= result["reads"] <= 300
    assert result["tokens"] >= 200
    assert 0 < result["p50_us"] <= result["p99_us"]
    assert result["rows_per_s"] > 0
    assert result["cpu_us_per_row"] > 0
    assert result["backend"] == "disk"
    assert reader in ("auto", result["reader"])
    assert "Linux" in result["machine"]


def test_bench_reader_text(synth_checkpoint: Path, capsys: Capture) -> None:
    assert main(["bench", "reader", str(synth_checkpoint), "--rows", "100", "--repeat", "1"]) == 0
    out = capsys.readouterr().out
    for word in ("/s (100 different rows", "us p50", "us p99", "us a row", "layers.1.ple"):
        assert word in out


@pytest.mark.parametrize(
    ("grown", "warned"),
    [(1000, None), (0, "these figures are not a disk's"), (None, "may not be a disk's")],
)
def test_bench_doubts_reads_that_the_device_did_not_count(
    synth_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    grown: int | None,
    warned: str | None,
) -> None:
    counts = iter(range(0, 10**6, grown or 1))
    last = next(counts)

    def completed(self: object) -> int | None:
        return None if grown is None else last if grown == 0 else next(counts)

    monkeypatch.setattr("rowstream.block_device.BlockDevice.completed_reads", completed)
    assert main(["bench", "reader", str(synth_checkpoint), "--rows", "64", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["device_reads"] == grown
    assert err == "" if warned is None else warned in err
    assert err.count("\n") <= 1


def test_bench_reads_different_rows_and_all_of_them() -> None:
    from rowstream.cli.bench import _different_rows

    rng = np.random.default_rng(0)
    for num_rows, count in [(10, 10), (10, 3), (1000, 499), (1000, 500), (10**9, 5000), (1, 1)]:
        ids = _different_rows(rng, num_rows, count)
        assert ids.dtype == np.int64
        assert len(set(ids.tolist())) == len(ids) == count
        assert 0 <= ids.min() <= ids.max() < num_rows
    ids = _different_rows(rng, 10**9, 5000)
    assert not np.array_equal(ids, np.sort(ids))
