"""What the doctor says of GPUs, over a driver that is made up."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rowstream.cli import main
from rowstream.device import driver, gpus, sync
from rowstream.errors import UnavailableError

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

OK = {"doorbell": "ok", "kernel": "ok", "hostnode": "ok"}
REFUSED = {"doorbell": "no answer within 30 s", "kernel": "ok", "hostnode": "exit status 1: x"}
ONE = driver.Attributes("NVIDIA H200", (9, 0), 132, True, False, "0000:1b:00.0", 1)
OTHER = driver.Attributes("GB200", (10, 3), 152, True, True, "0008:01:00.0", None)


@pytest.fixture
def machine(monkeypatch: Patch) -> list[dict[str, str]]:
    """A machine with two GPUs; what the ways to wait are on each can be changed."""
    for name in ("ROWSTREAM_SYNC", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.delenv(name, raising=False)
    found = [dict(OK), dict(REFUSED)]
    monkeypatch.setattr(gpus, "_driver_installed", lambda: True)
    monkeypatch.setattr(gpus, "_count", lambda: len(found))
    monkeypatch.setattr(
        driver, "available", lambda *device: (True, "2 x NVIDIA H200, driver 13000")
    )
    monkeypatch.setattr(driver, "attributes", lambda index: (ONE, OTHER)[index])
    monkeypatch.setattr(sync, "probed", lambda index: found[index])
    return found


def test_every_gpu_is_described(machine: list[dict[str, str]]) -> None:
    told: list[str] = []
    found = gpus.examine(told.append)
    assert (found.usable, found.reason, found.warnings) == (
        True,
        "2 x NVIDIA H200, driver 13000",
        (),
    )
    one, other = found.devices
    assert (one.index, one.name, one.compute_capability) == (0, "NVIDIA H200", "9.0")
    assert (one.pci_bus_id, one.numa_node, one.file) == ("0000:1b:00.0", 1, False)
    assert one.waits == {**OK, "gate": "ok"}
    assert (one.auto, one.auto_reason) == ("doorbell", "probed")
    assert (other.compute_capability, other.numa_node, other.file) == ("10.3", None, True)
    assert other.waits == {**REFUSED, "gate": "ok"}
    assert other.auto == "kernel"
    assert other.auto_reason == "probed; doorbell: no answer within 30 s"
    assert [line.split(":")[1] for line in told] == ["0", "1"]
    # what is kept of a probe does not change for being shown
    assert machine == [OK, REFUSED]


def test_the_environment_can_ask_for_a_way(
    machine: list[dict[str, str]], monkeypatch: Patch
) -> None:
    monkeypatch.setenv("ROWSTREAM_SYNC", "doorbell")
    one, other = gpus.examine().devices
    assert (one.auto, one.auto_reason) == ("doorbell", "ROWSTREAM_SYNC")
    assert other.auto is None
    assert "does not work on cuda:1: no answer" in other.auto_reason
    monkeypatch.setenv("ROWSTREAM_SYNC", "telepathy")
    assert [gpu.auto for gpu in gpus.examine().devices] == [None, None]


@pytest.mark.parametrize(
    ("name", "value", "warned"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", True),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "3", True),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "4", False),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", False),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "many", False),
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "0", False),
        ("CUDA_LAUNCH_BLOCKING", "", False),
    ],
)
def test_warnings(
    machine: list[dict[str, str]], monkeypatch: Patch, name: str, value: str, warned: bool
) -> None:
    monkeypatch.setenv(name, value)
    warnings = gpus.examine().warnings
    assert len(warnings) == warned
    assert all(each.startswith(name) and "hidden" in each for each in warnings)


def test_a_driver_that_fails_is_a_reason(machine: list[dict[str, str]], monkeypatch: Patch) -> None:
    def failing(index: int) -> driver.Attributes:
        raise UnavailableError("device 0: CUDA_ERROR_NO_DEVICE", probe="device 0")

    monkeypatch.setattr(driver, "attributes", failing)
    found = gpus.examine()
    assert (found.usable, found.devices) == (False, ())
    assert found.reason == "device 0: CUDA_ERROR_NO_DEVICE"


def test_without_a_driver_torch_is_not_asked(monkeypatch: Patch) -> None:
    def asked() -> tuple[bool, str]:
        raise AssertionError

    monkeypatch.setattr(gpus, "_driver_installed", lambda: False)
    monkeypatch.setattr(driver, "available", asked)
    assert gpus.examine() == gpus.Gpus(
        False, "no NVIDIA driver, libcuda.so.1 cannot be loaded", (), ()
    )
    monkeypatch.setattr(gpus, "_driver_installed", lambda: True)
    monkeypatch.setattr(driver, "available", lambda: (False, "torch 2 is built without CUDA"))
    assert gpus.examine().reason == "torch 2 is built without CUDA"


def test_importing_it_imports_neither_torch_nor_cuda() -> None:
    script = (
        "import sys, rowstream.doctor, rowstream.device.gpus\n"
        "assert not {'torch', 'cuda', 'cuda.bindings'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_the_doctor_in_words_and_as_json(
    machine: list[dict[str, str]], monkeypatch: Patch, capsys: Capture, synth_checkpoint: Path
) -> None:
    monkeypatch.setattr("rowstream.doctor._measured", lambda subject, device: ())
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "2")
    assert main(["doctor", str(synth_checkpoint), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""  # no terminal
    found = json.loads(out)["gpus"]
    assert set(found) == {"usable", "reason", "devices", "warnings"}
    assert set(found["devices"][0]) == {field.name for field in dataclasses.fields(gpus.Gpu)}
    assert found["devices"][1]["waits"]["doorbell"] == "no answer within 30 s"

    assert main(["doctor", str(synth_checkpoint)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "GPU 2 x NVIDIA H200, driver 13000" in lines
    assert "cuda:0: NVIDIA H200, compute capability 9.0, NUMA node 1" in lines
    assert (
        "waits that work: doorbell, kernel, hostnode, gate; auto chooses doorbell (probed)" in lines
    )
    assert "cuda:1: GB200, compute capability 10.3, no NUMA node stated" in lines
    assert "hostnode: exit status 1: x" in lines
    assert "reads a mapped checkpoint by itself (backend file): can" in lines
    assert any(line.startswith("warning CUDA_DEVICE_MAX_CONNECTIONS=2") for line in lines)

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(["doctor", str(synth_checkpoint)]) == 0
    assert "cuda:1: ways to wait for rows" in capsys.readouterr().err

    monkeypatch.setattr(driver, "available", lambda: (False, "torch 2 sees no GPU"))
    assert main(["doctor", str(synth_checkpoint)]) == 0
    assert "none to bring rows to: torch 2 sees no GPU" in capsys.readouterr().out
