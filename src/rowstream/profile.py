"""What a device wants from the reader: queue depth and block, chosen by a short measurement.

Measured where somebody asks for it and kept for each device and file system; opening a table
measures nothing.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from rowstream import _core, catalog
from rowstream.backends import DEFAULT_QUEUE_DEPTH
from rowstream.block_device import BlockDevice, device_of
from rowstream.depth_search import search
from rowstream.errors import ManifestError, UnavailableError
from rowstream.manifest import Manifest
from rowstream.profile_cache import read_entry, write_entry
from rowstream.random_reads import DEVICE_SHARE, READ_BYTES, Blocks, of_table

__all__ = ["SLOW_READS_PER_S", "DeviceProfile", "expectation", "slowness"]

SLOW_READS_PER_S = 10_000  # below it a prompt is slow however its reads are arranged

_SECTOR = 512
_QUEUE_DEPTH_MAX = 4096  # the core's
_KEPT_FROM_BYTES = 16 << 20  # a device's own cache may answer for less

_Rates = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """How the files of a table are best read, and the figures that say so."""

    devices: tuple[BlockDevice, ...]  # of all files, each once
    reader: str  # that measured: "uring", "pool" or "inline"
    queue_depth: int
    block: int  # bytes; 0 where reads are buffered and have none
    conclusive: bool  # False: the depth is the usual one, the measurement could not tell
    depth_rates: _Rates  # random reads/s by reads in flight
    block_rates: _Rates  # the same by bytes of a read, at the chosen depth
    p50_us: float  # until 16 reads submitted at once are all there
    from_device: bool | None  # whether the devices counted the reads; None if they do not count
    file_bytes: int  # over which the reads were spread
    measured_at: str  # ISO 8601, UTC

    @classmethod
    def measure(
        cls,
        table: Manifest | str | os.PathLike[str],
        budget_s: float = 0.25,
        *,
        reader: str = "auto",
    ) -> DeviceProfile:
        """Measure on the files of a table, or on any file, with random reads of whole blocks.

        Takes about `budget_s` seconds; where 16 reads take longer, so much. Raises ManifestError
        and ReadError where the files cannot be opened, UnavailableError where they hold no whole
        block.
        """
        began = time.perf_counter()
        paths, blocks_of = _blocks(table)
        devices = _devices(paths)
        chosen, blocks, direct = _probe(paths, reader)
        extents = blocks_of(blocks[0])[1]
        if not blocks_of(max(blocks))[1]:
            raise UnavailableError(
                f"{paths[0]}: a measurement needs a block of {max(blocks)} bytes, it has none"
            )
        before = _completed_reads(devices)
        found = search(
            lambda depth, block: _core.DiskTable(
                paths, [blocks_of(block)], reader=chosen, queue_depth=depth
            ),
            blocks,
            budget_s - (time.perf_counter() - began),
            most_depth=_most_depth(devices),
        )
        after = _completed_reads(devices)
        return cls(
            devices=devices,
            reader=chosen,
            queue_depth=found.queue_depth or DEFAULT_QUEUE_DEPTH,
            block=found.block if direct else 0,
            conclusive=found.queue_depth is not None,
            depth_rates=found.depth_rates,
            block_rates=found.block_rates,
            p50_us=found.p50_us,
            from_device=None
            if before is None or after is None
            else after - before >= DEVICE_SHARE * found.reads,
            file_bytes=sum(count for *_, count in extents) * blocks[0],
            measured_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    @classmethod
    def load(
        cls, table: Manifest | str | os.PathLike[str], reader: str = "uring"
    ) -> DeviceProfile | None:
        """Return what was kept of a reader on the devices that a table lies on, or None."""
        entry = read_entry(_key(_devices(_blocks(table)[0]), reader))
        return None if entry is None else _parsed(entry)

    def keep(self) -> bool:
        """Keep the profile for its devices in the user's cache folder; False where it was not.

        Not kept is what tells nothing about a device: an inconclusive measurement, one of a few
        megabytes, one that never reached the device, one without a queue. An unwritable folder is
        no error.
        """
        if not self.conclusive or self.from_device is False or self.reader == "inline":
            return False
        if self.file_bytes < _KEPT_FROM_BYTES:
            return False
        return write_entry(_key(self.devices, self.reader), asdict(self))

    @property
    def reads_per_s(self) -> float:
        """The best rate measured."""
        return max(rate for _, rate in self.depth_rates)

    @property
    def slow(self) -> str | None:
        """Why the slowest device is slow, or None."""
        depth, rate = max(self.depth_rates, key=lambda pair: pair[1])
        reasons = (slowness(device, depth, rate) for device in self.devices)
        return next((reason for reason in reasons if reason is not None), None)

    def __str__(self) -> str:
        names = ", ".join(device.name or device.file_system for device in self.devices)
        block = f", blocks of {self.block} bytes" if self.block else ""
        text = (
            f"{names}: {self.reads_per_s:,.0f} random reads/s, 16 at once in {self.p50_us:,.0f} us"
        )
        usual = "" if self.conclusive else ", the usual one"
        return f"{text}; queue depth {self.queue_depth}{usual}{block}"


def slowness(device: BlockDevice, depth: int, rate: float | None) -> str | None:
    """Return why a device is slow for a table, or None; `rate` is reads/s at `depth`."""
    if device.kind == "rotating":
        return f"{device.name or 'the disk'} is a rotating disk"
    if device.kind == "network":
        return f"{device.file_system} is a network or shared file system"
    if rate is not None and rate < SLOW_READS_PER_S and device.kind != "memory":
        return f"{rate:,.0f} random reads/s at depth {depth}, {SLOW_READS_PER_S:,} wanted"
    return None


def expectation(token_us: float | None, rate: float | None, reads: int) -> str:
    """Return what slowness means for `reads` reads a token; `token_us` is the time of 16 reads."""
    move = "move the checkpoint to a local SSD, or hold the table in memory (pinned)"
    if token_us is None or rate is None:
        return move
    return (
        f"about {token_us * max(1, reads / 16) / 1e3:,.1f} ms of reading for each token"
        f" and {1000 * reads / rate:,.1f} s for a prompt of 1,000 tokens; {move}"
    )


def _blocks(
    table: Manifest | str | os.PathLike[str],
) -> tuple[list[str], Callable[[int], Blocks]]:
    """Return files, and a function from the size of a block to the blocks in them."""
    if isinstance(table, Manifest):
        manifest = table
    else:
        path = os.fspath(table)
        try:
            manifest = catalog.tables(path)[0]
        except ManifestError:
            if not os.path.isfile(path):
                raise
            size = os.path.getsize(path)
            return [path], lambda b: (b, [(0, 0, 0, size // b)] if size >= b else [])
    return [os.fspath(file.path) for file in manifest.files], lambda b: of_table(manifest, b)


def _devices(paths: Sequence[str]) -> tuple[BlockDevice, ...]:
    by_folder = {os.path.dirname(os.path.realpath(path)): path for path in paths}
    return tuple(dict.fromkeys(device_of(path) for path in by_folder.values()))


def _key(devices: Sequence[BlockDevice], reader: str) -> str:
    # a home folder may be shared by several machines
    names = sorted(
        " ".join(filter(None, (d.file_system, d.name or d.mount_point, d.model))) for d in devices
    )
    return f"{platform.node()}: {' + '.join(names)}: {reader}"


def _probe(paths: list[str], reader: str) -> tuple[str, tuple[int, ...], bool]:
    """Return the reader that reads, the blocks to try, the usual one first, and whether direct."""
    planes = [(1, [(file, 0, file, 1) for file in range(len(paths))])]
    probe = _core.DiskTable(paths, planes, reader=reader, queue_depth=1)
    chosen, files = probe.reader, probe.files()
    probe.close()
    aligned = [file.alignment for file in files if file.direct]
    if not aligned:
        return chosen, (READ_BYTES,), False
    usual = max(_SECTOR, *aligned)
    return chosen, ((usual, READ_BYTES) if usual < READ_BYTES else (usual,)), True


def _most_depth(devices: Sequence[BlockDevice]) -> int | None:
    # what the kernel does not queue a ring has to hand to a worker thread
    known = [most for device in devices if (most := device.most_requests()) is not None]
    return sum(known) or None


def _completed_reads(devices: Sequence[BlockDevice]) -> int | None:
    counted = [device.completed_reads() for device in devices]
    known = [count for count in counted if count is not None]
    return sum(known) if len(known) == len(counted) else None


def _parsed(entry: Mapping[str, Any]) -> DeviceProfile | None:
    """Read an entry of the cache, which anything may have written."""
    try:
        profile = DeviceProfile(
            devices=tuple(BlockDevice(**device) for device in entry["devices"]),
            reader=str(entry["reader"]),
            queue_depth=_whole(entry["queue_depth"], 1, _QUEUE_DEPTH_MAX),
            block=_whole(entry["block"], 0, 1 << 20),
            conclusive=entry["conclusive"] is True,
            depth_rates=_rates(entry["depth_rates"]),
            block_rates=_rates(entry["block_rates"]),
            p50_us=float(entry["p50_us"]),
            from_device=entry["from_device"],
            file_bytes=_whole(entry["file_bytes"], 0, 1 << 62),
            measured_at=str(entry["measured_at"]),
        )
    except (KeyError, TypeError, ValueError):
        return None
    whole = profile.devices and profile.depth_rates and profile.block & (profile.block - 1) == 0
    return profile if whole else None


def _rates(pairs: Any) -> _Rates:
    return tuple((_whole(key, 1, 1 << 20), float(rate)) for key, rate in pairs)


def _whole(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{value!r} is not in [{low}, {high}]")
    return value
