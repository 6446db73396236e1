"""Which way a stream waits on a machine: probes are faked, the processes that run them are not."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rowstream.device import driver, sync
from rowstream.errors import UnavailableError

Probes = dict[str, str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPU as far as the choice looks, and an empty cache folder, which is returned."""
    monkeypatch.setattr(driver, "available", lambda device: (True, "1 x GPU"))
    monkeypatch.setattr(driver, "device_uuid", lambda device: f"{device:032x}")
    monkeypatch.setattr(driver, "driver_version", lambda: "13000 580.95")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("ROWSTREAM_SYNC", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "rowstream"


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> tuple[Probes, list[tuple[str, int]]]:
    """What each probe says, to be changed; and which of them were asked."""
    says = dict.fromkeys(("doorbell", "kernel", "hostnode"), "ok")
    asked: list[tuple[str, int]] = []

    def probe(mode: str, device: int) -> str:
        asked.append((mode, device))
        return says[mode]

    monkeypatch.setattr(sync, "_probe", probe)
    return says, asked


Probed = tuple[Probes, list[tuple[str, int]]]


@pytest.mark.parametrize(
    ("broken", "mode", "reason"),
    [
        ((), "doorbell", "probed"),
        (("kernel", "hostnode"), "doorbell", "probed"),
        (("doorbell",), "kernel", "probed; doorbell: no doorbell"),
        (
            ("doorbell", "kernel"),
            "hostnode",
            "probed; doorbell: no doorbell; kernel: no kernel",
        ),
        (
            ("doorbell", "kernel", "hostnode"),
            "gate",
            "probed; doorbell: no doorbell; kernel: no kernel; hostnode: no hostnode",
        ),
    ],
)
def test_auto_takes_the_first_that_works_and_says_what_does_not(
    probed: Probed, broken: tuple[str, ...], mode: str, reason: str
) -> None:
    probed[0].update({name: f"no {name}" for name in broken})
    assert sync.choose("auto", 0) == (mode, reason)


@pytest.mark.parametrize("mode", ["doorbell", "kernel", "hostnode"])
def test_a_mode_that_works_is_taken_where_it_is_asked_for(probed: Probed, mode: str) -> None:
    assert sync.choose(mode, 0) == (mode, "asked for")


def test_a_mode_that_does_not_work_is_refused_with_the_choice_of_auto(probed: Probed) -> None:
    probed[0].update(doorbell="no answer within 30 s", kernel="exit status 1: nothing said")
    with pytest.raises(UnavailableError) as refused:
        sync.choose("kernel", 3)
    assert str(refused.value) == (
        "sync 'kernel' does not work on cuda:3: exit status 1: nothing said; "
        "auto would choose 'hostnode'"
    )
    assert (refused.value.probe, refused.value.auto) == ("kernel", "hostnode")


def test_a_gate_asks_nothing_of_the_machine(
    probed: Probed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "available", lambda device: (False, "no GPU"))
    assert sync.choose("gate", 0) == ("gate", "asked for")
    assert probed[1] == []


@pytest.mark.parametrize("wanted", ["auto", "doorbell", "kernel", "hostnode"])
def test_without_a_gpu_the_driver_says_why(
    probed: Probed, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "available", lambda device: (False, "torch sees no GPU"))
    with pytest.raises(UnavailableError, match=r"^torch sees no GPU$"):
        sync.choose(wanted, 0)
    assert probed[1] == []


def test_the_environment_speaks_for_auto_only(
    probed: Probed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROWSTREAM_SYNC", "hostnode")
    assert sync.choose("auto", 0) == ("hostnode", "ROWSTREAM_SYNC")
    assert sync.choose("kernel", 0) == ("kernel", "asked for")
    monkeypatch.setenv("ROWSTREAM_SYNC", "auto")
    assert sync.choose("auto", 0) == ("doorbell", "probed")
    monkeypatch.setenv("ROWSTREAM_SYNC", "gate")
    assert sync.choose("auto", 0) == ("gate", "ROWSTREAM_SYNC")
    probed[0]["hostnode"] = "broken"
    monkeypatch.setenv("ROWSTREAM_SYNC", "hostnode")
    with pytest.raises(UnavailableError, match="sync 'hostnode' does not work"):
        sync.choose("auto", 1)


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_mode_that_does_not_exist_is_refused(
    probed: Probed, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "environment":
        monkeypatch.setenv("ROWSTREAM_SYNC", "bell")
    with pytest.raises(ValueError, match="sync needs one of auto, doorbell, kernel, hostnode, gat"):
        sync.choose("auto" if how == "environment" else "bell", 0)


# --- what is kept -------------------------------------------------------------------------------

ALL = [("doorbell", 0), ("kernel", 0), ("hostnode", 0)]


def test_what_was_found_is_kept_for_driver_device_and_surroundings(
    probed: Probed, monkeypatch: pytest.MonkeyPatch
) -> None:
    says, asked = probed
    says["doorbell"] = "broken"
    first = sync.choose("auto", 0)
    assert asked == ALL
    says["doorbell"] = "ok"
    assert sync.choose("auto", 0) == first
    assert asked == ALL

    changes: list[Callable[[pytest.MonkeyPatch], None]] = [
        lambda patch: patch.setattr(driver, "driver_version", lambda: "13010 590.1"),
        lambda patch: patch.setattr(driver, "device_uuid", lambda device: "a" * 32),
        lambda patch: patch.setenv("CUDA_LAUNCH_BLOCKING", "1"),
        lambda patch: patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        lambda patch: patch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps"),
    ]
    for change in changes:
        asked.clear()
        with monkeypatch.context() as patch:
            change(patch)
            assert sync.choose("auto", 0) == ("doorbell", "probed")
            assert asked == ALL
    # and what was kept first is still there
    asked.clear()
    assert sync.choose("auto", 0) == first
    assert asked == []


def test_another_device_does_not_lose_what_the_first_was(probed: Probed) -> None:
    says, asked = probed
    says["doorbell"] = "broken"
    sync.choose("auto", 0)
    says["doorbell"] = "ok"
    assert sync.choose("auto", 1)[0] == "doorbell"
    asked.clear()
    assert sync.choose("auto", 0)[0] == "kernel"
    assert sync.choose("auto", 1)[0] == "doorbell"
    assert asked == []


def kept_file(cache: Path) -> Path:
    (found,) = cache.iterdir()  # and nothing half written beside it
    return found


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff", '{"version": 1}'])
def test_a_broken_file_is_as_good_as_none(probed: Probed, cache: Path, text: str) -> None:
    sync.choose("auto", 0)
    kept_file(cache).write_text(text, encoding="latin-1")
    probed[1].clear()
    assert sync.choose("auto", 0) == ("doorbell", "probed")
    assert probed[1] == ALL
    assert sync.choose("auto", 0) == ("doorbell", "probed")
    assert probed[1] == ALL


@pytest.mark.parametrize("entry", [5, "ok", ["doorbell", "kernel", "hostnode"], {"doorbell": "ok"}])
def test_a_broken_entry_is_as_good_as_none(probed: Probed, cache: Path, entry: object) -> None:
    sync.choose("auto", 0)
    file = kept_file(cache)
    document = json.loads(file.read_text())
    entries = document.get("profiles", document)
    for key in entries:
        entries[key] = entry
    file.write_text(json.dumps(document))
    probed[1].clear()
    assert sync.choose("auto", 0) == ("doorbell", "probed")
    assert probed[1] == ALL


def test_without_a_home_nothing_is_kept(probed: Probed, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert sync.choose("auto", 0) == ("doorbell", "probed")


def test_modes_of_another_version_are_probed_again(probed: Probed, cache: Path) -> None:
    sync.choose("auto", 0)
    file = kept_file(cache)
    file.write_text(file.read_text().replace("hostnode", "semaphore"))
    probed[1].clear()
    assert sync.choose("auto", 0) == ("doorbell", "probed")
    assert probed[1] == ALL


def test_a_cache_that_cannot_be_written_costs_probes_only(
    probed: Probed, cache: Path, tmp_path: Path
) -> None:
    cache.parent.write_text("a file where the folder would be")
    for _ in range(2):
        probed[1].clear()
        assert sync.choose("auto", 0) == ("doorbell", "probed")
        assert probed[1] == ALL


# --- the processes ------------------------------------------------------------------------------


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Have lines of a shell run where Python and the probe would."""

    def become(lines: str) -> Path:
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\n{lines}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return tmp_path

    return become


def test_the_last_line_of_a_probe_is_its_answer(child: Callable[[str], Path]) -> None:
    folder = child('echo "$@" "$PYTHONPATH" > "$(dirname "$0")/asked"; echo warning; echo ok')
    assert sync.probed(2) == dict.fromkeys(("doorbell", "kernel", "hostnode"), "ok")
    asked = (folder / "asked").read_text().split()
    assert asked[:4] == ["-m", "rowstream.device.probe", "hostnode", "2"]
    # it finds the very modules that this process has
    assert str(Path(driver.__file__).parents[2]) in asked[4].split(os.pathsep)


def test_a_probe_that_hangs_is_ended(
    child: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    child('[ "$3" = doorbell ] && exec sleep 600 || echo ok')
    # not so short that the shell would not have started, on a busy machine either
    monkeypatch.setattr(sync, "_PROBE_TIMEOUT_S", 4.0)
    began = time.monotonic()
    assert sync.choose("auto", 0) == ("kernel", "probed; doorbell: no answer within 4 s")
    assert time.monotonic() - began < 120


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("echo ok; exit 3", "exit status 3: nothing said"),
        ("echo one >&2; echo two >&2; exit 1", "exit status 1: two"),
        ("kill -SEGV $$", "exit status -11: nothing said"),
        ("true", "exit status 0: nothing said"),
        ("echo no such thing", "no such thing"),
    ],
)
def test_a_probe_that_crashes_is_a_mode_that_does_not_work(
    child: Callable[[str], Path], lines: str, reason: str
) -> None:
    child(lines)
    modes = ("doorbell", "kernel", "hostnode")
    listed = "; ".join(f"{mode}: {reason}" for mode in modes)
    assert sync.choose("auto", 0) == ("gate", f"probed; {listed}")
    for mode in modes:
        with pytest.raises(UnavailableError, match=r"auto would choose 'gate'$"):
            sync.choose(mode, 0)
