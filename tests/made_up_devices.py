"""Devices that nobody has, and what was measured of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rowstream import doctor
from rowstream.block_device import BlockDevice
from rowstream.profile import DeviceProfile
from rowstream.random_reads import DEPTHS, RandomReads

NVME = BlockDevice("ext4", "/", "nvme0n1p2", "259:2", "Fast 1", "nvme", False)
FOUND = DeviceProfile(
    devices=(NVME,),
    reader="uring",
    queue_depth=64,
    block=512,
    conclusive=True,
    depth_rates=((16, 50_000.0), (64, 100_000.0)),
    block_rates=((512, 100_000.0), (4096, 99_000.0)),
    p50_us=300.0,
    from_device=True,
    file_bytes=1 << 30,
    measured_at="2026-01-02T03:04:05+00:00",
)


def reads(rate: float, *, device: float | None = 1.0) -> tuple[RandomReads, ...]:
    counted = None if device is None else int(1000 * device)
    return tuple(RandomReads(d, rate, d / rate * 1e6, 1000, counted) for d in DEPTHS)


def measured_as(
    monkeypatch: pytest.MonkeyPatch, found: Sequence[RandomReads], device: BlockDevice = NVME
) -> None:
    monkeypatch.setattr(doctor, "_measured", lambda subject, device: tuple(found))
    monkeypatch.setattr(doctor, "device_of", lambda path: device)
