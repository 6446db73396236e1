"""Machines with several GPUs that are not the same: what is said of each, and what it is asked."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from lookup_tables import write
from rowstream import RowStore, UnavailableError
from rowstream.device import driver, gpus, sync
from rowstream.device import lookup as lookups
from rowstream.device.hosted import HostedRows
from rowstream.device.lookup import Lookup, LookupOptions
from rowstream.device.streamed import StreamedRows

OLD = driver.Attributes("Tesla P40", (6, 1), 30, True, False, "0000:1b:00.0", 0)
NEW = driver.Attributes("NVIDIA H200", (9, 0), 132, True, False, "0000:1c:00.0", 0)
WHY = "Tesla P40: the kernels need compute capability 7.0, it has 6.1"
OK = {"doorbell": "ok", "kernel": "ok", "hostnode": "ok"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[driver.Attributes]:
    """A machine whose GPUs can be exchanged; its first is too old."""
    found = [OLD, NEW]
    bindings = SimpleNamespace(cuInit=lambda flags: (0,))
    monkeypatch.delenv("ROWSTREAM_SYNC", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(driver, "bindings", lambda: bindings)
    monkeypatch.setattr(driver, "attributes", lambda index: found[index])
    monkeypatch.setattr(driver, "driver_version", lambda: "13000")

    def probed(index: int) -> dict[str, str]:
        assert found[index] is not OLD
        return dict(OK)

    monkeypatch.setattr(sync, "probed", probed)
    return found


def test_one_that_can_is_enough(machine: list[driver.Attributes]) -> None:
    assert driver.available() == (True, "1 x NVIDIA H200, driver 13000")
    assert driver.available(1) == (True, "1 x NVIDIA H200, driver 13000")
    assert driver.available(0) == (False, WHY)
    machine[0] = NEW
    assert driver.available() == (True, "2 x NVIDIA H200, driver 13000")
    machine[:] = [OLD, OLD]
    assert driver.available() == (False, WHY)


def test_a_way_to_wait_is_chosen_for_each(machine: list[driver.Attributes]) -> None:
    assert sync.choose("auto", 1) == ("doorbell", "probed")
    with pytest.raises(UnavailableError, match=r"^Tesla P40: the kernels need"):
        sync.choose("kernel", 0)


def test_the_doctor_does_not_probe_one_that_cannot(
    machine: list[driver.Attributes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "_driver_installed", lambda: True)
    found = gpus.examine()
    assert found.usable
    old, new = found.devices
    assert (old.auto, old.auto_reason) == (None, WHY)
    assert old.waits == dict.fromkeys(["doorbell", "kernel", "hostnode", "gate"], WHY)
    assert (new.auto, new.waits) == ("doorbell", OK | {"gate": "ok"})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    write(tmp_path, "fp8_e4m3")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(lookups, "DeviceLink", lambda native, **options: SimpleNamespace())
    with RowStore.open(tmp_path) as opened:
        yield opened


def test_each_has_the_way_that_it_can(store: RowStore, machine: list[driver.Attributes]) -> None:
    look = Lookup(store)
    assert isinstance(look.path(torch.device("cuda", 1)), StreamedRows)
    assert isinstance(look.path(torch.device("cuda", 0)), HostedRows)
    with pytest.raises(UnavailableError, match=r"^Tesla P40: the kernels need"):
        Lookup(store, LookupOptions(sync="doorbell")).path(torch.device("cuda", 0))


def test_a_capture_on_one_that_was_not_warmed_up_is_told_so(
    store: RowStore, machine: list[driver.Attributes], monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Lookup(store)
    machine[0] = NEW
    first = look.path(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert look.path(torch.device("cuda", 0)) is first
    with pytest.raises(RuntimeError, match=r"needs warm_up\(\) on cuda:1 before its first capture"):
        look.path(torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert isinstance(look.path(torch.device("cuda", 1)), StreamedRows)


def test_one_way_that_cannot_be_closed_does_not_keep_the_others(store: RowStore) -> None:
    class Path:
        closed = False

        def close(self) -> None:
            self.closed = True
            raise RuntimeError("cuCtxSynchronize: CUDA_ERROR_LAUNCH_FAILED")

    look = Lookup(store)
    paths: list[Any] = [Path(), Path()]
    look._paths.update(enumerate(paths))
    with pytest.raises(RuntimeError, match="LAUNCH_FAILED"):
        look.close()
    assert all(path.closed for path in paths)
