"""Puts planned files on the device: direct writes from two threads, and all of them or none.

A worker owns its stream and its page-aligned buffer; memory does not grow with the table.
"""

from __future__ import annotations

import bisect
import errno
import fcntl
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rowstream.synth.layout import FilePlan
from rowstream.synth.stream import TableStream

_CHUNK_BYTES: Final = 8 << 20
_WORKERS: Final = 2
_PAGE: Final = 4096
_O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
_TEMPORARY: Final = ".part"


class Publication:
    """A folder that is filled completely or left as it was.

    Files have temporary names until `commit`; leaving the context without it removes them, and the
    folder if it is new.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names: list[str] = []
        self._new_folders: list[Path] = []
        self._committed = False

    def __enter__(self) -> Publication:
        self._new_folders = [p for p in (self.folder, *self.folder.parents) if not p.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(self.folder.iterdir()):
            raise FileExistsError(
                errno.EEXIST,
                "not empty, a checkpoint needs a new or empty folder",
                str(self.folder),
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._committed:
            return
        for name in self._names:
            for path in (self.folder / name, self.temporary(name)):
                path.unlink(missing_ok=True)
        for folder in self._new_folders:
            with suppress(OSError):  # somebody else may have put a file there
                folder.rmdir()

    def temporary(self, name: str) -> Path:
        return self.folder / (name + _TEMPORARY)

    def add(self, name: str) -> Path:
        """Announce a file and return the path to write it at."""
        self._names.append(name)
        return self.temporary(name)

    def add_text(self, name: str, content: bytes) -> int:
        """Write a small file and return its bytes."""
        with self.add(name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return len(content)

    def commit(self) -> None:
        """Give every file its name, in the order they were added."""
        for name in self._names:
            os.rename(self.temporary(name), self.folder / name)
        _sync_folder(self.folder)
        for folder in self._new_folders:
            _sync_folder(folder.parent)
        self._committed = True


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _PlannedFile:
    """An open file and where its bytes come from: literals, or places in the table's stream."""

    def __init__(self, path: Path, plan: FilePlan, *, direct: bool) -> None:
        self.num_bytes = plan.num_bytes
        self._path = path
        self._starts: list[int] = [0]
        self._sources: list[bytes | int] = [plan.header]
        at = len(plan.header)
        for tensor in plan.tensors:
            self._starts.append(at)
            source = tensor.table_offset if tensor.data is None else tensor.data
            assert source is not None
            self._sources.append(source)
            at += tensor.num_bytes
        self._starts.append(at)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self.fd = _open(path, flags, direct=direct)

    def literals(self) -> Iterator[tuple[int, bytes]]:
        for start, source in zip(self._starts, self._sources, strict=False):
            if isinstance(source, bytes):
                yield start, source

    def fill(self, first: int, out: NDArray[np.uint8], stream: TableStream) -> None:
        """Fill `out` with the file's bytes from `first` on; it must end inside the file."""
        at, end = first, first + out.size
        while at < end:
            i = bisect.bisect_right(self._starts, at) - 1
            stop = min(end, self._starts[i + 1])
            part = out[at - first : stop - first]
            skip, source = at - self._starts[i], self._sources[i]
            if isinstance(source, bytes):
                part[:] = np.frombuffer(source, np.uint8)[skip : skip + part.size]
            else:
                stream.fill(source + skip, part)
            at = stop

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Write all of `data`; go on buffered where the file system refuses it as direct."""
        view = memoryview(data)
        while view:
            try:
                count = os.pwrite(self.fd, view, offset)
            except OSError as error:
                flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & _O_DIRECT:
                    raise OSError(error.errno, error.strerror, str(self._path)) from error
                fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~_O_DIRECT)
                continue
            view, offset = view[count:], offset + count

    def finish(self) -> None:
        os.ftruncate(self.fd, self.num_bytes)  # direct writes end on a page
        os.fsync(self.fd)
        if hasattr(os, "posix_fadvise"):
            # what was written buffered must not stay in memory: readers are measured on this
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _open(path: Path, flags: int, *, direct: bool) -> int:
    if direct and _O_DIRECT:
        try:
            return os.open(path, flags | _O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # some file systems refuse after they created the file
    return os.open(path, flags, 0o666)


class _Work:
    """The chunks still to write, handed out in file order to the workers."""

    def __init__(self, files: Sequence[_PlannedFile], seed: int, dtype: str) -> None:
        self._seed, self._dtype = seed, dtype
        self._chunks = (
            (file, first, min(first + _CHUNK_BYTES, file.num_bytes))
            for file in files
            for first in range(0, file.num_bytes, _CHUNK_BYTES)
        )
        self._lock = threading.Lock()
        self._stopped = False
        self.done_bytes = 0

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        """Write chunks until none is left; one call per thread."""
        stream = TableStream(self._seed, self._dtype)
        buffer = np.frombuffer(mmap.mmap(-1, _CHUNK_BYTES), np.uint8)  # starts on a page
        while (chunk := self._next()) is not None:
            file, first, end = chunk
            file.fill(first, buffer[: end - first], stream)
            whole = -(-(end - first) // _PAGE) * _PAGE
            buffer[end - first : whole] = 0
            file.write(buffer[:whole].data, first)
            with self._lock:
                self.done_bytes += end - first

    def _next(self) -> tuple[_PlannedFile, int, int] | None:
        with self._lock:
            return None if self._stopped else next(self._chunks, None)


def write_tables(
    publication: Publication,
    plans: Sequence[FilePlan],
    seed: int,
    dtype: str,
    *,
    sparse: bool,
    progress: Callable[[int, int], None] | None,
) -> int:
    """Write the planned files and return the bytes written; a sparse table is left out."""
    total = sum(plan.num_bytes for plan in plans)
    if not sparse:
        free = shutil.disk_usage(publication.folder).free
        if free < total:
            raise OSError(
                errno.ENOSPC, f"needs {total} bytes, {free} free", str(publication.folder)
            )
    files: list[_PlannedFile] = []
    try:
        for plan in plans:
            files.append(_PlannedFile(publication.add(plan.name), plan, direct=not sparse))
        if sparse:
            written = 0
            for file in files:
                for offset, data in file.literals():
                    file.write(data, offset)
                    written += len(data)
        else:
            _run_workers(_Work(files, seed, dtype), total, progress)
            written = total
        for file in files:
            file.finish()
        if progress is not None:
            progress(total, total)
        return written
    finally:
        for file in files:
            os.close(file.fd)


def _run_workers(work: _Work, total: int, progress: Callable[[int, int], None] | None) -> None:
    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="rowstream-synth") as pool:
        futures: set[Future[None]] = {pool.submit(work.run) for _ in range(_WORKERS)}
        try:
            while futures:
                done, futures = wait(futures, timeout=0.1, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if progress is not None:
                    progress(work.done_bytes, total)
        finally:
            work.stop()  # without it an interrupt would wait for the whole table
