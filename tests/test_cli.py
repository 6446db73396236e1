"""What all commands have in common: errors of one line, imports, help; and what `synth` says."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from commands import HEAVY, Capture, answer, failure, python
from rowstream import __version__
from rowstream.cli import main
from rowstream.device import gpus

# --- errors


def test_errors_are_one_line(
    tiny: tuple[Path, NDArray[np.uint8]], tmp_path: Path, capsys: Capture
) -> None:
    folder, _ = tiny
    assert "64" in failure(capsys, "gather", str(folder), "--rows", "64")
    assert "row id -2" in failure(capsys, "gather", str(folder), "--rows=-2")
    assert "50" in failure(capsys, "gather", str(folder), "--tokens", "1,50")
    assert "nothing" in failure(capsys, "inspect", str(tmp_path / "absent"))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "none in 0 .safetensors files" in failure(capsys, "inspect", str(empty))
    (empty / "model.safetensors").write_bytes(b"\xff" * 64)
    assert "model.safetensors" in failure(capsys, "inspect", str(empty))
    assert "not empty" in failure(capsys, "synth", str(folder))
    assert "table_gib" in failure(capsys, "synth", str(tmp_path / "new"), "--table-gib", "0")
    assert not (tmp_path / "new").exists()
    text = failure(capsys, "bench", "reader", str(folder), "--rows", "65")
    assert text == "--rows: needs 65 different rows, layers.1.ple has 64"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    text = failure(capsys, "synth", str(tmp_path / "file" / "below"), "--table-gib", "0.001")
    assert text.startswith(str(tmp_path / "file"))
    assert text.endswith(": not a directory")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["no-such-command"],
        ["gather", "x"],
        ["gather", "x", "--rows", "1", "--tokens", "1"],
        ["gather", "x", "--rows", "1,two"],
        ["gather", "x", "--rows", "9223372036854775808"],
        ["gather", "x", "--rows", "1", "--backend", "tape"],
        ["bench", "reader", "x"],
        ["bench", "reader", "x", "--rows", "0"],
        ["bench"],
        ["synth", "x", "--dtype", "int4"],
        ["serve", "x", "--port", "70000"],
        ["serve", "x", "--port", "http"],
    ],
)
def test_wrong_usage_is_status_2(argv: list[str], capsys: Capture) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: rowstream")


def test_an_error_of_several_lines_becomes_one(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def broken(path: object, **options: object) -> None:
        raise ValueError("first\n  second\n")

    monkeypatch.setattr("rowstream.catalog.tables", broken)
    assert failure(capsys, "inspect", "x") == "first second"


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def interrupted(path: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rowstream.catalog.tables", interrupted)
    assert main(["inspect", "x"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_closed_pipe_is_quiet(synth_checkpoint: Path) -> None:
    rows = ",".join(str(row) for row in range(2000))
    process = subprocess.Popen(
        [sys.executable, "-m", "rowstream", "gather", str(synth_checkpoint), "--rows", rows],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


@pytest.mark.parametrize(
    "argv",
    [["--version"], ["--help"], ["serve", "--help"], ["inspect", "PATH"], ["doctor", "PATH"]],
)
def test_light_commands_import_nothing_heavy(synth_checkpoint: Path, argv: list[str]) -> None:
    if argv[0] == "doctor" and gpus._driver_installed():
        pytest.skip("torch says what GPUs there are")
    code = (
        "import sys; from rowstream.cli import main; status = main(sys.argv[1:]);"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr);"
        "sys.exit(status)"
    )
    done = python(code, *[str(synth_checkpoint) if word == "PATH" else word for word in argv])
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rowstream {__version__}\n"


def help_of(capsys: Capture, *command: str) -> str:
    assert main([*command, "--help"]) == 0
    return capsys.readouterr().out


def examples(text: str) -> list[list[str]]:
    lines = [line.strip() for line in text.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("rowstream ")]


COMMANDS = [["synth"], ["inspect"], ["gather"], ["bench"], ["bench", "reader"], ["doctor"]]


def test_examples_of_help_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    done = [["doctor"]]  # needs no checkpoint, has a test of its own
    for command in COMMANDS:
        shown = examples(help_of(capsys, *command))
        assert shown
        for argv in shown:
            assert argv[: len(command)] == command
            if argv not in done:
                assert main(argv) == 0, argv
                done.append(argv)
            capsys.readouterr()


def test_examples_of_serve_and_of_the_program_parse(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    seen: list[object] = []

    def run(args: object) -> int:
        seen.append(args)
        return 0

    for command in ("inspect", "gather", "synth", "serve", "bench", "doctor"):
        monkeypatch.setattr(f"rowstream.cli.{command}.run", run)
    for argv in [*examples(help_of(capsys)), *examples(help_of(capsys, "serve"))]:
        assert main(argv) == 0, argv
    assert len(seen) == 7


def test_every_line_of_help_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "88")
    for command in [[], ["serve"], *COMMANDS]:
        assert max(map(len, help_of(capsys, *command).splitlines())) <= 88, command


# --- synth


def test_synth_writes_what_it_says(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "bf16"
    options = ["--table-gib", "0.01", "--dtype", "bf16", "--layout", "radixark", "--seed", "5"]
    assert main(["synth", str(folder), *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "320 bytes" in out
    assert "layout radixark, seed 5" in out
    assert "sparse" not in out
    assert f"{len(list(folder.iterdir()))} files" in out
    (table,) = answer(capsys, "inspect", str(folder), "--json")["tables"]
    assert (table["codec"], table["row_bytes"]) == ("bf16", 320)
    assert abs(table["table_bytes"] / 2**30 - 0.01) < 5e-4
    assert len(table["files"]) == 10
    assert json.loads((folder / "synth.json").read_text())["seed"] == 5
