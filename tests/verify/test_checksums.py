"""Checksums that verify keeps in a file and compares with it later."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rowstream.cli import main
from rowstream.synth import write_checkpoint
from rowstream.verify import verify
from rowstream.verify.checksums import read_file
from verify.command_line import Capture, answer, failure
from verify.layouts import Table, flip, table_of, write_layout
from verify.reports import failed, found


def test_checksums_are_kept_and_compared(synth: Path, tmp_path: Path, capsys: Capture) -> None:
    kept = tmp_path / "kept" / "sums.json"
    assert "no such file" in failure(capsys, str(synth), "--full", "--checksums", str(kept))
    kept.parent.mkdir()
    options = ["--full", "--checksums", str(kept)]
    assert main(["verify", str(synth), *options]) == 0
    assert f"{kept}: checksums kept" in capsys.readouterr().out
    assert list(kept.parent.iterdir()) == [kept]
    before = kept.read_bytes()
    # another layout of the same table has the same checksum
    other = tmp_path / "other"
    write_checkpoint(other, base=250, layout="radixark")
    for folder in (synth, other):
        result = answer(capsys, str(folder), *options)
        checks = {check["name"]: check["status"] for check in result["tables"][0]["checks"]}
        assert checks["checksums"] == "ok"
    (synth / "synth.json").unlink()
    path = synth / "model-00020-of-00037.safetensors"
    flip(path, path.stat().st_size - 161)
    result = answer(capsys, str(synth), *options, status=1)
    (text,) = [c["text"] for c in result["tables"][0]["checks"] if c["name"] == "checksums"]
    assert text == "other bytes in shard 61"
    assert kept.read_bytes() == before


def test_checksums_of_a_table_that_is_not_sound_are_not_kept(
    synth: Path, tmp_path: Path, capsys: Capture
) -> None:
    recipe = json.loads((synth / "synth.json").read_text())
    (synth / "synth.json").write_text(json.dumps({**recipe, "seed": 1}))
    kept = tmp_path / "sums.json"
    answer(capsys, str(synth), "--full", "--checksums", str(kept), status=1)
    assert not kept.exists()


def test_checksums_say_what_differs(tiny: tuple[Path, Table], tmp_path: Path) -> None:
    folder, table = tiny
    first = verify(folder, full=True).tables[0].checksums
    assert first is not None
    longer = tmp_path / "fewer"
    write_layout(longer, table_of("F8_E4M3", seed=1), counts=[32, 32])
    report = verify(longer, full=True, checksums={"layers.1.ple": first})
    assert failed(report) == {"checksums"}
    digest = hashlib.sha256(table.tobytes()).hexdigest()
    assert found(report)["checksums"].text.startswith(f"needs sha256 {digest}, found ")
    write_layout(longer, table_of("F8_E4M3", seed=1))
    report = verify(longer, full=True, checksums={"layers.1.ple": first})
    assert found(report)["checksums"].text == "other bytes in shard 0, 1, 2, 3"
    report = verify(longer, full=True, checksums={"layers.2.ple": first})
    assert found(report)["checksums"].text == "layers.1.ple is not among those known"
    more = dataclasses.replace(first, num_rows=72, shard_rows=(16, 16, 16, 24))
    report = verify(longer, full=True, checksums={"layers.1.ple": more})
    assert found(report)["checksums"].text == "needs 72 rows, found 64"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"rowstream_checksums": 2}', '{"rowstream_checksums": 1, "tables": {"a": 1}}',
     '{"rowstream_checksums": 1, "tables": {"a": {"rows": 1, "row_bytes": 1, "sha256": "", '
     '"shards": []}}}'],
)  # fmt: skip
def test_a_file_that_holds_no_checksums_is_one_line(
    tiny: tuple[Path, Table], tmp_path: Path, capsys: Capture, content: str
) -> None:
    kept = tmp_path / "sums.json"
    kept.write_text(content)
    text = failure(capsys, str(tiny[0]), "--full", "--checksums", str(kept))
    assert text == "sums.json needs checksums as verify writes them, found something else"
    assert kept.read_text() == content


def test_a_file_too_long_for_checksums_is_not_read(
    tiny: tuple[Path, Table], tmp_path: Path, capsys: Capture
) -> None:
    kept = tmp_path / "sums.json"
    kept.touch()
    os.truncate(kept, 1 << 40)
    assert "sums.json" in failure(capsys, str(tiny[0]), "--full", "--checksums", str(kept))


def full_disk(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_full_disk_leaves_no_checksums(
    tiny: tuple[Path, Table],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    call: str,
) -> None:
    full_disk(call, monkeypatch)
    kept = tmp_path / "kept" / "sums.json"
    kept.parent.mkdir()
    assert main(["verify", str(tiny[0]), "--full", "--checksums", str(kept)]) == 1
    out, err = capsys.readouterr()
    assert err == f"rowstream: error: {kept}: no space left on device\n"
    assert "kept" not in out.splitlines()[-1]
    assert list(kept.parent.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one page, which a file of 128 checksums does not fit."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=4096", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(synth: Path, small_disk: Path, capsys: Capture) -> None:
    kept = small_disk / "sums.json"
    assert main(["verify", str(synth), "--full", "--checksums", str(kept)]) == 1
    assert capsys.readouterr().err == f"rowstream: error: {kept}: no space left on device\n"
    assert list(small_disk.iterdir()) == []


def test_kept_checksums_are_read_back(synth: Path, tmp_path: Path, capsys: Capture) -> None:
    kept = tmp_path / "sums.json"
    result = answer(capsys, str(synth), "--full", "--checksums", str(kept))
    stored = read_file(kept)
    assert set(stored) == {"layers.1.ple"}
    assert stored["layers.1.ple"].as_json() == result["tables"][0]["checksums"]
