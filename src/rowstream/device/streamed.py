"""Lookups through channels: what is put into a stream when it is captured and when it is not.

The channels and their threads are link.py's, what a row's bytes become outputs.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rowstream.device.channel import Channel
from rowstream.device.link import DeviceLink
from rowstream.device.outputs import Outputs

__all__ = ["Gate", "Sent", "StreamedRows"]

Columns = Callable[[NDArray[np.int64]], NDArray[np.int64]]


@dataclass(slots=True)
class Sent:
    """Ids on their way through a channel, for one `finish`."""

    channel: Channel
    tokens: int
    stream: int
    captured: bool
    posted: torch.cuda.Event
    done: bool = False

    def __del__(self) -> None:
        if not self.done and not self.captured:
            self.channel.abandoned()


class Gate:
    """A lookup in a captured graph that the host has to fill before each launch."""

    def __init__(self, link: DeviceLink, channel: Channel, tokens: int, owned: Columns) -> None:
        self._link = link
        self._channel = channel
        self._tokens = tokens
        self._owned = owned

    @property
    def in_a_graph(self) -> bool:
        """Whether the graph that was captured with it is still there."""
        return self._channel.core.holds > 1  # ours is one

    def fill(self, row_ids: NDArray[np.int64]) -> None:
        """Read rows int64 [tokens, heads] for the next launch, which must ask for the same ids.

        Tokens past the last one given are padding, -1. Other ids make the step void. The earlier
        launch must have ended.
        """
        ids = np.full((self._tokens, self._link.heads), -1, np.int64)
        ids[: len(row_ids)] = row_ids
        self._link.fill(self._channel, self._owned(ids))


class StreamedRows:
    """Rows of one link's table. Any thread may look up.

    `owned` picks the columns of ids [tokens, heads] that the link's table is asked for.
    """

    def __init__(self, link: DeviceLink, outputs: Outputs, owned: Columns) -> None:
        self.link = link
        self.gates: list[Gate] = []
        self._outputs = outputs
        self._owned = owned

    def run(self, ids: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
        """Put a whole lookup into the current stream."""
        link = self.link
        link.check()
        tokens, room = ids.numel() // link.heads, link.eager_tokens
        if torch.cuda.is_current_stream_capturing() or tokens <= room:
            self.finish(self._start(ids, live), out)
            return
        # one piece is copied while the next one is read
        ids = ids.reshape(tokens, link.heads)
        rows = out.view(tokens, link.heads, out.shape[-1])
        before: tuple[Sent, torch.Tensor] | None = None
        for at in range(0, tokens, room):
            part = slice(at, min(at + room, tokens))
            here = None if live is None else (live - at).to(torch.int32)
            sent = self._start(ids[part], here)
            if before is not None:
                self.finish(*before)
            before = sent, rows[part]
        if before is not None:
            self.finish(*before)

    def start(self, ids: torch.Tensor, live: torch.Tensor | None) -> Sent:
        """Send ids [..., heads] on their way; the stream goes on."""
        self.link.check()
        return self._start(ids, live)

    def _start(self, ids: torch.Tensor, live: torch.Tensor | None) -> Sent:
        link = self.link
        tokens = ids.numel() // link.heads
        stream = torch.cuda.current_stream(ids.device)
        captured = torch.cuda.is_current_stream_capturing()
        if not captured and tokens > link.eager_tokens:
            raise ValueError(f"start takes at most {link.eager_tokens} tokens, got {tokens}")
        ids = ids.contiguous()
        with link.locked():
            if captured:
                # those of graphs that are gone would keep their channels
                self.gates[:] = [gate for gate in self.gates if gate.in_a_graph]
                channel = link.for_graph(stream.cuda_stream, tokens)
                if channel.gated:
                    self.gates.append(Gate(link, channel, tokens, self._owned))
            else:
                channel = link.borrow(stream.cuda_stream)
                if channel.gated:
                    try:
                        link.fill(channel, self._owned(_on_host(ids, link.heads, live)))
                    except BaseException:
                        link.give_back(channel, stream.cuda_stream)
                        raise
            channel.post(stream.cuda_stream, ids, tokens, live)
            # an event of a capture is of that graph alone
            posted = torch.cuda.Event() if captured else channel.enqueued  # type: ignore[no-untyped-call]
            posted.record(stream)
        return Sent(channel, tokens, stream.cuda_stream, captured, posted)

    def finish(self, sent: Sent, out: torch.Tensor) -> None:
        """Let the current stream wait for the rows, and fill `out` with them."""
        if sent.done:
            raise RuntimeError("a started lookup has one finish, this is another")
        # a wait without its post, or behind one that is launched later, would not end
        if torch.cuda.is_current_stream_capturing() != sent.captured:
            raise RuntimeError(
                "a started lookup needs its finish in the same capture, or both outside of one"
            )
        link = self.link
        stream = torch.cuda.current_stream(out.device)
        # whatever can fail does so before the wait, after which there must be a take
        target = self._outputs.target(out)
        output = self._outputs.of(target)
        sent.channel.check_output(target, sent.tokens, output)
        sent.done = True
        with link.locked():
            if stream.cuda_stream != sent.stream:
                stream.wait_event(sent.posted)
            sent.channel.wait(stream.cuda_stream)
            sent.channel.take(stream.cuda_stream, target, sent.tokens, output)
            if not sent.captured:
                link.give_back(sent.channel, stream.cuda_stream)
        self._outputs.convert(target, out)

    def check(self) -> None:
        """Raise what made a step void since the last check; see `DeviceLink.check`."""
        self.link.check()

    def kick(self) -> None:
        """A lookup is near."""
        self.link.kick()

    def stats(self) -> dict[str, Any]:
        """Sizes and counts of the link."""
        return self.link.stats()

    def close(self) -> None:
        """Every wait passes from now on, and every step is void."""
        self.link.close()


def _on_host(ids: torch.Tensor, heads: int, live: torch.Tensor | None) -> NDArray[np.int64]:
    """The ids as the kernels will see them; waits for the stream."""
    host = ids.reshape(-1, heads).to("cpu", torch.int64).clamp(min=-1)
    if live is not None:
        host[max(int(live), 0) :] = -1
    return host.numpy()
