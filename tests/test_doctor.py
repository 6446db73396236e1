"""`rowstream doctor`: its report, and what it says of an io_uring that is refused."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import checkpoints
from made_up_devices import measured_as, reads
from rowstream import doctor
from rowstream.cli import main
from rowstream.doctor import examine
from rowstream.errors import ManifestError, UnavailableError
from rowstream.random_reads import DEPTHS

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def small_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write less than a person's disk deserves."""
    monkeypatch.setattr(doctor, "_TEMPORARY_BYTES", 17 << 20)


# --- the report


def test_a_checkpoint_is_probed_where_it_lies(synth_checkpoint: Path, capsys: Capture) -> None:
    assert main(["doctor", str(synth_checkpoint), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    result = json.loads(out)
    assert set(result) == {
        *("machine", "file", "temporary", "tables", "table_bytes", "reads_per_token", "memory"),
        *("device", "io_uring", "direct", "measured", "from_device", "auto", "slow", "expect"),
        *("profile", "kept", "gpus", "notes"),
    }
    assert set(result["memory"]) == {"available_bytes", "limit_bytes"}
    assert set(result["device"]) == {
        *("file_system", "mount_point", "name", "number", "model", "kind", "rotational"),
    }
    assert set(result["io_uring"]) == {
        *("allowed", "reason", "errno", "disabled", "locked_memory_bytes"),
        *("registered_buffers", "registered_files", "advice"),
    }
    assert set(result["direct"]) == {"allowed", "alignment", "reason"}
    assert set(result["auto"]) == {"backend", "reader", "reason", "memory_bytes"}
    assert result["file"].startswith(str(synth_checkpoint))
    assert result["temporary"] is False
    assert result["tables"] == ["layers.1.ple"]
    assert result["reads_per_token"] == 16
    assert [m["depth"] for m in result["measured"]] == [1, 16, 64, 192]
    for m in result["measured"]:
        assert set(m) == {"depth", "reads_per_s", "p50_us", "reads", "device_reads"}
        assert m["reads_per_s"] > 0
        assert m["p50_us"] > 0
        assert m["reads"] > 0
    assert result["auto"]["backend"] == "disk"
    assert 1 <= result["profile"]["queue_depth"] <= 512
    assert result["kept"] is False  # 5 MB say little about a device
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    expected = None if limit == resource.RLIM_INFINITY else limit
    assert result["io_uring"]["locked_memory_bytes"] == expected
    assert any("bytes only" in note for note in result["notes"])  # 5 MB are soon in a cache


def test_the_text_has_units_and_the_reasons(synth_checkpoint: Path, capsys: Capture) -> None:
    assert main(["doctor", str(synth_checkpoint)]) == 0
    out = capsys.readouterr().out
    for label in (
        *("machine", "memory", "file", "device", "io_uring", "O_DIRECT", "random reads"),
        *("best with", "auto chooses", "GPU"),
    ):
        assert f"\n{label} " in f"\n{out}"
    for word in (
        "4 KiB reads/s",
        " us\n",
        "GiB available",
        "kernel.io_uring_disabled",
        "ulimit -l",
    ):
        assert word in out
    assert "available; layers.1.ple of 5.0" in out
    assert "\nverdict " in out


def test_without_a_path_a_temporary_file_is_read_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = examine()
    assert report.temporary
    assert os.path.dirname(report.file) == str(tmp_path)
    assert [m.depth for m in report.measured] == list(DEPTHS)
    assert list(tmp_path.iterdir()) == []
    assert (report.tables, report.table_bytes, report.reads_per_token) == ((), 0, 16)
    assert any("new file of 17 MiB" in note for note in report.notes)


def test_the_temporary_file_goes_when_a_probe_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(subject: object, device: object) -> None:
        assert len(list(tmp_path.iterdir())) == 1
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(doctor, "_measured", failing)
    with pytest.raises(OSError, match="Input/output error"):
        examine(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_leaves_a_file_to_probe(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir("/proc/self")  # nobody writes there, not even root
    report = examine()
    assert not report.temporary
    assert "_core" in os.path.basename(report.file)
    assert report.notes[0].startswith("not the disk of /proc/")
    assert main(["doctor", "/proc/self/task"]) == 1  # asked for by name, it is an error
    assert capsys.readouterr().err.startswith("rowstream: error: /proc/self/task")


def test_any_file_and_any_folder_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_as(monkeypatch, reads(50_000))
    other = tmp_path / "model.gguf"
    other.write_bytes(bytes(1 << 20))
    assert examine(other).file == str(other)
    assert examine(tmp_path).temporary
    assert list(tmp_path.iterdir()) == [other]


def test_a_broken_checkpoint_is_named_and_its_disk_probed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_as(monkeypatch, reads(50_000))
    checkpoints.write_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    report = examine(tmp_path)
    assert report.file == str(file)
    assert report.tables == ()
    assert report.notes[0].startswith("no table to stream: ")
    assert "model.safetensors" in report.notes[0]
    assert examine(file).notes[0].startswith("no table to stream: ")


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="nothing"):
        examine(tmp_path / "absent")


def test_a_file_below_one_block_is_not_measured(tmp_path: Path, capsys: Capture) -> None:
    checkpoints.write_tiny(tmp_path)
    report = examine(tmp_path)
    assert report.tables == ("layers.1.ple",)
    assert report.measured == ()
    assert report.from_device is None
    assert any("no whole block" in note for note in report.notes)
    assert main(["doctor", str(tmp_path)]) == 0
    assert "random reads  not measured" in capsys.readouterr().out


def test_several_tables_count_together(tmp_path: Path) -> None:
    checkpoints.write_config(tmp_path, ple_layer_ids=[2, 6])
    arrays = []
    for layer, rows in checkpoints.TINY_ROWS.items():
        table = checkpoints.table_bytes(rows, checkpoints.TINY_WIDTH)
        arrays += [checkpoints.scale(layer), *checkpoints.shards(table, [rows], layer=layer)]
    checkpoints.write_file(tmp_path / "model.safetensors", arrays)
    report = examine(tmp_path)
    assert report.tables == ("layers.1.ple", "layers.5.ple")
    assert report.table_bytes == (64 + 120) * 6
    assert report.reads_per_token == 8


# --- io_uring


# one instruction each: load the system call's number, is it io_uring_setup, refuse or allow
REFUSE_IO_URING = """
import ctypes, struct, sys
code = struct.pack("<HBBIHBBIHBBIHBBI", 0x20, 0, 0, 0, 0x15, 0, 1, 425,
                   0x06, 0, 0, 0x00050000 | {errno}, 0x06, 0, 0, 0x7FFF0000)
buffer = ctypes.create_string_buffer(code)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(4, ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program), 0, 0):
    sys.exit(77)
from rowstream.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "name", "advice"), [(1, "EPERM", "seccomp"), (38, "ENOSYS", "Linux 5.6")]
)
def test_a_process_that_may_not_use_io_uring_is_told_why(
    synth_checkpoint: Path, number: int, name: str, advice: str
) -> None:
    code = REFUSE_IO_URING.replace("{errno}", str(number))
    argv = [sys.executable, "-c", code, "doctor", str(synth_checkpoint), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this machine takes no seccomp filter")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    found = result["io_uring"]
    assert found["allowed"] is False
    assert found["errno"] == name
    assert os.strerror(number) in found["reason"]
    if not found["disabled"]:
        assert advice in found["advice"]
    assert result["auto"]["reader"] == "pool"
    assert os.strerror(number) in result["auto"]["reason"]
    assert [m["depth"] for m in result["measured"]] == [1, 16, 64, 192]


@pytest.mark.parametrize(
    ("name", "disabled", "word"),
    [
        ("EPERM", 2, "sysctl kernel.io_uring_disabled=0"),
        ("EPERM", 0, "seccomp"),
        ("EACCES", None, "seccomp"),
        ("ENOMEM", 0, "ulimit -l"),
        ("ENOSYS", None, "Linux 5.6"),
    ],
)
def test_advice_fits_the_refusal(name: str, disabled: int | None, word: str) -> None:
    advice = doctor._advice(name, disabled)
    assert advice is not None
    assert word in advice
    assert doctor._advice("EINVAL", 0) is None


class _Table:
    """What the probe of io_uring sees of a table."""

    def __init__(self, note: str) -> None:
        self.reader_note = note

    def close(self) -> None:
        pass


def io_uring_with(monkeypatch: pytest.MonkeyPatch, note: str | UnavailableError) -> doctor.IoUring:
    def open_table(subject: object, reader: str, depth: int) -> _Table:
        assert reader == "uring"
        if isinstance(note, UnavailableError):
            raise note
        return _Table(note)

    monkeypatch.setattr(doctor, "_open", open_table)
    subject: Any = None
    return doctor._io_uring(subject)


def test_unregistered_buffers_and_files_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = io_uring_with(monkeypatch, "asked for")
    assert (found.registered_buffers, found.registered_files, found.advice) == (True, True, None)
    found = io_uring_with(monkeypatch, "asked for; buffers not registered (Cannot allocate memory)")
    assert (found.registered_buffers, found.registered_files) == (False, True)
    assert found.advice is not None
    assert "ulimit -l" in found.advice
    found = io_uring_with(monkeypatch, "asked for; files not registered (Too many open files)")
    assert (found.registered_buffers, found.registered_files) == (True, False)


def test_a_refusal_without_a_known_errno_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = io_uring_with(monkeypatch, UnavailableError("reader uring: some new reason; more"))
    assert (found.allowed, found.reason, found.errno) == (False, "some new reason", None)
