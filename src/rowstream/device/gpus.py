"""What GPUs this machine has, and how a stream on them can wait for rows: probes for the doctor.

Importing it needs neither torch nor CUDA, and where there is no driver torch is not imported later
either. How the waits are tried is sync.py's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rowstream.device import driver, sync
from rowstream.errors import UnavailableError

__all__ = ["Gpu", "Gpus", "examine"]

_FEW_QUEUES = 4


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, as torch counts them."""

    index: int
    name: str
    compute_capability: str
    pci_bus_id: str
    numa_node: int | None
    waits: dict[str, str]  # by way to wait: "ok", or why not
    auto: str | None  # the way that sync="auto" chooses
    auto_reason: str
    file: bool  # whether it reads a mapped checkpoint over the host's page tables


@dataclass(frozen=True, slots=True)
class Gpus:
    """Whether rows can go to a GPU here, and to which."""

    usable: bool
    reason: str  # the driver and what it has, or why not
    devices: tuple[Gpu, ...]
    warnings: tuple[str, ...]  # what the environment says and should not


def examine(told: Callable[[str], object] | None = None) -> Gpus:
    """Probe every GPU that torch sees.

    Ways to wait are tried in processes of their own, some ten seconds a GPU; the result is kept for
    as long as driver and device are the same. `told` is called with a line before each GPU.
    """
    if not _driver_installed():
        return Gpus(False, "no NVIDIA driver, libcuda.so.1 cannot be loaded", (), ())
    usable, reason = driver.available()
    if not usable:
        return Gpus(False, reason, (), ())
    try:
        devices = []
        for index in range(_count()):
            if told is not None:
                told(f"cuda:{index}: ways to wait for rows, ten seconds where they are not known")
            devices.append(_gpu(index))
    except RuntimeError as error:  # of the driver
        return Gpus(False, str(error), (), ())
    return Gpus(True, reason, tuple(devices), tuple(_warnings(os.environ)))


def _gpu(index: int) -> Gpu:
    found = driver.attributes(index)
    usable, why = driver.available(index)
    auto: str | None
    try:
        auto, reason = sync.choose("auto", index)
    except (UnavailableError, ValueError) as error:  # of what ROWSTREAM_SYNC asks for
        auto, reason = None, str(error)
    # once more only where the result could not be kept; a gate is the host's own work
    waits = sync.probed(index) | {"gate": "ok"} if usable else dict.fromkeys(sync.MODES, why)
    return Gpu(
        index=index,
        name=found.name,
        compute_capability=".".join(map(str, found.compute_capability)),
        pci_bus_id=found.pci_bus_id,
        numa_node=found.numa_node,
        waits=waits,
        auto=auto,
        auto_reason=reason,
        file=found.pageable_uses_host_page_tables,
    )


def _warnings(environment: Mapping[str, str]) -> list[str]:
    found = []
    queues = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if queues.isdecimal() and int(queues) < _FEW_QUEUES:
        found.append(
            f"CUDA_DEVICE_MAX_CONNECTIONS={queues}: branches of a graph share so few queues that a "
            "wait may hold up work put behind it, and the read is then not hidden; the default is 8"
        )
    # No deadlock: the launch that stands is answered by a thread of ours, which launches nothing
    # and needs no interpreter lock.
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        found.append(
            "CUDA_LAUNCH_BLOCKING: each launch ends before the next one begins; lookups work, but "
            "nothing runs beside their wait and no read is hidden"
        )
    return found


def _driver_installed() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _count() -> int:
    import torch

    return torch.cuda.device_count()
