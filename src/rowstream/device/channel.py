"""One lookup's channel to the host: what is put into a stream for its post, its wait and its take.

The words and who answers them are the core's; see csrc/words.h and docs/design.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rowstream import _core
from rowstream.device import driver
from rowstream.device.arena import states
from rowstream.device.kernels import Answer

if TYPE_CHECKING:
    from rowstream.device.link import DeviceLink

__all__ = ["Channel", "Output"]

# offsets of csrc/words.h
_DOOR, _FLAG, _HEADER, _FAULT, _ROWS, _MAILBOX = 0, 128, 256, 384, 512, 640


@dataclass(frozen=True, slots=True)
class Output:
    """What `take` makes of a row's bytes."""

    void_value: int  # the bits of one output of a void step
    value_bytes: int = 1  # of one output; 1: bytes as they are
    lut: torch.Tensor | None = None  # else the outputs of all 256 codes

    @property
    def lut_address(self) -> int:
        """The table's address, or 0."""
        return 0 if self.lut is None else self.lut.data_ptr()


class Channel:
    """The device's side of a channel of `max_rows` rows of one link.

    In a stream each `post` is followed by exactly one `wait` and one `take`; another post before
    that makes both steps void.
    """

    def __init__(self, link: DeviceLink, max_rows: int) -> None:
        self._link = link
        self.gated = link.sync == "gate"
        self.core: _core.Channel = link.add(max_rows, gated=self.gated)
        self.state = states(link.device).take()
        on_device = link.arena.on_device
        words = on_device(self.core.address)
        self._mailbox, self._rows = words + _MAILBOX, words + _ROWS
        self._door, self._flag = words + _DOOR, words + _FLAG
        # Even after a wait that has passed, the header is waited for: a flag that came from nowhere
        # then costs its time and not the step. Of a gated channel there is no answer to come.
        timeout_ns = 0 if self.gated else link.give_up_ns
        self.answer = Answer(words + _HEADER, words + _FAULT, timeout_ns)
        self._staging = on_device(self.core.staging_address)
        # after the last post or take outside of a capture
        self.enqueued = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def post(self, stream: int, ids: torch.Tensor, tokens: int, live: torch.Tensor | None) -> None:
        """Put the ids [tokens, heads] into the mailbox and ring."""
        link = self._link
        link.kernels.post(
            stream,
            ids.data_ptr(),
            ids.element_size(),
            tokens,
            link.heads,
            0 if live is None else live.data_ptr(),
            link.head_of,
            link.owned,
            self._mailbox,
            self._rows,
            self._door,
            self.state.data_ptr(),
            self.gated,
        )

    def wait(self, stream: int) -> None:
        """Let the stream wait for the answer."""
        link = self._link
        if link.sync == "doorbell":
            driver.wait_and_reset(stream, self._flag)
        elif link.sync == "hostnode":
            driver.host_function(stream, _core.WAIT_FOR_ANSWER, self.core.argument)
        elif link.sync == "kernel":
            # of one thread: a take that waits would keep its block from kernels beside
            link.kernels.verdict(stream, self.state.data_ptr(), self.answer)

    def check_output(self, out: torch.Tensor, tokens: int, output: Output) -> None:
        """Raise what a `take` would: before the wait. ValueError for too large an output."""
        link = self._link
        num_bytes = tokens * link.heads * link.row_bytes
        link.kernels.blocks(num_bytes, link.row_bytes, out.data_ptr(), output.value_bytes)

    def take(self, stream: int, out: torch.Tensor, tokens: int, output: Output) -> None:
        """Bring the rows to out [tokens, heads, ...].

        By a kernel, however many: a copy first costs more than it saves, and waits for the engine's
        own transfers.
        """
        self._take(stream, out.data_ptr(), tokens, output)

    def pass_over(self, stream: int) -> None:
        """Wait for what was posted, and take nothing: a post before its answer would be misuse."""
        self.wait(stream)
        nowhere = self._staging
        self._take(stream, nowhere, 0, Output(0))

    def _take(self, stream: int, out: int, tokens: int, output: Output) -> None:
        link = self._link
        link.kernels.take(
            stream,
            self.state.data_ptr(),
            self._staging,
            out,
            tokens,
            link.heads,
            link.slot_of,
            link.owned,
            link.row_bytes,
            output.void_value,
            output.lut_address,
            output.value_bytes,
            None if link.sync == "kernel" else self.answer,
        )

    def reset(self) -> None:
        """Start again after a misuse or a launch that failed. Waits for the device."""
        torch.cuda.synchronize(self._link.device)
        epoch = int(self.state[0])
        self.state[1:] = 0
        torch.cuda.synchronize(self._link.device)
        self.core.reset(epoch)

    def abandoned(self) -> None:
        """Nobody will take what was posted; from any thread, also while garbage is collected."""
        self._link.abandoned.append(self)

    def belong_to_graph(self, stream: int) -> None:
        """Keep the channel until the graph that the stream captures is gone."""
        held, kept = self.core.hold(), False
        try:
            kept = driver.retain_in_graph(stream, _core.RELEASE_HOLD, held)
        finally:
            if not kept:
                self.core.unhold()
        if not kept:
            raise RuntimeError("captured lookup: the capture was invalidated before it")
