"""The words of a channel and the launches between them, for tests without a channel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rowstream.device.kernels import Answer, Kernels, kernels

DOOR, FLAG, HEADER, FAULT, COUNT, ROWS, MAILBOX = 0, 128, 256, 384, 392, 512, 640
EPOCH, BUSY, GOOD, MISMATCH, DONE = 0, 8, 16, 24, 32
STATUS_OK, READ, TIMEOUT, IDS, CLOSED, MISUSE = range(6)
MISUSED_DOOR = 2**64 - 1
NUM_ROWS = 320_001_536
POISON = 0xA5


class Words:
    """Pinned words, mailbox and staging; state on the device; a stream of its own."""

    def __init__(self, max_rows: int, row_bytes: int) -> None:
        self.staging_at = (MAILBOX + 8 * max_rows + 255) // 256 * 256
        total = self.staging_at + max_rows * row_bytes
        self.host = torch.zeros(total, dtype=torch.uint8).pin_memory()
        self.bytes = self.host.numpy()
        self.state = torch.zeros(8, dtype=torch.int64, device="cuda")
        self.stream = new_stream()
        self.handle: int = self.stream.cuda_stream
        self.kernels: Kernels = kernels(torch.cuda.current_device())
        self.kept: list[torch.Tensor | None] = []
        torch.cuda.synchronize()

    def keep(self, *tensors: torch.Tensor | None) -> None:
        """Wait for what torch's own stream does to them, and keep torch from reusing them."""
        self.kept += tensors
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()

    def at(self, offset: int) -> int:
        # torch pins with cudaHostAlloc: with unified addressing the GPU's address is the host's
        return self.host.data_ptr() + offset

    def word(self, offset: int, kind: str = "<u8") -> int:
        width = int(kind[2:])
        return int(self.bytes[offset : offset + width].view(kind)[0])

    def set_word(self, offset: int, value: int, kind: str = "<u8") -> None:
        width = int(kind[2:])
        self.bytes[offset : offset + width].view(kind)[0] = value

    def mailbox(self, count: int) -> Any:
        return self.bytes[MAILBOX : MAILBOX + 8 * count].view("<i8")

    def staging(self, rows: int, row_bytes: int) -> Any:
        flat = self.bytes[self.staging_at : self.staging_at + rows * row_bytes]
        return flat.reshape(rows, row_bytes)

    def state_word(self, offset: int) -> int:
        self.synchronize()
        return int(self.state.cpu().view(torch.int32)[offset // 4])

    def post(
        self,
        ids: torch.Tensor,
        *,
        live: torch.Tensor | None = None,
        head_of: torch.Tensor | None = None,
        gated: bool = False,
    ) -> None:
        self.keep(ids, live, head_of)
        tokens, heads = ids.shape
        owned = heads if head_of is None else head_of.numel()
        self.kernels.post(
            self.handle,
            ids.data_ptr(),
            ids.element_size(),
            tokens,
            heads,
            address(live),
            address(head_of),
            owned,
            self.at(MAILBOX),
            self.at(ROWS),
            self.at(DOOR),
            self.state.data_ptr(),
            gated,
        )

    def answer(self, timeout_ns: int = 0) -> Answer:
        return Answer(self.at(HEADER), self.at(FAULT), timeout_ns)

    def verdict(self, timeout_ns: int = 0) -> None:
        self.kernels.verdict(self.handle, self.state.data_ptr(), self.answer(timeout_ns))

    def take(
        self,
        out: torch.Tensor,
        row_bytes: int,
        void_value: int,
        *,
        slot_of: torch.Tensor | None = None,
        owned: int | None = None,
        lut: torch.Tensor | None = None,
        answer: Answer | None = None,
    ) -> None:
        self.keep(out, slot_of, lut)
        tokens, heads = out.shape[:2]
        self.kernels.take(
            self.handle,
            self.state.data_ptr(),
            self.at(self.staging_at),
            out.data_ptr(),
            tokens,
            heads,
            address(slot_of),
            heads if owned is None else owned,
            row_bytes,
            void_value,
            address(lut),
            1 if lut is None else lut.element_size(),
            answer,
        )

    def synchronize(self) -> None:
        self.stream.synchronize()


def new_stream() -> Any:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else int(tensor.data_ptr())


def on_device(array: NDArray[Any]) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array)).cuda()
    torch.cuda.synchronize()
    return tensor


def random_ids(tokens: int, heads: int, dtype: Any = np.int64, seed: int = 0) -> NDArray[Any]:
    return np.random.default_rng(seed).integers(0, NUM_ROWS, (tokens, heads)).astype(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype, device="cuda")
    out.view(torch.uint8).fill_(POISON)
    torch.cuda.synchronize()
    return out
