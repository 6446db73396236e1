"""The probes: against what the kernel says, and against machines that refuse."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import checkpoints
from rowstream import block_device, doctor, machine
from rowstream.block_device import BlockDevice, device_of
from rowstream.cli import main
from rowstream.doctor import Report, examine
from rowstream.errors import ManifestError, UnavailableError
from rowstream.random_reads import DEPTHS, RandomReads, from_device

Capture = pytest.CaptureFixture[str]

NVME = BlockDevice("ext4", "/", "nvme0n1p2", "259:2", "Fast 1", "nvme", False)


@pytest.fixture(autouse=True)
def small_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write less than a person's disk deserves."""
    monkeypatch.setattr(doctor, "_TEMPORARY_BYTES", 17 << 20)


def reads(rate: float, *, device: float | None = 1.0) -> tuple[RandomReads, ...]:
    counted = None if device is None else int(1000 * device)
    return tuple(RandomReads(d, rate, d / rate * 1e6, 1000, counted) for d in DEPTHS)


def measured_as(
    monkeypatch: pytest.MonkeyPatch, found: Sequence[RandomReads], device: BlockDevice = NVME
) -> None:
    monkeypatch.setattr(doctor, "_measured", lambda subject, device: tuple(found))
    monkeypatch.setattr(doctor, "device_of", lambda path: device)


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


# --- slow, and not a disk


def verdict(capsys: Capture, path: Path) -> str:
    assert main(["doctor", str(path)]) == 0
    return capsys.readouterr().out.split("\nverdict")[1].strip()


def test_a_fast_device_is_fit(
    synth_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    measured_as(monkeypatch, reads(10_000))
    assert verdict(capsys, synth_checkpoint) == "fit for streaming"
    report = examine(synth_checkpoint)
    assert (report.slow, report.expect, report.from_device) == (None, None, True)


@pytest.mark.parametrize(
    ("device", "rate", "word"),
    [
        (NVME, 9_999, "9,999 random reads/s at depth 64, 10,000 wanted"),
        (dataclasses.replace(NVME, kind="rotating", name="sda"), 150, "sda is a rotating disk"),
        (
            dataclasses.replace(NVME, kind="network", file_system="nfs4"),
            30_000,
            "nfs4 is a network",
        ),
    ],
)
def test_a_slow_device_is_named_with_what_to_expect(
    synth_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    device: BlockDevice,
    rate: float,
    word: str,
) -> None:
    measured_as(monkeypatch, reads(rate), device)
    text = verdict(capsys, synth_checkpoint)
    assert text.startswith(f"slow: {word}")
    assert f"{16 / rate * 1e3:,.1f} ms of reading for each token" in text
    assert f"{16_000 / rate:,.1f} s for a prompt of 1,000 tokens" in text


def test_reads_that_no_device_did_give_no_verdict(
    synth_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    measured_as(monkeypatch, reads(900_000, device=0.9))
    assert verdict(capsys, synth_checkpoint) == "unknown, see the note"
    assert any("not a disk's figures" in note for note in examine(synth_checkpoint).notes)
    measured_as(monkeypatch, reads(900_000), dataclasses.replace(NVME, kind="memory"))
    assert "in memory already" in verdict(capsys, synth_checkpoint)


def test_whether_the_device_did_the_reads() -> None:
    assert from_device([]) is None
    assert from_device(reads(1e5)) is True
    assert from_device(reads(1e5, device=0.95)) is True
    assert from_device(reads(1e5, device=0.94)) is False
    assert from_device(reads(1e5, device=None)) is None
    assert from_device([*reads(1e5), *reads(1e5, device=None)]) is None


def test_only_whole_blocks_of_the_table_are_read(synth_checkpoint: Path) -> None:
    from rowstream import tables

    manifest = tables(synth_checkpoint)[0]
    row_bytes, extents = doctor._of_tables([manifest]).blocks
    assert row_bytes == 4096
    assert extents
    expected_first = 0
    for file, offset, first_row, num_rows in extents:
        assert offset % 4096 == 0
        assert first_row == expected_first
        expected_first += num_rows
        assert any(
            e.file == file
            and e.offset <= offset
            and offset + num_rows * 4096 <= e.offset + e.num_rows * manifest.row_bytes
            for e in manifest.planes[0].extents
        )
    assert expected_first >= manifest.table_bytes // 4096 - 2 * len(manifest.planes[0].extents)


def test_memory_is_set_against_the_table(
    synth_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    measured_as(monkeypatch, reads(50_000))
    for available, limit, word in [
        (2**30, None, "1.00 GiB available; layers.1.ple of 5.04 MiB would fit"),
        (2**20, None, "would not fit"),
        (2**30, 2**20, "this container is limited to 1.00 MiB; layers.1.ple of"),
    ]:
        found = machine.Memory(available, limit)
        monkeypatch.setattr(doctor, "memory", lambda found=found: found)
        assert main(["doctor", str(synth_checkpoint)]) == 0
        assert word in capsys.readouterr().out


def test_memory_a_refusal_and_a_profile_in_words(synth_checkpoint: Path) -> None:
    from rowstream.cli import doctor as command

    report = examine(synth_checkpoint)
    alone = dataclasses.replace(report, tables=(), memory=machine.Memory(2**30, None))
    assert command._memory_text(alone) == "1.00 GiB available"
    refused = dataclasses.replace(
        report.io_uring, allowed=False, reason="io_uring refused: no", errno="EPERM", advice="ask"
    )
    lines = command._io_uring_text(refused).splitlines()
    assert (lines[0], lines[-1]) == ("io_uring refused: no (EPERM)", "ask")
    assert command._profile_text(dataclasses.replace(report, profile=None)) == "not measured"


def test_a_report_has_only_json_values(
    synth_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_as(monkeypatch, reads(50_000))
    report = examine(synth_checkpoint)
    assert isinstance(report, Report)
    json.dumps(dataclasses.asdict(report), allow_nan=False)


# --- the device behind a path, on machines made of files


class Machine:
    """A /proc and a /sys in a folder."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        (self.proc / "self").mkdir(parents=True)
        (self.sys / "dev/block").mkdir(parents=True)
        monkeypatch.setattr(block_device, "_PROC", self.proc)
        monkeypatch.setattr(block_device, "_SYS", self.sys)
        self.mounts: list[str] = []

    def mount(self, point: str | Path, kind: str, source: str) -> None:
        escaped = str(point).replace(" ", "\\040")
        self.mounts.append(
            f"36 25 0:99 / {escaped} rw,relatime shared:1 master:2 - {kind} {source} rw"
        )
        (self.proc / "self/mountinfo").write_text("\n".join(self.mounts) + "\n")

    def device(self, number: str, path: str, *, rotational: int = 0, partition: int = 0) -> Path:
        folder = self.sys / "devices" / path
        folder.mkdir(parents=True, exist_ok=True)
        if partition:
            (folder / "partition").write_text(f"{partition}\n")
        disk = folder.parent if partition else folder
        (disk / "queue").mkdir(exist_ok=True)
        (disk / "queue/rotational").write_text(f"{rotational}\n")
        (disk / "queue/iostats").write_text("1\n")
        (self.sys / "dev/block" / number).symlink_to(folder)
        return folder


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "machine", monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a folder" / "file"
    path.parent.mkdir()
    path.write_text("x")
    return path


def number_of(path: Path) -> str:
    device = os.stat(path).st_dev
    return f"{os.major(device)}:{os.minor(device)}"


@pytest.mark.parametrize(
    ("path", "rotational", "partition", "name", "kind"),
    [
        ("pci/nvme/nvme0/nvme0n1/nvme0n1p2", 0, 2, "nvme0n1p2", "nvme"),
        ("pci/ata1/sda/sda1", 1, 1, "sda1", "rotating"),
        ("pci/ata1/sda/sda1", 0, 1, "sda1", "ssd"),
        ("pci/virtio1/block/vda", 1, 0, "vda", "virtual"),
        ("pci/virtio2/host0/block/sda", 1, 0, "sda", "virtual"),
        ("mmc/mmcblk0/mmcblk0p1", 0, 1, "mmcblk0p1", "flash card"),
        ("virtual/block/loop3", 0, 0, "loop3", "loop"),
        ("virtual/block/zram0", 0, 0, "zram0", "memory"),
        ("virtual/block/nbd0", 0, 0, "nbd0", "network"),
    ],
)
def test_kinds_of_device(
    made: Machine, file: Path, path: str, rotational: int, partition: int, name: str, kind: str
) -> None:
    made.mount("/", "ext4", "/dev/root")
    folder = made.device(number_of(file), path, rotational=rotational, partition=partition)
    disk = folder.parent if partition else folder
    (disk / "device").mkdir()
    (disk / "device/model").write_text("Model 9   \n")
    found = device_of(file)
    assert (found.name, found.kind, found.rotational) == (name, kind, bool(rotational))
    assert (found.file_system, found.model) == ("ext4", "Model 9")


def test_a_volume_is_what_lies_below_it(made: Machine, file: Path) -> None:
    made.mount("/", "xfs", "/dev/mapper/vg-data")
    part = made.device("8:17", "pci/ata2/sdb/sdb1", rotational=1, partition=1)
    volume = made.device(number_of(file), "virtual/block/dm-0", rotational=1)
    (volume / "slaves").mkdir()
    (volume / "slaves/sdb1").symlink_to(part)
    assert (device_of(file).name, device_of(file).kind) == ("dm-0", "rotating")


@pytest.mark.parametrize(
    ("file_system", "kind"),
    [("nfs4", "network"), ("9p", "network"), ("tmpfs", "memory"), ("overlay", "unknown")],
)
def test_file_systems_without_a_device(
    made: Machine, file: Path, file_system: str, kind: str
) -> None:
    made.mount("/", "ext4", "/dev/root")
    made.mount(file.parent, "ext4", "hidden")
    made.mount(file.parent, file_system, "server:/export")  # over the one before
    made.mount(f"{file.parent}/fil", "btrfs", "no parent of the file")
    found = device_of(file)
    assert (found.file_system, found.mount_point) == (file_system, str(file.parent))
    assert (found.name, found.number, found.kind) == (None, None, kind)
    assert found.completed_reads() is None


def test_completed_reads_are_the_device_s_own(made: Machine, file: Path) -> None:
    made.mount("/", "ext4", "/dev/root")
    number = number_of(file)
    folder = made.device(number, "pci/nvme/nvme0/nvme0n1/nvme0n1p2", partition=2)
    major, minor = number.split(":")
    lines = ["   7 0 loop0 1 2 3 4", f" {major} {minor} nvme0n1p2 100 20 3 4 5 6 7 8 9 10 11"]
    (made.proc / "diskstats").write_text("\n".join(lines) + "\n")
    found = device_of(file)
    assert found.completed_reads() == 120
    (folder.parent / "queue/iostats").write_text("0\n")
    assert found.completed_reads() is None
    (folder.parent / "queue/iostats").write_text("1\n")
    (made.proc / "diskstats").unlink()
    assert found.completed_reads() is None


def test_a_file_system_with_a_number_of_its_own_says_what_it_is_mounted_from(
    made: Machine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # btrfs: no such device in /sys, but its source is one
    made.mount("/", "btrfs", "/dev/made")
    made.device("250:7", "pci/nvme/nvme7/nvme7n1")
    real = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if path != "/dev/made":
            return real(path, **options)
        fields = (kind | 0o600, 1, 1, 1, 0, 0, 0, 0, 0, 0)
        return os.stat_result(fields, {"st_rdev": os.makedev(250, 7)})

    monkeypatch.setattr(os, "stat", stat)
    kind = 0o060000  # a block device
    assert (device_of(file).name, device_of(file).number) == ("nvme7n1", "250:7")
    kind = 0o020000  # a character device
    assert device_of(file).number is None


def test_devices_that_are_not_counted_or_have_no_queue(made: Machine, file: Path) -> None:
    made.mount("/", "ext4", "/dev/root")
    folder = made.device(number_of(file), "pci/nvme/nvme0/nvme0n1")
    (made.proc / "diskstats").write_text("   7 0 loop0 1 2 3 4\n")
    found = device_of(file)
    assert (found.completed_reads(), found.most_requests()) == (None, None)
    (folder / "queue/nr_requests").write_text("1023\n")
    assert found.most_requests() == 1023
    assert dataclasses.replace(found, number=None).most_requests() is None


def test_links_that_lead_back_to_where_they_came_from(made: Machine, file: Path) -> None:
    made.mount("/", "ext4", "/dev/root")
    folder = made.device(number_of(file), "virtual/block/dm-0")
    (folder / "slaves").mkdir()
    (folder / "slaves/dm-0").symlink_to(folder)
    assert device_of(file).name == "dm-0"


def test_a_machine_that_shows_nothing(made: Machine, file: Path) -> None:
    found = device_of(file)
    assert (found.file_system, found.name, found.kind) == ("unknown", None, "unknown")
    with pytest.raises(FileNotFoundError):
        device_of(file.parent / "absent")


def test_this_machine_agrees_with_findmnt(tmp_path: Path) -> None:
    try:
        done = subprocess.run(
            ["findmnt", "-n", "-o", "FSTYPE,TARGET", "--target", str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no findmnt")
    if done.stdout.count("\n") != 1:
        pytest.skip("several mounts at one point")
    file_system, mount_point = done.stdout.strip().split(None, 1)
    found = device_of(tmp_path)
    assert (found.file_system, found.mount_point) == (file_system, mount_point)


# --- memory


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"memory.max": "1073741824\n"}, 2**30),
        ({"memory.max": "max\n"}, None),
        ({"memory/memory.limit_in_bytes": "536870912\n"}, 2**29),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ({}, None),
    ],
)
def test_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], limit: int | None
) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "meminfo").write_text(
        "MemTotal:  4000 kB\nMemFree: 10 kB\nMemAvailable:  3000 kB\n"
    )
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.memory() == machine.Memory(3000 * 1024, limit)


def test_machine_is_named_even_without_a_processor_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Linux" in machine.machine()
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    assert os.uname().machine in machine.machine()
