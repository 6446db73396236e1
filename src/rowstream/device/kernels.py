"""The kernels of kernels.cu, loaded for one device, and the shape of their launches.

What the words mean and in which order the kernels run is the channel's business. Every address is
a plain integer that the device can use, 0 is null.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from pathlib import Path
from typing import Any, NamedTuple

from rowstream.device import driver

__all__ = ["Answer", "Kernels", "kernels"]

_PTX = Path(__file__).with_name("kernels.ptx")

_THREADS = 256
# One block: its width is what hides the latency of reading ids and of stores over PCIe.
_POST_THREADS = 1024
# The kernels count units in 32 bits and step past the end by at most one grid.
_MAX_UNITS = 1 << 31
# Two loads of 16 bytes per thread are 1 MiB on the way over all multiprocessors of a large GPU,
# several times what PCIe holds; more blocks would only take room from the work beside.
_TAKE_BLOCKS_PER_MULTIPROCESSOR = 1
# So many blocks of a take are one, which can judge by itself: a thread has two loads on their way.
_ALONE_BLOCKS = 2
# `rows` may read device memory, which holds more.
_ROWS_BLOCKS_PER_MULTIPROCESSOR = 4

# name: number of arguments
_ARGUMENTS = {
    "post": 12,
    "verdict": 4,
    "take_bytes": 13,
    "take_lut16": 13,
    "take_lut32": 13,
    "rows_bytes": 13,
    "rows_lut16": 13,
    "rows_lut32": 13,
}
_SUFFIX = {1: "bytes", 2: "lut16", 4: "lut32"}
_POINTER_BYTES = struct.calcsize("P")


class Answer(NamedTuple):
    """Where the answer to a ring is. With a time-out its header is waited for.

    `fault` is a u64 word and the u32 count behind it.
    """

    header: int
    fault: int
    timeout_ns: int


_JUDGED = Answer(0, 0, 0)


class _Packed:
    """Room for the arguments of one kernel: pointers to 8-byte slots, which the driver reads.

    A kernel's 32-bit parameters take the low half of theirs: every host of CUDA is little endian.
    """

    __slots__ = ("address", "buffer", "fill", "offset")

    def __init__(self, count: int) -> None:
        self.buffer = ctypes.create_string_buffer(count * (_POINTER_BYTES + 8))
        self.address = ctypes.addressof(self.buffer)
        self.offset = count * _POINTER_BYTES
        slots = (self.address + self.offset + 8 * place for place in range(count))
        struct.pack_into(f"{count}P", self.buffer, 0, *slots)
        self.fill = struct.Struct(f"{count}Q").pack_into


class _Arguments(threading.local):
    """A thread's own, so that no launch takes a lock or allocates; filled anew for each launch."""

    def __init__(self) -> None:
        self.of = {name: _Packed(count) for name, count in _ARGUMENTS.items()}


@functools.cache
def kernels(device: int) -> Kernels:
    """The kernels of a device, loaded once; before the first capture and the first wait."""
    return Kernels(device)


class Kernels:
    """Launches on one device, which must be torch's current one; any number of threads may.

    Loading takes the device's primary context, and every kernel runs once on nothing: the driver
    loads a kernel at its first launch otherwise, and that blocks while any stream waits. `aside` is
    a stream for what is behind others, and never captured.
    """

    def __init__(self, device: int) -> None:
        cuda = driver.bindings()
        driver.use_primary_context(device)
        self.device = device
        self.multiprocessors = driver.attributes(device).multiprocessors
        self._launch_kernel = cuda.cuLaunchKernel
        self._arguments = _Arguments()
        # Torch's streams are a few in turn, one of which may be capturing.
        non_blocking = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.aside = int(driver.check(cuda.cuStreamCreate(non_blocking), "cuStreamCreate"))
        image = _PTX.read_bytes() + b"\0"
        # never unloaded: captured graphs hold its functions
        self._module = driver.check(cuda.cuModuleLoadData(image), f"loading {_PTX.name}")
        self._functions = {
            name: driver.check(cuda.cuModuleGetFunction(self._module, name.encode()), name)
            for name in _ARGUMENTS
        }
        self._warm_up()

    def post(
        self,
        stream: int,
        ids: int,
        ids_bytes: int,
        tokens: int,
        heads: int,
        live: int,
        head_of: int,
        owned: int,
        mailbox: int,
        rows: int,
        door: int,
        state: int,
        gated: bool,
    ) -> None:
        """Post ids [tokens, heads] of 4 or 8 bytes to the mailbox [tokens, owned], and ring.

        `live` is an int32 with the tokens that count, `head_of` int32[owned] the head of each
        place. Ids below 0 and those of other tokens are posted as -1. With `gated` the mailbox is
        compared instead, and a difference makes the step void.
        """
        count = tokens * owned
        threads = min(_POST_THREADS, max(32, (count + 31) // 32 * 32))
        self._launch(
            "post",
            stream,
            1,
            threads,
            (
                ids,
                ids_bytes,
                tokens,
                heads,
                live,
                head_of,
                owned,
                mailbox,
                rows,
                door,
                state,
                int(gated),
            ),
        )

    def verdict(self, stream: int, state: int, answer: Answer) -> None:
        """Judge the answer for a `take` that does not."""
        self._launch("verdict", stream, 1, 1, (state, *answer))

    def take(
        self,
        stream: int,
        state: int,
        rows: int,
        out: int,
        tokens: int,
        heads: int,
        slot_of: int,
        owned: int,
        row_bytes: int,
        void_value: int,
        lut: int = 0,
        value_bytes: int = 1,
        answer: Answer | None = None,
    ) -> None:
        """Bring staged rows [tokens, owned, row_bytes] to out [tokens, heads], free the channel.

        They are void where `answer` is not good; without one, where the last verdict was not.
        `slot_of` int32[heads] is the place of each head's row, below 0: zeroes. Of a value of one
        byte the bytes go as they are; with 2 or 4, `lut` has the 256 outputs. `void_value` is one
        output of a void step.
        """
        blocks = self.blocks(tokens * heads * row_bytes, rows | row_bytes, out, value_bytes)
        if answer is not None and blocks <= _ALONE_BLOCKS:
            blocks = 1
        elif answer is not None:
            self.verdict(stream, state, answer)
            answer = None
        self._launch(
            f"take_{_SUFFIX[value_bytes]}",
            stream,
            min(blocks, self.multiprocessors * _TAKE_BLOCKS_PER_MULTIPROCESSOR),
            _THREADS,
            (
                state,
                rows,
                out,
                tokens,
                heads,
                slot_of,
                owned,
                row_bytes,
                lut,
                void_value,
                *(answer or _JUDGED),
            ),
        )

    def rows(
        self,
        stream: int,
        base: int,
        ids: int,
        ids_bytes: int,
        live: int,
        tokens: int,
        heads: int,
        slot_of: int,
        out: int,
        row_bytes: int,
        num_rows: int,
        void_value: int,
        fault: int,
        lut: int = 0,
        value_bytes: int = 1,
    ) -> None:
        """Bring rows of the table at `base` to out [tokens, heads], as `take` does.

        Ids below 0, tokens that are not live and heads whose `slot_of` is below 0 give zeroes. An
        id past the table gives `void_value`, and leaves id << 8 | 3 in the u64 at `fault`.
        """
        blocks = self.blocks(tokens * heads * row_bytes, base | row_bytes, out, value_bytes)
        self._launch(
            f"rows_{_SUFFIX[value_bytes]}",
            stream,
            min(blocks, self.multiprocessors * _ROWS_BLOCKS_PER_MULTIPROCESSOR),
            _THREADS,
            (
                base,
                ids,
                ids_bytes,
                live,
                tokens,
                heads,
                slot_of,
                out,
                row_bytes,
                num_rows,
                fault,
                lut,
                void_value,
            ),
        )

    def blocks(self, num_bytes: int, source: int, out: int, value_bytes: int) -> int:
        """Blocks that give each thread one unit, as wide as the kernel will choose it.

        Raises ValueError where a kernel cannot count the units.
        """
        unit = 1
        for width in (16, 4):
            if source % width == 0 and out % min(16, width * value_bytes) == 0:
                unit = width
                break
        units = num_bytes // unit
        if units >= _MAX_UNITS:
            raise ValueError(
                f"lookup needs fewer than {_MAX_UNITS} units of {unit} bytes, got {units}"
            )
        return max(1, (units + _THREADS - 1) // _THREADS)

    def _launch(
        self, name: str, stream: int, blocks: int, threads: int, values: tuple[int, ...]
    ) -> None:
        packed = self._arguments.of[name]
        packed.fill(packed.buffer, packed.offset, *values)
        function = self._functions[name]
        shape = (blocks, 1, 1, threads, 1, 1, 0)
        result = self._launch_kernel(function, *shape, stream, packed.address, 0)
        if int(result[0]) == 0:
            return
        # a thread that has called nothing of CUDA yet has no context
        if getattr(result[0], "name", "") == "CUDA_ERROR_INVALID_CONTEXT":
            driver.use_primary_context(self.device)
            result = self._launch_kernel(function, *shape, stream, packed.address, 0)
        driver.check(result, name)

    def _warm_up(self) -> None:
        cuda: Any = driver.bindings()
        scratch_bytes, stream = 4096, self.aside
        scratch = driver.check(cuda.cuMemAlloc(scratch_bytes), "cuMemAlloc")
        try:
            zeroes = int(scratch)
            driver.check(cuda.cuMemsetD8Async(scratch, 0, scratch_bytes, stream), "cuMemsetD8Async")
            self.post(stream, zeroes, 8, 0, 1, 0, 0, 1, *(zeroes,) * 4, False)
            self.verdict(stream, zeroes, Answer(zeroes, zeroes + 64, 1))
            for value_bytes in _SUFFIX:
                last = (zeroes, value_bytes)
                self.take(stream, zeroes, zeroes, zeroes, 0, 1, 0, 1, 16, 0, *last)
                self.rows(stream, zeroes, zeroes, 8, 0, 0, 1, 0, zeroes, 16, 0, 0, zeroes, *last)
            driver.check(cuda.cuStreamSynchronize(stream), "running the kernels")
        finally:
            cuda.cuMemFree(scratch)
