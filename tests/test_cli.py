"""The commands against checkpoints whose bytes are read here straight from the files."""

from __future__ import annotations

import io
import json
import os
import shlex
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import checkpoints
from rowstream import __version__
from rowstream.cli import main
from rowstream.cli.progress import Progress
from rowstream.cli.text import fields, size
from rowstream.device import gpus

Capture = pytest.CaptureFixture[str]

ROW_BYTES = 160


def stored_shards(folder: Path) -> list[tuple[int, Path, int, int]]:
    """Return (shard, file, offset, rows) of a synthetic checkpoint from its headers alone."""
    found = []
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if ".ngram_embedding.shard_" in name:
                shard = int(name.split(".shard_")[1].split(".")[0])
                found.append(
                    (shard, path, 8 + length + entry["data_offsets"][0], entry["shape"][0])
                )
    return sorted(found)


def stored_row(folder: Path, row: int) -> bytes:
    for _, path, offset, rows in stored_shards(folder):
        if row < rows:
            with path.open("rb") as file:
                file.seek(offset + row * ROW_BYTES)
                return file.read(ROW_BYTES)
        row -= rows
    raise AssertionError("no such row")


def answer(capsys: Capture, *argv: str) -> Any:
    """Run a command that must succeed silently and return its JSON."""
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def failure(capsys: Capture, *argv: str, status: int = 1) -> str:
    """Run a command that must fail without output and return its only line."""
    assert main(argv) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rowstream: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("rowstream: error: ").strip()


def python(code: str, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False, **options
    )


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Path, NDArray[np.uint8]]:
    """A hand-written checkpoint and its table: 64 rows of 6 bytes."""
    return tmp_path, checkpoints.write_tiny(tmp_path)


# --- inspect


def test_inspect_json_says_what_the_headers_say(synth_checkpoint: Path, capsys: Capture) -> None:
    result = answer(capsys, "inspect", str(synth_checkpoint), "--json")
    assert set(result) == {"path", "tables"}
    (table,) = result["tables"]
    assert set(table) == {
        *("name", "tensor", "layer", "family", "format", "root", "codec", "scale"),
        *("num_rows", "row_bytes", "row_values", "table_bytes", "heads", "groups"),
        *("reads_per_token", "blocks_per_token", "read_bytes_per_token", "pages_per_token"),
        *("planes", "files", "shards", "hash", "auto"),
    }
    shards = stored_shards(synth_checkpoint)
    rows = sum(shard[3] for shard in shards)
    assert table["name"] == "layers.1.ple"
    assert table["tensor"].endswith("layers.1.ple.ple_embedding.ngram_embedding")
    assert (table["layer"], table["family"], table["format"]) == (1, "ple", "safetensors")
    assert (table["codec"], table["scale"]) == ("fp8_e4m3", checkpoints.SCALE)
    assert (table["num_rows"], table["row_bytes"], table["row_values"]) == (rows, ROW_BYTES, 160)
    assert table["table_bytes"] == rows * ROW_BYTES
    assert (table["heads"], table["groups"], table["reads_per_token"]) == (16, [8, 8], 16)
    assert table["shards"] == len(shards) == 128
    assert {file["path"] for file in table["files"]} == {str(shard[1]) for shard in shards}
    for file in table["files"]:
        assert set(file) == {
            *("path", "file_bytes", "stored_bytes", "shards"),
            *("direct", "alignment", "note"),
        }
        assert file["file_bytes"] == os.stat(file["path"]).st_size
        assert file["shards"] == sum(str(shard[1]) == file["path"] for shard in shards)
    config = json.loads((synth_checkpoint / "config.json").read_text())["text_config"]
    constants = table["hash"]
    assert set(constants) == {
        *("ngram_size", "heads_per_ngram", "vocab_size", "eos", "num_rows"),
        *("multipliers", "sizes", "offsets"),
    }
    assert constants["eos"] == config["eos_token_id"]
    assert constants["vocab_size"] == config["vocab_size"]
    assert constants["num_rows"] == sum(constants["sizes"]) <= rows
    assert set(table["auto"]) == {"backend", "reader", "reason"}


def test_inspect_counts_straddling_rows_as_a_walk_over_all_rows_does(
    synth_checkpoint: Path, capsys: Capture
) -> None:
    (table,) = answer(capsys, "inspect", str(synth_checkpoint), "--json")["tables"]
    (plane,) = table["planes"]
    block = table["files"][0]["alignment"]
    assert {file["alignment"] for file in table["files"]} == {block}
    starts = [
        offset + row * ROW_BYTES
        for _, _, offset, rows in stored_shards(synth_checkpoint)
        for row in range(rows)
    ]

    def touched(size: int) -> tuple[int, float]:
        counts = [(start + ROW_BYTES - 1) // size - start // size + 1 for start in starts]
        return sum(counts), sum(count > 1 for count in counts) / len(starts)

    assert set(plane) == {
        *("name", "row_bytes", "extents", "offsets_mod_512", "offsets_mod_4096"),
        *("blocks", "block_bytes_read", "pages", "straddling_rows", "straddling_share"),
        *("straddling_share_512", "straddling_share_4096"),
    }
    assert (plane["name"], plane["row_bytes"], plane["extents"]) == ("codes", ROW_BYTES, 128)
    blocks, share = touched(block)
    assert plane["blocks"] == blocks
    assert plane["straddling_share"] == share
    assert plane["straddling_rows"] == round(share * len(starts))
    assert plane["block_bytes_read"] == blocks * block
    assert plane["straddling_share_512"] == touched(512)[1]
    assert (plane["pages"], plane["straddling_share_4096"]) == touched(4096)
    offsets = {shard[2] for shard in stored_shards(synth_checkpoint)}
    assert plane["offsets_mod_512"] == sorted({offset % 512 for offset in offsets})
    assert plane["offsets_mod_4096"] == sorted({offset % 4096 for offset in offsets})
    assert table["blocks_per_token"] == pytest.approx(16 * blocks / len(starts))
    assert table["read_bytes_per_token"] == pytest.approx(16 * blocks * block / len(starts))
    assert table["pages_per_token"] == pytest.approx(16 * touched(4096)[0] / len(starts))


@pytest.mark.parametrize(
    ("offset", "row_bytes", "rows", "block"),
    [
        (8, 160, 5000, 512),
        (13, 160, 37, 512),
        (0, 4096, 9, 4096),
        (1, 5000, 4097, 4096),
        (3, 7, 512, 512),
    ],
)
def test_coverage_equals_a_walk(offset: int, row_bytes: int, rows: int, block: int) -> None:
    from rowstream.cli.inspect import _coverage

    blocks = split = 0
    for row in range(rows):
        first = offset + row * row_bytes
        touched = (first + row_bytes - 1) // block - first // block + 1
        blocks += touched
        split += touched > 1
    assert _coverage(offset, row_bytes, rows, block) == (blocks, split)


def test_inspect_text_names_what_a_newcomer_needs(synth_checkpoint: Path, capsys: Capture) -> None:
    assert main(["inspect", str(synth_checkpoint)]) == 0
    out = capsys.readouterr().out
    rows = sum(shard[3] for shard in stored_shards(synth_checkpoint))
    assert out.startswith("layers.1.ple\n")
    assert f"({rows * ROW_BYTES:,} bytes)" in out
    assert f"{rows:,} of 160 bytes: 160 values, fp8_e4m3, scale 0.000199317932" in out
    assert "128 shards in 33 files" in out
    assert "16 rows (8 + 8 heads) in 16 reads" in out
    assert "auto chooses" in out
    assert "holes" not in out


def test_inspect_without_a_config_says_that_tokens_cannot_be_hashed(
    tiny: tuple[Path, NDArray[np.uint8]], capsys: Capture
) -> None:
    folder, _ = tiny
    (folder / "config.json").unlink()
    assert answer(capsys, "inspect", str(folder), "--json")["tables"][0]["hash"] is None
    assert main(["inspect", str(folder)]) == 0
    assert "without config.json" in capsys.readouterr().out
    assert "config.json" in failure(capsys, "gather", str(folder), "--tokens", "1")


def test_inspect_names_holes(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "sparse"
    assert main(["synth", str(folder), "--table-gib", "0.5", "--sparse"]) == 0
    out, err = capsys.readouterr()
    assert "reads as zeroes" in out
    assert "no read reaches the device" in out
    assert err == ""
    assert main(["inspect", str(folder)]) == 0
    assert "holes: " in capsys.readouterr().out


# --- gather


def test_gather_rows_gives_the_bytes_of_the_file(synth_checkpoint: Path, capsys: Capture) -> None:
    last = sum(shard[3] for shard in stored_shards(synth_checkpoint)) - 1
    border = stored_shards(synth_checkpoint)[0][3]
    wanted = [0, border - 1, border, last, 0]
    text = ",".join(str(row) for row in wanted)
    result = answer(capsys, "gather", str(synth_checkpoint), "--rows", text, "--json")
    assert result == {
        "row_ids": [wanted],
        "rows_hex": [[stored_row(synth_checkpoint, row).hex() for row in wanted]],
    }
    assert main(["gather", str(synth_checkpoint), "--rows", text]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{row} {stored_row(synth_checkpoint, row).hex()}" for row in wanted
    ]


def test_gather_tokens_gives_a_list_for_each_token(synth_checkpoint: Path, capsys: Capture) -> None:
    result = answer(capsys, "gather", str(synth_checkpoint), "--tokens", "17,42,99", "--json")
    assert set(result) == {"row_ids", "rows_hex"}
    assert [len(rows) for rows in result["row_ids"]] == [16, 16, 16]
    (table,) = answer(capsys, "inspect", str(synth_checkpoint), "--json")["tables"]
    constants = table["hash"]
    history = [constants["eos"], constants["eos"], 17, 42, 99]
    for token, rows in enumerate(result["row_ids"]):
        window = history[token : token + 3][::-1]
        for head, row in enumerate(rows):
            mixed = 0
            for distance in range(2 + head // 8):
                mixed ^= window[distance] * constants["multipliers"][distance]
            assert row == mixed % constants["sizes"][head] + constants["offsets"][head]
            assert result["rows_hex"][token][head] == stored_row(synth_checkpoint, row).hex()


@pytest.mark.parametrize("backend", ["disk", "mmap", "pinned"])
@pytest.mark.parametrize("reader", ["auto", "pool"])
def test_gather_takes_backend_and_reader(
    tiny: tuple[Path, NDArray[np.uint8]], capsys: Capture, backend: str, reader: str
) -> None:
    folder, table = tiny
    options = ["--backend", backend, "--reader", reader, "--json"]
    result = answer(capsys, "gather", str(folder), "--rows=-1,63", *options)
    assert result["rows_hex"] == [["00" * 6, table[63].tobytes().hex()]]


def test_gather_values_are_the_decoded_codes(tmp_path: Path, capsys: Capture) -> None:
    table = np.zeros((64, 6), np.uint8)
    table[3] = [0x38, 0xB8, 0x40, 0x01, 0x7E, 0x7F]  # 1, -1, 2, 2**-9, 448, NaN
    checkpoints.write_config(tmp_path)
    arrays = [checkpoints.scale(), *checkpoints.shards(table, [64])]
    checkpoints.write_file(tmp_path / "model.safetensors", arrays)
    result = answer(capsys, "gather", str(tmp_path), "--rows", "3", "--values", "--json")
    expected = [np.float32(v) * np.float32(checkpoints.SCALE) for v in (1, -1, 2, 2**-9, 448)]
    assert result["values"] == [[[*map(float, expected), None]]]
    assert main(["gather", str(tmp_path), "--rows", "3", "--values"]) == 0
    row, *values = capsys.readouterr().out.split()
    assert row == "3"
    assert [np.float32(v) for v in values[:5]] == expected
    assert values[5] == "nan"


def test_gather_chooses_among_several_tables(tmp_path: Path, capsys: Capture) -> None:
    checkpoints.write_config(tmp_path, ple_layer_ids=[2, 6])
    arrays, expected = [], {}
    for layer, rows in checkpoints.TINY_ROWS.items():
        table = checkpoints.table_bytes(rows, checkpoints.TINY_WIDTH, layer)
        arrays += [checkpoints.scale(layer), *checkpoints.shards(table, [rows], layer=layer)]
        expected[f"layers.{layer}.ple"] = table[5].tobytes().hex()
    checkpoints.write_file(tmp_path / "model.safetensors", arrays)
    for name, row in expected.items():
        result = answer(capsys, "gather", str(tmp_path), "--rows", "5", "--table", name, "--json")
        assert result["rows_hex"] == [[row]]
    assert "layers.1.ple, layers.5.ple" in failure(capsys, "gather", str(tmp_path), "--rows", "5")
    named = failure(capsys, "gather", str(tmp_path), "--rows", "5", "--table", "layers.2.ple")
    assert "layers.2.ple" in named
    names = [t["name"] for t in answer(capsys, "inspect", str(tmp_path), "--json")["tables"]]
    assert names == list(expected)


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


# --- help, start-up


HEAVY = ("torch", "transformers", "starlette", "uvicorn", "accelerate", "tokenizers")


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


# --- synth, serve, bench


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


def test_serve_hands_its_arguments_on(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(
        "rowstream.serve.server.serve", lambda *args, **options: calls.append((args, options))
    )
    checked: list[str] = []
    monkeypatch.setattr("rowstream.cli.serve._check_device", checked.append)
    assert main(["serve", "model"]) == 0
    options = ["--host", "::1", "--port", "0", "--table-backend", "disk", "--reader", "pool"]
    options += ["--dtype", "float32", "--device", "cpu", "--served-model-name", "tiny"]
    options += ["--table-path", "/a", "--table-path", "/b", "--table-cache", "1GiB"]
    options += ["--sync", "kernel", "--max-queue", "3"]
    options += ["--read-timeout", "2.5", "--on-read-error", "zero-rows"]
    assert main(["serve", "model", *options]) == 0
    assert checked == ["cpu"]
    assert calls[0] == (
        ("model",),
        {
            "host": "127.0.0.1",
            "port": 8000,
            "table_backend": "auto",
            "sync": "auto",
            "reader": "auto",
            "read_timeout_s": 10.0,
            "on_read_error": "raise",
            "table_paths": [],
            "table_cache_bytes": 64 << 20,
            "dtype": "auto",
            "device": None,
            "served_model_name": None,
            "max_queue": 64,
        },
    )
    assert calls[1] == (
        ("model",),
        {
            "host": "::1",
            "port": 0,
            "table_backend": "disk",
            "sync": "kernel",
            "reader": "pool",
            "read_timeout_s": 2.5,
            "on_read_error": "zero-rows",
            "table_paths": ["/a", "/b"],
            "table_cache_bytes": 1 << 30,
            "dtype": "float32",
            "device": "cpu",
            "served_model_name": "tiny",
            "max_queue": 3,
        },
    )


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_serve_refuses_a_time_out_that_is_none(capsys: Capture, seconds: str) -> None:
    assert main(["serve", "model", "--read-timeout", seconds]) == 2
    assert "needs seconds from 0.001 to 86400" in capsys.readouterr().err


def test_serve_on_a_device_that_is_not_there_is_one_line(capsys: Capture) -> None:
    torch = pytest.importorskip("torch")
    assert "--device nonsense: " in failure(capsys, "serve", "model", "--device", "nonsense")
    if not torch.cuda.is_available():
        assert "--device cuda: " in failure(capsys, "serve", "model", "--device", "cuda")


@pytest.mark.parametrize("missing", ["uvicorn", "accelerate"])
def test_serve_without_its_extras_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, missing: str
) -> None:
    def serve(*args: object, **options: object) -> None:
        raise ModuleNotFoundError(f"No module named '{missing}'")

    monkeypatch.setattr("rowstream.serve.server.serve", serve)
    text = failure(capsys, "serve", "model")
    assert missing in text
    assert text.endswith("install with: pip install 'rowstream[serve]'")


def test_serve_on_numpy_alone_says_what_to_install() -> None:
    code = (
        "import sys, importlib.util as util; real = util.find_spec\n"
        f"heavy = {HEAVY}\n"
        "util.find_spec = lambda name, *rest: None if name in heavy else real(name, *rest)\n"
        "from rowstream.cli import main; sys.exit(main(['serve', 'model']))"
    )
    done = python(code)
    assert done.returncode == 1
    assert done.stderr.startswith("rowstream: error: serve: needs starlette")
    assert done.stderr.endswith("pip install 'rowstream[serve]'\n")
    assert done.stderr.count("\n") == 1


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


# --- words


def test_sizes() -> None:
    assert [size(n) for n in (0, 1, 1023)] == ["0 bytes", "1 byte", "1,023 bytes"]
    assert [size(n) for n in (1024, 1536, 2**20, 51_200_245_760, 2**40, 2**52)] == [
        "1.00 KiB",
        "1.50 KiB",
        "1.00 MiB",
        "47.68 GiB",
        "1.00 TiB",
        "4096.00 TiB",
    ]


def test_fields_align_and_keep_further_lines_under_the_first() -> None:
    assert fields([("a", "1\n2"), ("long", "3")]) == "  a     1\n        2\n  long  3"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_draws_on_a_terminal_only_and_clears_its_line() -> None:
    quiet, terminal = io.StringIO(), _Terminal()
    for stream in (quiet, terminal):
        with Progress("writing", stream) as progress:
            progress(0, 200)
            progress(200, 200)
    assert quiet.getvalue() == ""
    drawn = terminal.getvalue().split("\r")
    assert drawn[1].startswith("writing [")
    assert "  0%" in drawn[1]
    assert "100%  200 bytes of 200 bytes" in drawn[2]
    assert drawn[-1] == "\x1b[K"


def test_progress_draws_ten_times_a_second_at_most() -> None:
    terminal = _Terminal()
    with Progress("writing", terminal) as progress:
        for done in range(1000):
            progress(done, 1001)
    assert terminal.getvalue().count("writing [") < 20
