"""What doctor makes of rates and of memory: fit, slow, or not a disk."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from made_up_devices import NVME, measured_as, reads
from rowstream import doctor, machine
from rowstream.block_device import BlockDevice
from rowstream.cli import main
from rowstream.doctor import Report, examine
from rowstream.random_reads import from_device

Capture = pytest.CaptureFixture[str]


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
