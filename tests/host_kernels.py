"""kernels.cu compiled for the host, and the driver that launches it: what a GPU would do, in turn.

A launch has few threads and blocks, whatever it asks for: the kernels stride over the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rowstream
from rowstream.device import driver
from rowstream.device.kernels import _ARGUMENTS, Answer, Kernels

__all__ = [
    "POISON",
    "Channel",
    "HostDriver",
    "at",
    "host_driver",
    "memory",
    "on_host",
    "random_ids",
]

_SOURCE = Path(rowstream.__file__).parent / "device" / "kernels.cu"
_SHIM = Path(__file__).parent / "core" / "cuda_shim.h"
_THREADS, _BLOCKS = 4, 3
_folder = tempfile.TemporaryDirectory(prefix="host-kernels-")
POISON = 0xA5


def _library() -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ was not found")
    text = re.sub(
        r'asm volatile\("ld\.acquire\.sys\.u64 %0, \[%1\];" : "=l"\((\w+)\) : "l"\((\w+)\).*?\);',
        r"\1 = __atomic_load_n(\2, __ATOMIC_ACQUIRE);",
        _SOURCE.read_text(),
    )
    text = re.sub(
        r'asm volatile\("mov\.u64 %0, %%globaltimer;" : "=l"\((\w+)\)\);',
        r"\1 = globaltimer();",
        text,
    )
    assert "asm" not in text
    source, made, library = (Path(_folder.name) / f"kernels.{kind}" for kind in ("cpp", "o", "so"))
    source.write_text(f'#include "{_SHIM}"\n{text}')
    # Linked without the sanitizer, whose one function is the shim's. Not optimized: a wide load at
    # a wrong address would end the process instead of being counted.
    options = ["-std=c++17", "-fPIC", "-pthread", "-w", "-fno-strict-aliasing"]
    sanitized = ["-fsanitize=alignment", "-c", str(source), "-o", str(made)]
    subprocess.run([compiler, *options, *sanitized], check=True)
    subprocess.run([compiler, "-shared", "-pthread", str(made), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@functools.cache
def host_driver() -> HostDriver:
    """Return the driver of the host, compiled for this process; skips the test without g++."""
    return HostDriver(_library())


@functools.cache
def _kernels() -> Kernels:
    return Kernels(0)


@contextlib.contextmanager
def on_host() -> Iterator[Kernels]:
    """Give the kernels, of a device of two multiprocessors; see that every address is aligned."""
    host = host_driver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "bindings", lambda: host)
        patch.setattr(driver, "use_primary_context", lambda device: None)
        patch.setattr(driver, "attributes", lambda device: SimpleNamespace(multiprocessors=2))
        before = host.misaligned
        yield _kernels()
        assert host.misaligned == before


class HostDriver:
    """Stands for the module `cuda.bindings.driver`, as far as kernels need it."""

    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 2, ctypes.c_void_p]
        library.launch.restype = None
        self._names: dict[int, str] = {}
        self._scratch = np.empty(1 << 14, np.uint8)
        self.refuse: list[Any] = []  # what the next launches return instead
        self.launches: list[tuple[str, int, int]] = []  # name, blocks and threads that it asked for

    @property
    def misaligned(self) -> int:
        """Loads and stores so far that a GPU would have refused."""
        return ctypes.c_uint.in_dll(self._library, "misaligned").value

    def at_fence(self, function: Any) -> None:
        """Have a ctypes function called at each fence of the system's scope; None ends that."""
        hook = ctypes.c_void_p.in_dll(self._library, "at_fence")
        hook.value = None if function is None else ctypes.cast(function, ctypes.c_void_p).value

    def cuModuleLoadData(self, image: bytes) -> tuple[int, int]:
        return 0, 1

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[int, int]:
        function = ctypes.cast(getattr(self._library, name.decode()), ctypes.c_void_p).value
        assert function is not None
        self._names[function] = name.decode()
        return 0, function

    def cuStreamCreate(self, flags: int) -> tuple[int, int]:
        return 0, 1

    def cuStreamSynchronize(self, stream: int) -> tuple[int]:
        return (0,)

    def cuStreamDestroy(self, stream: int) -> tuple[int]:
        return (0,)

    def cuMemAlloc(self, num_bytes: int) -> tuple[int, int]:
        assert num_bytes + 256 <= self._scratch.nbytes
        return 0, -(-self._scratch.ctypes.data // 256) * 256

    def cuMemFree(self, address: int) -> tuple[int]:
        return (0,)

    def cuMemsetD8Async(self, address: int, value: int, count: int, stream: int) -> tuple[int]:
        ctypes.memset(address, value, count)
        return (0,)

    def cuLaunchKernel(self, function: int, *launch: int) -> tuple[Any]:
        blocks, _, _, threads, _, _, _, _, pointers, _ = launch
        name = self._names[function]
        self.launches.append((name, blocks, threads))
        if self.refuse:
            return (self.refuse.pop(0),)
        count = _ARGUMENTS[name]
        slots = (ctypes.c_uint64 * count).from_address(pointers)
        values = (ctypes.c_uint64.from_address(slot).value for slot in slots)
        words = (ctypes.c_uint64 * 13)(*values)
        self._library.launch(function, min(blocks, _BLOCKS), min(threads, _THREADS), words)
        return (0,)


def at(array: NDArray[Any] | None) -> int:
    return 0 if array is None else array.ctypes.data


def memory(num_bytes: int, shift: int = 0) -> NDArray[np.uint8]:
    """Poisoned bytes, `shift` behind an address that is divisible by 16."""
    room = np.full(num_bytes + 32, POISON, np.uint8)
    first = -at(room) % 16 + shift
    return room[first : first + num_bytes]


class Channel:
    """What a channel's words, mailbox, staging and state are."""

    def __init__(self, kernels: Kernels, max_rows: int, row_bytes: int = 16) -> None:
        self.kernels = kernels
        self.mailbox = np.full(max_rows + 1, -7, np.int64)
        self.rows = np.zeros(1, np.uint32)
        self.door = np.zeros(1, np.uint64)
        self.header = np.zeros(1, np.uint64)
        self.fault = np.zeros(2, np.uint64)
        self.state = np.zeros(8, np.uint64)
        self.row_bytes = row_bytes
        self.staging = memory(max_rows * row_bytes)

    @property
    def epoch_busy_good_mismatch_done(self) -> tuple[int, ...]:
        return tuple(self.state[:5].tolist())

    @property
    def faults(self) -> tuple[int, int]:
        word, count = self.fault.tolist()
        return word, count

    def post(
        self,
        ids: NDArray[Any],
        live: int | None = None,
        head_of: list[int] | None = None,
        gated: bool = False,
    ) -> None:
        count = None if live is None else np.array([live], np.int32)
        heads_of = None if head_of is None else np.array(head_of, np.int32)
        tokens, heads = ids.shape
        owned = heads if heads_of is None else heads_of.size
        self.kernels.post(
            1, at(ids), ids.itemsize, tokens, heads, at(count), at(heads_of), owned,
            at(self.mailbox), at(self.rows), at(self.door), at(self.state), gated,
        )  # fmt: skip

    def answer(self, timeout_ns: int = 0) -> Answer:
        return Answer(at(self.header), at(self.fault), timeout_ns)

    def verdict(self, header: int | None = None, timeout_ns: int = 0) -> None:
        if header is not None:
            self.header[0] = header
        self.kernels.verdict(1, at(self.state), self.answer(timeout_ns))

    def answered(
        self, tokens: int, owned: int, status: int = 0, *, judged: bool = True
    ) -> NDArray[np.uint8]:
        """Post and answer with random rows, which are returned [tokens, owned, row_bytes]."""
        self.post(random_ids(tokens, owned))
        rows = np.random.default_rng(tokens).integers(0, 256, self.staging.size, np.uint8)
        self.staging[:] = rows
        self.header[0] = int(self.state[0]) << 8 | status
        if judged:
            self.verdict()
        count = tokens * owned * self.row_bytes
        return rows[:count].reshape(tokens, owned, self.row_bytes)


def random_ids(tokens: int, heads: int, dtype: Any = np.int64, seed: int = 0) -> NDArray[Any]:
    return np.random.default_rng(seed).integers(0, 320_001_536, (tokens, heads)).astype(dtype)
