"""The lookup of a model: row ids on any device in, rows or values on the same device out.

One torch operator that fills its output: it can be captured into a graph, and Inductor sees nothing
of what it does. Chooses between channels to a store, a table that the GPU addresses, and the host's
own gather.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rowstream.device import driver
from rowstream.device.addressed import ADDRESSED, AddressedTable
from rowstream.device.dequantize import ROUNDINGS
from rowstream.device.hosted import HostedRows
from rowstream.device.link import DeviceLink
from rowstream.device.outputs import Outputs
from rowstream.device.streamed import Gate, Sent, StreamedRows
from rowstream.device.sync import choose
from rowstream.prefetch import Ticket
from rowstream.store import RowStore, Run

__all__ = ["Lookup", "LookupOptions", "Started"]

PLACES = ("auto", "streamed", *ADDRESSED)

Path = StreamedRows | AddressedTable | HostedRows

_handles = itertools.count(1)
_lookups: weakref.WeakValueDictionary[int, Lookup] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class LookupOptions:
    """How rows get to a GPU. Raises ValueError for what cannot be."""

    place: str = "auto"  # one of PLACES; auto: a pinned store is addressed, all others streamed
    sync: str = "auto"  # how a stream waits, one of sync.SYNCS
    rounding: str = "out"  # one of dequantize.ROUNDINGS
    channel_bytes: int = 32 << 20  # pinned once; a row of a captured lookup takes row_bytes + 8
    read_timeout_s: float = 2.0  # after which a step is void
    io_spin: str = "auto"  # "auto", "always" or "never"
    io_cpu: int | None = None  # where the answering thread runs; None: near the GPU

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise ValueError(f"place needs one of {', '.join(PLACES)}, got {self.place!r}")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding needs one of {', '.join(ROUNDINGS)}, got {self.rounding!r}")


@dataclass(slots=True)
class Started:
    """A lookup whose ids are on their way, for one `finish`."""

    streamed: tuple[StreamedRows, Sent] | None  # none: all of it happens in `finish`
    ids: torch.Tensor
    live: torch.Tensor | None


class Lookup:
    """Rows of one store on whatever device their ids are. Any thread may call."""

    def __init__(self, store: RowStore, options: LookupOptions | None = None) -> None:
        self.store = store
        self.options = options or LookupOptions()
        self.handle = next(_handles)
        self.sync_reason = ""
        self.outputs = Outputs(store.manifest, self.options.rounding)
        self._lock = threading.Lock()
        self._paths: dict[int, Path] = {}
        _lookups[self.handle] = self

    # --- the lookup -------------------------------------------------------------------------------

    def __call__(
        self, ids: torch.Tensor, out: torch.Tensor, live: torch.Tensor | None = None
    ) -> None:
        """Fill out [..., heads, row_values] with the values of rows ids [..., heads].

        An `out` of uint8 [..., heads, row_bytes] takes the bytes as they are. `live`, int32 on the
        device, says how many tokens count; the rest, like ids of -1, are zeroes. On a GPU a step
        whose rows did not come is NaN throughout, and the next `check` raises.
        """
        if torch.compiler.is_compiling():
            torch.ops.rowstream.lookup(self.handle, ids, live, out)
        else:
            self._run(ids, live, out)

    def start(self, ids: torch.Tensor, live: torch.Tensor | None = None) -> Started:
        """Send ids [..., heads] on a GPU on their way; the current stream goes on."""
        self._check_ids(ids, live)
        if not self.store.owned.heads:
            return Started(None, ids, live)
        with torch.cuda.device(ids.device):
            path = self.path(ids.device)
            if not isinstance(path, StreamedRows):
                return Started(None, ids, live)
            return Started((path, path.start(self._masked(ids), live)), ids, live)

    def finish(self, started: Started, out: torch.Tensor) -> None:
        """Let the current stream wait for the rows of `started`, and fill `out` with them."""
        self._check_out(started.ids, out)
        if started.streamed is None:
            self._run(started.ids, started.live, out)
        else:
            path, sent = started.streamed
            with torch.cuda.device(out.device):
                path.finish(sent, out)

    def _run(self, ids: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
        self._check_ids(ids, live)
        self._check_out(ids, out)
        if not ids.is_cuda:
            self._gather(ids, live, out)
            return
        if not self.store.owned.heads:  # a rank beyond the number of heads
            out.zero_()
            return
        # the kernels, and what is asked of the stream, are the current device's
        with torch.cuda.device(ids.device):
            path = self.path(ids.device)
            if isinstance(path, AddressedTable):
                self._address(path, ids, live, out)
            else:
                path.run(self._masked(ids), live, out)

    def _address(
        self,
        table: AddressedTable,
        ids: torch.Tensor,
        live: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        target = self.outputs.target(out)
        stream = torch.cuda.current_stream(ids.device).cuda_stream
        tokens = ids.numel() // self.store.heads
        table.rows(stream, ids, tokens, live, target, self.outputs.of(target))
        self.outputs.convert(target, out)

    def _gather(self, ids: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
        wanted = ids.detach().to(torch.int64).contiguous()
        if live is not None:
            wanted = wanted.clone()
            wanted.reshape(-1, self.store.heads)[max(int(live), 0) :] = -1
        rows = torch.empty((*wanted.shape, self.store.row_bytes), dtype=torch.uint8, device="cpu")
        self.store.gather(wanted.numpy(), out=rows.numpy())
        self.outputs.fill_on_host(rows, out)

    # --- the host path ----------------------------------------------------------------------------

    def stage(self, runs: Sequence[Run]) -> Ticket:
        """Start to read the rows of runs, before the step that looks them up is launched."""
        if self.options.place in ADDRESSED:
            return Ticket(None, 0)  # the GPU has them, nobody would take what is read
        ticket = self.store.prefetch(runs)
        self.kick()
        return ticket

    def flush(self, runs: Sequence[Run], gate: Gate | None = None) -> None:
        """Fill a gate with the rows of runs, tokens in their order. Without one: nothing to do."""
        if gate is not None:
            gate.fill(np.concatenate([self.store.row_ids(*run) for run in runs]))

    @contextlib.contextmanager
    def staged(self, runs: Sequence[Run], gate: Gate | None = None) -> Iterator[None]:
        """Around one forward whose tokens the host knows: stage, flush, and check afterwards."""
        with self.stage(runs):
            self.flush(runs, gate)
            yield
        self.check()

    @property
    def gates(self) -> list[Gate]:
        """What the host has to fill before launches, in the order of capture; of sync "gate"."""
        paths = [path for path in list(self._paths.values()) if isinstance(path, StreamedRows)]
        return [gate for path in paths for gate in list(path.gates) if gate.in_a_graph]

    # --- state ------------------------------------------------------------------------------------

    def path(self, device: torch.device) -> Path:
        """The way to a GPU, made at its first use, which cannot be in a capture.

        Raises UnavailableError, RuntimeError.
        """
        index = torch.cuda.current_device() if device.index is None else device.index
        path = self._paths.get(index)
        if path is not None:
            return path
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"lookup needs warm_up() on cuda:{index} before its first capture")
        with self._lock:
            if index not in self._paths:
                self._paths[index] = self._connect(torch.device("cuda", index))
            return self._paths[index]

    def warm_up(self, device: torch.device, dtypes: Sequence[torch.dtype] = ()) -> None:
        """Load every kernel and reserve all memory, before a capture or the first wait."""
        heads = self.store.heads
        ids = torch.full((1, heads), -1, dtype=torch.int64, device=device)
        for dtype in (torch.uint8, *dtypes):
            last = self.store.row_bytes if dtype == torch.uint8 else self.store.row_values
            self(ids, torch.empty((1, heads, last), dtype=dtype, device=device))
        torch.cuda.synchronize(device)
        self.check()

    def kick(self) -> None:
        """A lookup is near: wake the threads that answer. Never needed."""
        for path in list(self._paths.values()):
            if isinstance(path, StreamedRows):
                path.kick()

    def check(self) -> None:
        """Raise what made a step void since the last check, once.

        ReadError, or IndexError for an id outside the table. What a model computed from that step
        is of no use.
        """
        failures: list[Exception] = []
        for path in list(self._paths.values()):
            try:
                path.check()
            except (OSError, IndexError) as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def stats(self) -> dict[str, Any]:
        """Sizes and counts by device. Raises what `check` would."""
        self.check()
        return self.counters()

    def counters(self) -> dict[str, dict[str, Any]]:
        """Sizes and counts by device, from any thread; what `check` would raise stays to raise."""
        paths = list(self._paths.items())
        found = {f"cuda:{index}": path.stats() for index, path in paths}
        for stats in found.values():
            if "sync" in stats:
                stats["sync_reason"] = self.sync_reason
        return found

    def close(self) -> None:
        """Every wait passes from now on and every step is void; the store stays open."""
        with contextlib.ExitStack() as each:  # also where one of them cannot
            for path in list(self._paths.values()):
                each.callback(path.close)

    def _connect(self, device: torch.device) -> Path:
        store, options = self.store, self.options
        place = options.place
        if place == "auto":
            place = "pinned" if store.backend == "pinned" else "streamed"
        if place != "streamed":
            return AddressedTable(store, device, place)
        usable, reason = driver.available(device.index)
        if not usable and options.place == options.sync == "auto":
            self.sync_reason = reason
            return HostedRows(self._gather, reason, store.manifest.name)
        sync, self.sync_reason = choose(options.sync, device.index)
        link = DeviceLink(
            store.native,
            device=device,
            row_bytes=store.row_bytes,
            groups=store.owned.lookup_groups,
            heads=store.heads,
            owned=store.owned.heads,
            sync=sync,
            channel_bytes=options.channel_bytes,
            read_timeout_s=options.read_timeout_s,
            io_spin=options.io_spin,
            io_cpu=options.io_cpu,
            name=store.manifest.name,
        )
        shared = store.shard.world > 1
        return StreamedRows(link, self.outputs, store.owned.select if shared else np.asarray)

    def _masked(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids of which the rank owns some rows only: those of others as -1."""
        if self.store.shard.by != "rows" or self.store.shard.world == 1:
            return ids
        rows = self.store.owned.rows
        ours = (ids >= rows.start) & (ids < rows.stop) | (ids >= self.store.num_rows)
        return torch.where(ours, ids, -1)

    def _check_ids(self, ids: torch.Tensor, live: torch.Tensor | None) -> None:
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"ids need int64 or int32, got {ids.dtype}")
        if ids.is_cuda and (ids.ndim == 0 or ids.shape[-1] != self.store.heads):
            raise ValueError(
                f"ids on a GPU need a last axis of {self.store.heads} heads, "
                f"got shape {tuple(ids.shape)}"
            )
        one = live is None or (live.dtype == torch.int32 and live.numel() == 1)
        if live is not None and not (one and live.device == ids.device):
            raise ValueError(
                f"live needs one int32 on {ids.device}, "
                f"got {live.dtype} of shape {tuple(live.shape)} on {live.device}"
            )

    def _check_out(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        last = self.store.row_bytes if out.dtype == torch.uint8 else self.store.row_values
        if out.shape != (*ids.shape, last) or out.device != ids.device:
            raise ValueError(
                f"out needs shape {(*ids.shape, last)} on {ids.device}, "
                f"got {tuple(out.shape)} on {out.device}"
            )
        if not out.is_contiguous():
            raise ValueError("out needs to be contiguous")
        self.outputs.check(out.dtype)


@torch.library.custom_op("rowstream::lookup", mutates_args=("out",))
def _lookup(handle: int, ids: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
    _lookups[handle]._run(ids, live, out)


@_lookup.register_fake
def _(handle: int, ids: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
    return None
