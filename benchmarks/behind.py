"""Measures what is left of a read from the disk behind work of a GPU: python benchmarks/behind.py.

Steps whose rows nobody has read, less the same steps with the table in pinned memory, behind 100 us
and 2 ms of matrix products and behind layer 0 of the real shapes; further a step whose ids the host
knows, beside FreeToken's row store. The pinned table and the peer may be left out.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device import Device
from benchmarks.freetoken import Peer, PeerMissing, load_peer
from benchmarks.gpu import (
    CUDA,
    Arm,
    Steps,
    added,
    captured,
    memory,
    percentile,
    replay_in_turn,
    work_of,
)
from benchmarks.layer import LayerZero
from benchmarks.measure import Measure, at_most, finish, judged, one_of_each, options, turn_of
from benchmarks.places import cached_row_pages, table_at
from benchmarks.spans import unique_rows

from rowstream import RowStore
from rowstream.device.lookup import Lookup, LookupOptions

_LANES = (1, 4, 16, 64)
_SHARES = (50, 95, 99)


class Against:
    """A lookup of rows on the disk, and what its steps are measured against."""

    def __init__(self, lookup: Lookup, pinned: Lookup | None, layer: LayerZero, turns: int) -> None:
        self.lookup = lookup
        self.pinned = pinned
        self.layer = layer
        self.turns = turns
        self.name = "pinned" if pinned is not None else "no lookup"

    def beside(
        self, work: Callable[[], None], tokens: int, *, halves: bool = False
    ) -> dict[str, Arm]:
        """Return the arms, replayed in turn; `halves`: start before the work, finish after it."""
        peer = Steps(self.pinned or self.lookup, work, fresh=True)
        looked_up = self.pinned is not None
        arms = {
            "with": Steps(self.lookup, work, fresh=True, halves=halves).arm(tokens),
            "without": peer.arm(tokens, lookup=looked_up),
            "without again": peer.arm(tokens, lookup=looked_up),
        }
        replay_in_turn(arms, self.turns)
        return arms

    def long(self) -> list[Measure]:
        """One lane beside work that is longer than its read; without a lookup at all."""
        arms = Steps(self.lookup, work_of(2000, CUDA), fresh=True).arms(1)
        replay_in_turn(arms, self.turns)
        return added("16 rows read beside 2 ms", 16, arms, 5.0)

    def short(self) -> list[Measure]:
        """Lanes beside 100 us, what an engine with its own kernels needs for the layer."""
        work = work_of(100, CUDA)
        found: list[Measure] = []
        for tokens in _LANES:
            arms = self.beside(work, tokens)
            name = f"{tokens} lanes read beside 100 us, less {self.name}"
            found += added(name, tokens * 16, arms, None)
        return found

    def behind(self) -> list[Measure]:
        """Lanes behind layer 0 as transformers computes it, as a branch and in two halves."""
        found: list[Measure] = []
        for tokens in _LANES:
            work = self.layer.step(tokens)
            for halves, how in ((False, "a branch"), (True, "start and finish")):
                arms = self.beside(work, tokens, halves=halves)
                name = f"{tokens} lanes behind layer 0, {how}, less {self.name}"
                found += added(name, tokens * 16, arms, None)
        return found


class HostSteps:
    """Steps of which the host knows the ids: from there to values on the GPU behind layer 0."""

    def __init__(self, lookup: Lookup, peer: Peer, work: Callable[[], None], tokens: int) -> None:
        store = lookup.store
        self.peer = peer
        self.shape = (tokens, store.heads)
        self.num_rows = store.num_rows
        self.random = np.random.default_rng()
        self.host_ids = torch.empty(self.shape, dtype=torch.int64).pin_memory()
        self.ids = torch.empty(self.shape, dtype=torch.int64, device=CUDA)
        values = (*self.shape, store.row_values)
        self.out = torch.empty(values, dtype=torch.bfloat16, device=CUDA)
        self.peer_out = torch.empty_like(self.out)
        rows = (*self.shape, store.row_bytes)
        self.host_rows = torch.empty(rows, dtype=torch.uint8).pin_memory()
        self.rows = torch.empty(rows, dtype=torch.uint8, device=CUDA)
        self.scale = torch.tensor(store.manifest.scale, dtype=torch.bfloat16, device=CUDA)

        def streamed() -> None:
            started = lookup.start(self.ids)
            work()
            lookup.finish(started, self.out)

        def decoded() -> None:
            codes = self.rows.view(torch.float8_e4m3fn)
            self.peer_out.copy_(codes.to(torch.bfloat16) * self.scale)

        self.whole = captured(streamed)
        self.before, self.after = captured(work), captured(decoded)

    def ours(self) -> None:
        self.ids.copy_(self.host_ids, non_blocking=True)
        self.whole.graph.replay()
        torch.cuda.synchronize()

    def theirs(self) -> None:
        # read on the host while the layer runs, then copied
        self.peer.stage(self.host_ids.numpy().reshape(-1), self.host_rows.numpy())
        self.before.graph.replay()
        self.peer.flush()
        self.rows.copy_(self.host_rows, non_blocking=True)
        self.after.graph.replay()
        torch.cuda.synchronize()

    def run(self, turns: int) -> dict[str, list[float]]:
        """Take turns; returns microseconds of each arm."""
        arms = {"ours": self.ours, "peer": self.theirs, "peer again": self.theirs}
        times: dict[str, list[float]] = {arm: [] for arm in arms}
        count = int(np.prod(self.shape))
        for turn in range(turns + 5):
            for arm in turn_of(list(arms), turn):
                ids = unique_rows(self.random, self.num_rows, count).reshape(self.shape)
                self.host_ids.copy_(torch.from_numpy(ids))
                began = time.perf_counter_ns()
                arms[arm]()
                if turn >= 5:
                    times[arm].append((time.perf_counter_ns() - began) / 1e3)
        # both once more, on the same ids
        for step in (self.ours, self.theirs):
            step()
        if not torch.equal(self.out, self.peer_out):
            raise RuntimeError("both gave different values: no report")
        return times


def beside_freetoken(lookup: Lookup, place: Path, layer: LayerZero, turns: int) -> list[Measure]:
    """Measure steps of which the host knows the ids. Raises PeerMissing."""
    peer = Peer(lookup.store.manifest, load_peer(place))
    found = []
    for tokens in _LANES:
        times = HostSteps(lookup, peer, layer.step(tokens), tokens).run(turns)
        for share in _SHARES:
            each = [percentile(times[arm], share) for arm in times]
            name = f"{tokens} lanes, ids on the host, layer 0: step, p{share}, / FreeToken"
            found.append(one_of_each(name, tokens * 16, 0, each, "us"))
    return found


@contextlib.contextmanager
def pinned_table(folder: Path, wanted: bool) -> Iterator[Lookup | None]:
    """Open the table in pinned memory, or none."""
    if not wanted:
        yield None
        return
    with RowStore.open(folder, backend="pinned") as store:
        lookup = Lookup(store, LookupOptions(place="pinned"))
        lookup.warm_up(CUDA, [torch.bfloat16])
        yield lookup
        lookup.close()


def main() -> None:
    parser = options(__doc__, gib=4.0)
    parser.add_argument("--turns", type=int, default=1000, help="replays of each (default 1000)")
    parser.add_argument("--no-pinned", action="store_true", help="the peer is no lookup at all")
    parser.add_argument("--freetoken", type=Path, help="folder of its package or wheel")
    arguments = parser.parse_args()
    folder = table_at(arguments.dir, arguments.gib)
    began = time.perf_counter()
    with (
        RowStore.open(folder, backend="disk") as store,
        pinned_table(folder, not arguments.no_pinned) as pinned,
    ):
        gib = store.manifest.table_bytes / 2**30
        found = [Measure("size of the table", 0, 0, gib, 0, 0, float("nan"), "GiB")]
        lookup = Lookup(store)
        lookup.warm_up(CUDA, [torch.bfloat16])
        print(f"open after {time.perf_counter() - began:.0f} s, {lookup.sync_reason}", flush=True)
        layer = LayerZero(CUDA)
        against = Against(lookup, pinned, layer, arguments.turns)
        for part in (against.long, against.short, against.behind):
            found += part()
            print(f"{part.__name__}: {time.perf_counter() - began:.0f} s", flush=True)
        pages = cached_row_pages(store.manifest)
        line = Measure("table pages in the page cache", 0, 0, pages, 0, 0, float("nan"), "pages")
        found.append(judged(line, at_most(0.0, "pages")))
        if arguments.freetoken:
            try:
                found += beside_freetoken(lookup, arguments.freetoken, layer, arguments.turns)
            except PeerMissing as reason:
                print(f"no peer: {reason}")
        found.append(memory(lookup))
        lookup.check()
        lookup.close()
    finish("behind", found, arguments, Device(folder).machine())


if __name__ == "__main__":
    main()
