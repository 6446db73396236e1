"""What this machine allows and how fast its disk answers: probes for `rowstream doctor`.

Runs as an ordinary user, writes at most one temporary file, and keeps nothing open.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rowstream import _core, catalog
from rowstream.backends import ReadOptions, open_table
from rowstream.block_device import BlockDevice, device_of
from rowstream.checkpoint import locate
from rowstream.device import gpus
from rowstream.device.gpus import Gpus
from rowstream.errors import ManifestError, UnavailableError
from rowstream.machine import Memory, locked_memory_bytes, machine, memory
from rowstream.manifest import Manifest
from rowstream.profile import SLOW_READS_PER_S, DeviceProfile, expectation, slowness
from rowstream.random_reads import (
    DEPTHS,
    READ_BYTES,
    Blocks,
    RandomReads,
    from_device,
    measure,
    of_table,
)

__all__ = [
    "DEPTHS",
    "SLOW_READS_PER_S",
    "AutoChoice",
    "DirectReads",
    "IoUring",
    "RandomReads",
    "Report",
    "examine",
]

_TEMPORARY_BYTES = 64 << 20
_FEW_BLOCKS = 4096
_HEADS = 16  # rows of a token in the released checkpoints
_SUFFIX = ".safetensors"
_DISABLED = Path("/proc/sys/kernel/io_uring_disabled")


@dataclass(frozen=True, slots=True)
class IoUring:
    """Whether this process may use io_uring, and if not, what refused it."""

    allowed: bool
    reason: str | None  # of a refusal
    errno: str | None  # its name, EPERM
    disabled: int | None  # sysctl kernel.io_uring_disabled; None before Linux 6.6
    locked_memory_bytes: int | None  # ulimit -l; None is no limit
    registered_buffers: bool
    registered_files: bool
    advice: str | None


@dataclass(frozen=True, slots=True)
class DirectReads:
    """Whether the file takes O_DIRECT, and at which alignment."""

    allowed: bool
    alignment: int  # bytes; of buffered reads too
    reason: str | None


@dataclass(frozen=True, slots=True)
class AutoChoice:
    """What `backend="auto"` chooses for the file."""

    backend: str
    reader: str | None
    reason: str
    memory_bytes: int  # what the open table holds


@dataclass(frozen=True, slots=True)
class Report:
    """All findings; what could not be found is None and `notes` says why."""

    machine: str
    file: str  # what was read
    temporary: bool  # whether that file was made for the purpose
    tables: tuple[str, ...]
    table_bytes: int  # of all tables
    reads_per_token: int  # of all tables; of the usual one where there is none
    memory: Memory
    device: BlockDevice
    io_uring: IoUring
    direct: DirectReads
    measured: tuple[RandomReads, ...]
    profile: DeviceProfile | None  # what to read with; None without a block to measure on
    kept: bool  # whether the profile was kept for `DeviceProfile.load`
    from_device: bool | None  # whether the device counted the reads; None if it does not count
    auto: AutoChoice
    gpus: Gpus
    slow: str | None  # why the device is slow
    expect: str | None  # what that means
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is probed: whole blocks of some files, and the tables of the checkpoint if it is one."""

    paths: list[str]
    blocks: Blocks
    manifests: list[Manifest]
    temporary: bool
    notes: list[str]


def examine(
    path: str | os.PathLike[str] | None = None, *, told: Callable[[str], object] | None = None
) -> Report:
    """Probe what `path` lies on: a checkpoint, any file, or a folder; None is the current folder.

    Without a table or a file to read, a temporary file is written, synced, read and removed. GPUs
    are probed too; `told` is called with a line before what takes seconds. Raises ManifestError if
    there is nothing at `path`, OSError if it cannot be read.
    """
    with _subject(path) as subject:
        device = device_of(subject.paths[0])
        io_uring = _io_uring(subject)
        direct, auto = _auto(subject)
        measured = _measured(subject, device)
        profile = _profile(subject) if measured else None
        notes = [*subject.notes, *_doubts(subject, measured)]
    tables = subject.manifests
    rate = next((m.reads_per_s for m in measured if m.depth == 64), None)
    slow = slowness(device, 64, rate)
    reads = sum(table.heads * len(table.planes) for table in tables) or _HEADS
    return Report(
        machine=machine(),
        file=subject.paths[0],
        temporary=subject.temporary,
        tables=tuple(table.name for table in tables),
        table_bytes=sum(table.table_bytes for table in tables),
        reads_per_token=reads,
        memory=memory(),
        device=device,
        io_uring=io_uring,
        direct=direct,
        measured=measured,
        profile=profile,
        kept=profile is not None and profile.keep(),
        from_device=from_device(measured),
        auto=auto,
        gpus=gpus.examine(told),
        slow=slow,
        expect=None if slow is None else _expectation(measured, reads),
        notes=tuple(notes),
    )


@contextmanager
def _subject(path: str | os.PathLike[str] | None) -> Iterator[_Subject]:
    if path is None:
        with ExitStack() as stack:
            try:
                file = stack.enter_context(_temporary(Path.cwd()))
                found = _plain(file, [], temporary=True)
            except OSError as error:
                # a file that can be read is there in any case: our own
                note = f"not the disk of {Path.cwd()}, no temporary file there: {error.strerror}"
                found = _plain(Path(_core.__file__), [note])
            yield found
        return
    if os.path.isfile(path) and not os.fspath(path).endswith(_SUFFIX):
        yield _plain(Path(path), [])
        return
    folder = locate(path)
    try:
        found = _of_tables(catalog.tables(path))
    except ManifestError as error:
        files = [Path(path)] if os.path.isfile(path) else sorted(folder.glob(f"*{_SUFFIX}"))
        if not files:
            with _temporary(folder) as file:
                yield _plain(file, [], temporary=True)
            return
        note = f"no table to stream: {error}"
        found = _plain(max(files, key=lambda file: file.stat().st_size), [note])
    yield found


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".rowstream-doctor-") as file:
        # random, or a file system that compresses would read next to nothing
        block = np.random.default_rng().bytes(1 << 20)
        for _ in range(_TEMPORARY_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        yield Path(file.name)


def _plain(path: Path, notes: list[str], *, temporary: bool = False) -> _Subject:
    rows = path.stat().st_size // READ_BYTES
    blocks = (READ_BYTES, [(0, 0, 0, rows)] if rows else [])
    return _Subject([os.fspath(path)], blocks, [], temporary, notes)


def _of_tables(manifests: list[Manifest]) -> _Subject:
    manifest = manifests[0]  # the others lie beside it
    paths = [os.fspath(file.path) for file in manifest.files]
    return _Subject(paths, of_table(manifest, READ_BYTES), manifests, False, [])


def _open(subject: _Subject, reader: str, depth: int) -> _core.DiskTable:
    # a probe needs no row: without a whole block the table is one byte long
    row_bytes, extents = subject.blocks
    planes = [(row_bytes, extents)] if extents else [(1, [(0, 0, 0, 1)])]
    return _core.DiskTable(subject.paths, planes, reader=reader, queue_depth=depth)


def _io_uring(subject: _Subject) -> IoUring:
    try:
        disabled: int | None = int(_DISABLED.read_text())
    except (OSError, ValueError):
        disabled = None
    limit = locked_memory_bytes()
    try:
        table = _open(subject, "uring", 128)
    except UnavailableError as error:
        reason = str(error).removeprefix("reader uring: ").split(";")[0]
        name = next(
            (
                errno.errorcode[code]
                for code in errno.errorcode
                if reason.endswith(os.strerror(code))
            ),
            None,
        )
        advice = _advice(name, disabled)
        return IoUring(False, reason, name, disabled, limit, False, False, advice)
    note = table.reader_note
    table.close()
    buffers, files = "buffers not registered" not in note, "files not registered" not in note
    advice = None if buffers else "raise the locked-memory limit: ulimit -l unlimited"
    return IoUring(True, None, None, disabled, limit, buffers, files, advice)


def _advice(name: str | None, disabled: int | None) -> str | None:
    if name == "ENOSYS":
        return "needs Linux 5.6 or later"
    if name == "ENOMEM":
        return "raise the locked-memory limit: ulimit -l unlimited"
    if name not in ("EPERM", "EACCES"):
        return None
    if disabled:
        return "an administrator can allow it: sysctl kernel.io_uring_disabled=0"
    return (
        "a container's seccomp profile refuses it; with Docker: --security-opt seccomp=unconfined"
    )


def _auto(subject: _Subject) -> tuple[DirectReads, AutoChoice]:
    if subject.manifests:
        opened = open_table(subject.manifests[0], "auto", ReadOptions())
        chosen = (opened.backend, opened.reader, opened.reason, opened.native.memory_bytes)
        opened.native.close()
    else:
        table = _open(subject, "auto", 128)
        chosen = ("disk", table.reader, f"{table.reader}: {table.reader_note}", table.memory_bytes)
        table.close()
    table = _open(subject, "pool", 1)
    file = table.files()[0]
    table.close()
    direct = DirectReads(file.direct, file.alignment, file.note or None)
    return direct, AutoChoice(*chosen)


def _measured(subject: _Subject, device: BlockDevice) -> tuple[RandomReads, ...]:
    if not subject.blocks[1]:
        return ()
    return tuple(
        measure(lambda depth: _open(subject, "auto", depth), depth, device) for depth in DEPTHS
    )


def _doubts(subject: _Subject, measured: Sequence[RandomReads]) -> list[str]:
    """Return why the measurement may not be a disk's."""
    if not measured:
        return [f"nothing measured: {subject.paths[0]} has no whole block of {READ_BYTES} bytes"]
    doubts = []
    blocks = sum(extent[3] for extent in subject.blocks[1])
    if blocks < _FEW_BLOCKS:
        doubts.append(
            f"measured over {blocks * READ_BYTES} bytes only:"
            " a cache of the device may have answered"
        )
    elif subject.temporary:
        doubts.append(
            f"measured on a new file of {_TEMPORARY_BYTES >> 20} MiB:"
            " a disk may be slower over a whole table"
        )
    if from_device(measured) is False:
        doubts.append(
            "not a disk's figures: reads never reached the device, they came from the page cache"
            " or from holes of a sparse file"
        )
    return doubts


def _profile(subject: _Subject) -> DeviceProfile | None:
    try:
        return DeviceProfile.measure((subject.manifests or subject.paths)[0])
    except UnavailableError:
        return None


def _expectation(measured: Sequence[RandomReads], reads: int) -> str:
    token_us = next((m.p50_us for m in measured if m.depth == 16), None)
    return expectation(token_us, max((m.reads_per_s for m in measured), default=None), reads)
