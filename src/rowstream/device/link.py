"""A table's link to one GPU: kernels, pinned memory, the threads that answer, and its channels.

Knows a native table and its geometry, no model. What a lookup puts into a stream is channel.py's,
which rows become which values lookup.py's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rowstream import _core
from rowstream.backends import NativeTable
from rowstream.device import driver
from rowstream.device.arena import PinnedArena, states
from rowstream.device.channel import Channel
from rowstream.device.kernels import kernels
from rowstream.errors import ReadError

__all__ = ["DeviceLink"]

_STATUS = {
    1: "its rows could not be read",
    2: "nobody answered in time",
    3: "an id outside the table",
    4: "the store is closed",
    5: "two streams use one channel at a time",
}
# A lookup in eager mode is cut into pieces of a channel; two channels, so that one piece is copied
# while the next one is read. 16,384 rows of 160 bytes are 2.8 MiB each.
_EAGER_ROWS = 16_384


class DeviceLink:
    """Channels between a native table and one GPU. Any thread may look up; one at a time does."""

    def __init__(
        self,
        table: NativeTable,
        *,
        device: torch.device,
        row_bytes: int,
        groups: Sequence[int],
        heads: int | None = None,
        owned: Sequence[int] | None = None,
        sync: str = "doorbell",
        channel_bytes: int = 32 << 20,
        read_timeout_s: float = 2.0,
        io_spin: str = "auto",
        io_cpu: int | None = None,
        name: str = "table",
    ) -> None:
        """Pin `channel_bytes` and start the threads.

        `groups` are the rows of each n-gram that the table is asked for; `heads` and `owned` say
        which of a token's rows these are, where others are another rank's. Raises UnavailableError
        where this GPU cannot.
        """
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.sync = sync
        self.row_bytes = row_bytes
        self.owned = sum(groups)
        self.heads = self.owned if heads is None else heads
        self.give_up_ns = int((read_timeout_s * 2 + 1) * 1e9)
        self._groups = list(groups)
        self._name = name
        self._table = table
        cpus = _cpus_near(index) if io_cpu is None else [io_cpu]
        with torch.cuda.device(self.device):
            # this thread may not have used it before, nor any other device
            driver.use_primary_context(index)
            self.kernels = kernels(index)
            self.head_of, self.slot_of = self._maps(owned)
            self.arena = PinnedArena(channel_bytes, cpus)
            states(self.device).refill()
            aside = torch.cuda.ExternalStream(self.kernels.aside, self.device)  # type: ignore[no-untyped-call]
        self._loop = _core.Loop(
            table,
            list(groups),
            read_timeout_s=read_timeout_s,
            spin=io_spin,
            ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            cpus=cpus,
        )
        self._eager_rows = min(_EAGER_ROWS, self._fitting_rows())
        self._idle: list[tuple[Channel, int]] = []  # with the stream of their last take
        self.abandoned: list[Channel] = []  # posted to, and never to be taken from
        # A hold on every eager channel, and the last that was enqueued for it. Until the device
        # gets there its block is not anybody else's, also when a start was never finished, and when
        # the process ends and Python lets go of all that it has.
        self._eager: list[tuple[int, torch.cuda.Event]] = []
        # for close, and for when nobody has the link any more
        self._retire = weakref.finalize(self, _retire, os.getpid(), self._eager, aside)
        self._retire.atexit = False
        self._closed = False
        self._lock = threading.RLock()
        self._faults = 0

    # --- channels ---------------------------------------------------------------------------------

    def add(self, max_rows: int, *, gated: bool) -> _core.Channel:
        """A channel of the core. Raises UnavailableError when the arena is full."""
        return self._loop.add(self.arena.core, max_rows, self.row_bytes, gated)

    def for_graph(self, stream: int, tokens: int) -> Channel:
        """A channel of its own for one lookup in the graph that `stream` captures."""
        channel = Channel(self, max(1, tokens * self.owned))
        channel.belong_to_graph(stream)
        return channel

    @property
    def eager_tokens(self) -> int:
        """Tokens that one channel of an eager lookup holds."""
        return max(1, self._eager_rows // self.owned)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else enqueues meanwhile, or another thread's post could come between."""
        with self._lock:
            yield

    def borrow(self, stream: int) -> Channel:
        """A channel that nothing uses, once the stream gets there; to be given back."""
        if self._closed:
            raise ValueError("table is closed")
        states(self.device).refill()
        for place, (channel, last) in enumerate(self._idle):
            if last == stream:
                del self._idle[place]
                return channel
        if self.abandoned:
            channel = self.abandoned.pop()
            torch.cuda.current_stream(self.device).wait_event(channel.enqueued)
            channel.pass_over(stream)
            # what the host fills by itself it fills after that
            channel.enqueued.record(torch.cuda.current_stream(self.device))
            return channel
        if len(self._idle) >= 2:
            channel, _ = self._idle.pop(0)
            torch.cuda.current_stream(self.device).wait_event(channel.enqueued)
            return channel
        channel = Channel(self, self.eager_tokens * self.owned)
        self._eager.append((channel.core.hold(), channel.enqueued))
        return channel

    def give_back(self, channel: Channel, stream: int) -> None:
        """After its take was put into the stream."""
        channel.enqueued.record(torch.cuda.current_stream(self.device))
        if self._closed:  # which let go of it behind its post
            driver.host_function(stream, _core.RELEASE_HOLD, channel.core.hold())
            return
        self._idle.append((channel, stream))

    def fill(self, channel: Channel, ids: np.ndarray[Any, Any]) -> None:
        """Read the rows of ids [tokens, owned] for the next step of a gated channel."""
        channel.enqueued.synchronize()  # its staging may still be taken
        rows = ids.size
        core = channel.core
        core.mailbox[:rows] = ids.reshape(-1)
        staging = core.staging[:rows].reshape(*ids.shape, self.row_bytes)
        self._table.gather(ids, self._groups, staging)
        core.fill(core.door + 1)

    # --- state ------------------------------------------------------------------------------------

    def kick(self) -> None:
        """A lookup is near: wake the thread that answers. Never needed, and cheap."""
        self._loop.kick()

    def check(self) -> None:
        """Raise what made a step void since the last check, once.

        ReadError, or IndexError for an id outside the table. What the model computed from that
        step is of no use.
        """
        faults = self._loop.faults
        if faults == self._faults:
            return
        void = faults - self._faults
        self._faults = faults
        self._loop.raise_failure()
        with self._lock:
            words = [channel.core.fault[0] for channel, _ in self._idle]
        status = max(words, default=0) & 255
        reason = _STATUS.get(status, "its rows did not come")
        raise ReadError(errno.EIO, f"{void} void steps: {reason}", self._name)

    def stats(self) -> dict[str, Any]:
        """Sizes and counts of the link."""
        counters = self._loop.counters()
        return {
            "sync": self.sync,
            "io_spins": self._loop.spins,
            "channels": self._loop.channels,
            "channel_bytes": self.arena.core.bytes,
            "channel_bytes_used": self.arena.core.used_bytes,
            "rings": counters["rings"],
            "void_steps": self._loop.faults,
            "late_answers": counters["late"],
            "answer_s": counters["answer_ns"] * 1e-9,
        }

    def close(self) -> None:
        """Every wait passes from now on, and every step is void."""
        self._closed = True
        self._loop.close()
        with self._lock:
            self._idle.clear()
            self.abandoned.clear()
            self._retire()

    def _fitting_rows(self) -> int:
        per_row = _core.Channel.bytes_for(1024, self.row_bytes) // 1024 + 1
        return max(self.owned, self.arena.core.bytes // 4 // per_row)

    def _maps(self, owned: Sequence[int] | None) -> tuple[int, int]:
        """Addresses of which head each place is, and of which place each head has."""
        if owned is None or list(owned) == list(range(self.heads)):
            return 0, 0
        slots = [-1] * self.heads
        for place, head in enumerate(owned):
            slots[head] = place
        maps = [
            torch.tensor(values, dtype=torch.int32, device=self.device)
            for values in (list(owned), slots)
        ]
        _KEPT.extend(maps)
        return maps[0].data_ptr(), maps[1].data_ptr()


def _retire(
    process: int, eager: list[tuple[int, torch.cuda.Event]], aside: torch.cuda.Stream
) -> None:
    """Let go of eager channels once the device has done with them; a forked child has none.

    A wait that is still queued passes as long as the channel is looked after, and only so long.
    """
    if os.getpid() != process or not eager:
        return
    try:
        with torch.cuda.device(aside.device):
            driver.use_primary_context(aside.device.index)
            while eager:
                held, enqueued = eager.pop()
                aside.wait_event(enqueued)
                driver.host_function(aside.cuda_stream, _core.RELEASE_HOLD, held)
    except RuntimeError:
        return  # of a device that failed: what may still be queued there keeps its memory


# what captured graphs may still read after their link is gone
_KEPT: list[torch.Tensor] = []


def _cpus_near(device: int) -> list[int]:
    """The processors of the GPU's NUMA node that are ours; none: the machine does not say."""
    node = driver.attributes(device).numa_node
    if node is None:
        return []
    try:
        listed = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text()
    except OSError:
        return []
    near: set[int] = set()
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        near.update(range(int(first), int(last or first) + 1))
    return sorted(near & os.sched_getaffinity(0))
