"""The machine that a number was measured on: processor, kernel, memory, this process's limits."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Memory", "locked_memory_bytes", "machine", "memory"]

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Memory:
    """What the kernel could still give, and the limit of the container or None."""

    available_bytes: int
    limit_bytes: int | None


def machine() -> str:
    """Return processor, usable processors and kernel in one line."""
    cpu = platform.machine()
    try:
        for line in (_PROC / "cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                cpu = value.strip()
                break
    except OSError:
        pass
    count = len(os.sched_getaffinity(0))
    return (
        f"{cpu}, {count} CPU{'' if count == 1 else 's'}, {platform.system()} {platform.release()}"
    )


def memory() -> Memory:
    """Return how much memory there is to have."""
    available = 0
    for line in (_PROC / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            available = int(value.split()[0]) * 1024
    # inside a container the limit lies at the root of what it sees: version 2, then version 1
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int((_CGROUP / name).read_text())
        except (OSError, ValueError):
            continue
        # version 1 writes "no limit" as a number near 2**63
        return Memory(available, limit if limit < 2**60 else None)
    return Memory(available, None)


def locked_memory_bytes() -> int | None:
    """Return the limit on locked memory, `ulimit -l` in bytes; None is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit
