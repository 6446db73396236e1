"""`rowstream verify`: its JSON, its text, its errors and its help."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import checkpoints
from rowstream.cli import main
from rowstream.errors import UnavailableError
from verify.command_line import Capture, answer, failure
from verify.layouts import Table, table_of, write_layout


def test_json(tiny: tuple[Path, Table], capsys: Capture) -> None:
    folder, table = tiny
    result = answer(capsys, str(folder), "--seed", "7")
    assert set(result) == {"path", "against", "seed", "sound", "tables"}
    assert result["path"] == str(folder)
    assert (result["against"], result["seed"], result["sound"]) == (None, 7, True)
    (described,) = result["tables"]
    assert set(described) == {"name", "sound", "checks", "checksums"}
    assert (described["name"], described["sound"]) == ("layers.1.ple", True)
    assert described["checksums"] is None
    assert all(set(check) == {"name", "status", "text"} for check in described["checks"])
    names = [check["name"] for check in described["checks"]]
    assert names[:4] == ["constants", "geometry", "scale", "tokens"]
    assert names[-2:] == ["values", "identity"]
    result = answer(capsys, str(folder), "--full", "--against", str(folder))
    assert result["against"] == str(folder)
    checksums = result["tables"][0]["checksums"]
    assert set(checksums) == {"rows", "row_bytes", "sha256", "shards"}
    assert checksums["sha256"] == hashlib.sha256(table.tobytes()).hexdigest()
    assert [shard["rows"] for shard in checksums["shards"]] == [16] * 4
    assert set(checksums["shards"][0]) == {"rows", "sha256"}


def test_json_of_a_table_that_is_not_sound(synth: Path, capsys: Capture) -> None:
    recipe = json.loads((synth / "synth.json").read_text())
    (synth / "synth.json").write_text(json.dumps({**recipe, "seed": 1}))
    result = answer(capsys, str(synth), status=1)
    assert result["sound"] is False
    assert result["tables"][0]["sound"] is False


def test_text(tiny: tuple[Path, Table], capsys: Capture) -> None:
    folder, table = tiny
    assert main(["verify", str(folder), "--seed", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("layers.1.ple\n  constants")
    assert out.splitlines()[-1].startswith(f"{folder}: sound (1 table, 8 checks, --seed 3)")
    assert "sha256" not in out
    table[0, 0] = 0x7F
    write_layout(folder, table)
    assert main(["verify", str(folder), "--full"]) == 0
    out = capsys.readouterr().out
    assert hashlib.sha256(table[16:32].tobytes()).hexdigest() in out
    assert "1 warning" in out.splitlines()[-1]
    other = folder.with_name("other")
    write_layout(other, table_of("F8_E4M3", seed=9))
    assert main(["verify", str(folder), "--against", str(other)]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith(f"{folder}: not sound (1 table, ")
    assert "1 failed" in out.splitlines()[-1]


def test_a_checkpoint_that_cannot_be_opened_is_one_line(
    tiny: tuple[Path, Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    folder, table = tiny
    path = folder / "model-0.safetensors"
    assert "nothing" in failure(capsys, str(tmp_path / "absent"))
    assert "nothing" in failure(capsys, str(folder), "--against", str(tmp_path / "absent"))
    assert "layers.9" in failure(capsys, str(folder), "--table", "layers.9")
    os.truncate(path, path.stat().st_size - 1)
    assert "model-0.safetensors" in failure(capsys, str(folder))
    assert failure(capsys, str(folder), "--json")

    arrays = checkpoints.shards(table, [64])
    wrong = checkpoints.int64(f"{checkpoints.root()}.layer_multipliers", [1, 2, 3])
    checkpoints.write_file(path, [checkpoints.scale(), *arrays, wrong])
    assert "layer_multipliers [0] needs" in failure(capsys, str(folder))

    nan = checkpoints.scale()._replace(data=struct.pack("<H", 0x7FC0))
    checkpoints.write_file(path, [nan, *arrays])
    assert "finite positive scale" in failure(capsys, str(folder))

    write_layout(folder, table)

    def refused(*args: object, **options: object) -> None:
        raise UnavailableError("reader uring cannot run: refused")

    monkeypatch.setattr("rowstream.verify.rows.RowStore", refused)
    text = failure(capsys, str(folder), "--reader", "uring")
    assert text == "reader uring cannot run: refused"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["x", "--rows", "0"],
        ["x", "--rows", "many"],
        ["x", "--seed", "-1"],
        ["x", "--seed", "s"],
        ["x", "--backend", "tape"],
        ["x", "--reader", "slow"],
        ["x", "--checksums", "file"],
    ],
)
def test_wrong_usage_is_status_2(argv: list[str], capsys: Capture) -> None:
    assert main(["verify", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: rowstream verify")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_on_a_terminal_and_only_with_full(
    tiny: tuple[Path, Table], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    folder, _ = tiny
    assert main(["verify", str(folder), "--full"]) == 0
    assert capsys.readouterr().err == ""
    for argv, drawn in (([], False), (["--full"], True)):
        terminal = _Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        assert main(["verify", str(folder), *argv]) == 0
        assert ("100%  384 bytes of 384 bytes" in terminal.getvalue()) == drawn
        assert terminal.getvalue().endswith("\r\x1b[K") == drawn


def test_help_teaches(
    tmp_path: Path, synth: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "88")
    assert main(["verify", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 88
    monkeypatch.chdir(tmp_path)
    shutil.copytree(synth, "demo")
    shutil.copytree(synth, "copy")
    shown = [shlex.split(line)[1:] for line in lines if line.startswith("  rowstream verify ")]
    assert len(shown) == 4
    for argv in shown:
        assert main(argv) == 0, argv


def test_verify_imports_nothing_heavy(synth_checkpoint: Path) -> None:
    code = (
        "import sys; from rowstream.cli import main; status = main(sys.argv[1:]);"
        "print([n for n in ('torch', 'transformers', 'starlette') if n in sys.modules]);"
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", str(synth_checkpoint)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith("[]\n")
    assert done.stderr == ""
