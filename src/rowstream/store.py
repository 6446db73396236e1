"""The open table: row ids or tokens in, row bytes out.

Checks shapes and types, then makes one native call.

Stateless between gathers; any thread may call. Knows no model and no device.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rowstream import _core, catalog, codecs
from rowstream.arrays import integers, output, vector
from rowstream.backends import DEFAULT_QUEUE_DEPTH, NativeTable, Progress, ReadOptions, open_table
from rowstream.errors import UnavailableError
from rowstream.manifest import Manifest
from rowstream.prefetch import Ticket
from rowstream.sharding import OwnedRows, Shard

if TYPE_CHECKING:
    from rowstream.profile import DeviceProfile

__all__ = ["RowStore", "Run"]

# the ngram_size - 1 ids before the tokens (None: the start of a sequence), and the tokens
Run = tuple[ArrayLike | None, ArrayLike]

_log = logging.getLogger(__name__)


class RowStore:
    """A table left where its checkpoint has it; gathers read exactly the rows asked for."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        backend: str = "auto",
        reader: str = "auto",
        queue_depth: int | None = None,
        read_timeout_s: float = 10.0,
        on_read_error: str = "raise",
        cache_bytes: int = 0,
        lookahead_bytes: int = 32 << 20,
        resident_budget_bytes: int | None = None,
        profile: DeviceProfile | None = None,
        shard: Shard | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Open the table that a manifest describes; see `open` for the arguments."""
        self.manifest = manifest
        if queue_depth is None:
            queue_depth = DEFAULT_QUEUE_DEPTH if profile is None else profile.queue_depth
        self._options = ReadOptions(
            reader,
            queue_depth,
            read_timeout_s,
            on_read_error,
            cache_bytes,
            lookahead_bytes,
            resident_budget_bytes,
            0 if profile is None else profile.block,
        )
        self.shard = shard or Shard()
        self.owned = OwnedRows(self.shard, manifest.num_rows, manifest.groups)
        self._table = open_table(
            manifest, backend, self._options, self.owned.lookup_groups, progress
        )
        self._zeroed_rows = 0
        self._hash = _native_hash(manifest)
        self._shared = self.shard.world > 1
        self._zeroes = on_read_error == "zero-rows"
        # looked up once: for one token the way through Python is a tenth of the wait
        self._gather_rows = self._table.native.gather_rows
        _log.info("%s: backend %s (%s)", manifest.name, self.backend, self.reason)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        table: str | None = None,
        table_paths: Sequence[str | os.PathLike[str]] = (),
        backend: str = "auto",
        reader: str = "auto",
        queue_depth: int | None = None,
        read_timeout_s: float = 10.0,
        on_read_error: str = "raise",
        cache_bytes: int = 0,
        lookahead_bytes: int = 32 << 20,
        resident_budget_bytes: int | None = None,
        profile: DeviceProfile | None = None,
        rank: int = 0,
        world: int = 1,
        shard_by: str = "heads",
        progress: Progress | None = None,
    ) -> RowStore:
        """Open a table of the checkpoint at `path`, a folder, file or id in the local hub cache.

        `table` is the name of one of `rowstream.tables(path)` and may be left out where there is
        but one. `table_paths` are folders or files on other drives that hold its shards; of a shard
        that several hold, disk reads the copy whose drive is less busy. `backend` is "auto",
        "disk", "mmap" or "pinned". `on_read_error` is "raise", or "zero-rows" to go on with zeroes
        for rows that cannot be read, which are counted and logged. For disk: `reader`
        "auto", "uring", "pool" or "inline"; `queue_depth` the reads kept in flight, 128 or what
        `profile` chose; `read_timeout_s` the seconds without any answer after which a gather fails;
        `cache_bytes` the memory for rows read before; `lookahead_bytes` that for rows of
        `prefetch`. For mmap: `resident_budget_bytes` of mapped pages; more are dropped, at most
        64 MiB late, and come back from the page cache. For pinned: `progress` is called with bytes
        done and bytes in all while the table is read, at most ten times a second and once at the
        end. Of several ranks that add up what they gather, `rank` of `world` reads what it owns of
        `shard_by` "heads" or "rows", see `Shard`; the rows of others are zeroes. Nothing is
        measured here, see `DeviceProfile.measure`.
        Raises ManifestError, ReadError, UnavailableError, ValueError.
        """
        return cls(
            _choose(catalog.tables(path, table_paths=table_paths), table),
            backend=backend,
            reader=reader,
            queue_depth=queue_depth,
            read_timeout_s=read_timeout_s,
            on_read_error=on_read_error,
            cache_bytes=cache_bytes,
            lookahead_bytes=lookahead_bytes,
            resident_budget_bytes=resident_budget_bytes,
            profile=profile,
            shard=Shard(rank, world, shard_by),
            progress=progress,
        )

    @property
    def backend(self) -> str:
        """Where the rows live: "disk", "mmap" or "pinned"."""
        return self._table.backend

    @property
    def reason(self) -> str:
        """Why the backend and its reader are the ones they are."""
        return self._table.reason

    @property
    def native(self) -> NativeTable:
        """The core's table, for what links it to a device."""
        return self._table.native

    @property
    def num_rows(self) -> int:
        """Rows of the table, padding included."""
        return self.manifest.num_rows

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.manifest.row_bytes

    @property
    def row_values(self) -> int:
        """Values of one row."""
        return self.manifest.row_values

    @property
    def heads(self) -> int:
        """Rows that one token needs."""
        return self.manifest.heads

    def gather(self, row_ids: ArrayLike, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Fill `out` uint8 [..., row_bytes] with the rows of `row_ids` int64 [...] and return it.

        Where the last axis has `heads` ids they are planned as the n-grams of one token, which is
        cheaper than as many single rows; the bytes are the same. Id -1 means no row and reads as
        zeroes. An id outside [-1, num_rows) raises IndexError before anything is read; a failed
        read raises ReadError and leaves `out` undefined.
        """
        if out is None or self._shared or not self._gather_rows(row_ids, out):
            ids = integers(row_ids, "row_ids")
            out = output(out, (*ids.shape, self.manifest.row_bytes))
            if self._shared:
                self.owned.gather(self._table.native.gather, ids, out)
            else:
                self._gather_rows(ids if ids.flags.aligned else ids.copy(), out)
        if self._zeroes:
            self._log_zeroed_rows()
        return out

    def gather_tokens(
        self, runs: Sequence[Run], out: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """Fill `out` uint8 [tokens, heads, row_bytes] with the rows of all tokens of all runs.

        A run is (context, tokens): the `ngram_size - 1` ids before its first token, or None at the
        start of a sequence, and the tokens. An id outside the vocabulary raises ValueError. See
        `gather`.
        """
        ids = [self.row_ids(context, tokens) for context, tokens in runs]
        rows = np.concatenate(ids) if ids else np.empty((0, self.heads), np.int64)
        return self.gather(rows, out)

    def prefetch(self, runs: Sequence[Run]) -> Ticket:
        """Start to read the rows of runs that will be gathered soon, and return at once.

        A later gather of the same rows, by tokens or by ids, takes what has arrived and reads only
        the rest. A wrong guess costs reads, never bytes. Backends other than disk have nothing to
        read ahead. See `gather_tokens` for runs.
        """
        native = self._table.native
        ids = [self.row_ids(context, tokens) for context, tokens in runs]
        if self._shared:
            ids = [self.owned.select(of_run) for of_run in ids]
        if not ids or not isinstance(native, _core.DiskTable):
            return Ticket(None, 0)
        return Ticket(native, native.prefetch(np.concatenate(ids).reshape(-1)))

    def row_ids(self, context: ArrayLike | None, tokens: ArrayLike) -> NDArray[np.int64]:
        """Return the row ids int64 [len(tokens), heads] of one run; see `gather_tokens`."""
        constants = self.manifest.hash
        if constants is None or self._hash is None:
            raise UnavailableError(
                f"{self.manifest.name}: tokens cannot be hashed: "
                f"{self.manifest.root} has no config.json"
            )
        if context is None:
            before = np.full(constants.ngram_size - 1, constants.eos, np.int64)
        else:
            before = vector(context, "context")
        ids = vector(tokens, "tokens")
        rows = np.empty((len(ids), self.heads), np.int64)
        self._hash.rows(before, ids, rows)
        return rows

    def values(self, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Decode gathered rows uint8 [..., row_bytes] into float32 [..., row_values]."""
        if rows.ndim == 0 or rows.shape[-1] != self.row_bytes:
            raise ValueError(f"rows need a last axis of {self.row_bytes} bytes, got {rows.shape}")
        return codecs.decode(self.manifest.codec, rows, self.manifest.scale)

    def stats(self) -> dict[str, Any]:
        """Return what the store is and has done since it was opened.

        `memory_bytes` is all that the store holds (scratch, bounce, rings, a pinned table); pages
        of a mapped table belong to the page cache. `reads` are the reads issued, `duplicate_rows`
        the rows that another row of the same gather served, `gather_s` the seconds spent in
        gathers, `plan_s` those of them until the reads were known. Of "mmap": `mapped_bytes`;
        `resident_bytes`, asked of the kernel in milliseconds; `faults` that were caught; `drops` of
        slices to stay under the budget; `advise_failures`.
        """
        native = self._table.native
        counters = native.counters()
        if isinstance(native, _core.DiskTable):
            counters |= native.kept()
        elif isinstance(native, _core.ResidentTable) and self.backend == "mmap":
            counters |= native.mapped_pages()
        return {
            "table": self.manifest.name,
            "table_bytes": self.manifest.table_bytes,
            "backend": self.backend,
            "reader": self._table.reader,
            "queue_depth": self._table.queue_depth,
            "reason": self.reason,
            "rank": self.shard.rank,
            "world": self.shard.world,
            "on_read_error": self._options.on_read_error,
            "memory_bytes": native.memory_bytes,
            "gather_s": counters.pop("gather_ns") * 1e-9,
            "plan_s": counters.pop("plan_ns") * 1e-9,
            **counters,
        }

    def close(self) -> None:
        """Close the files. Waits for a gather that is running; the next one raises ValueError."""
        self._table.native.close()

    def __enter__(self) -> RowStore:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"RowStore({self.manifest.name}, {self.num_rows} rows of {self.row_bytes} bytes, "
            f"{self.backend})"
        )

    def _log_zeroed_rows(self) -> None:
        total = self._table.native.counters()["zeroed_rows"]
        if total > self._zeroed_rows:
            _log.error(
                "%s: %d rows could not be read and are zeroes, %d since the start",
                self.manifest.name,
                total - self._zeroed_rows,
                total,
            )
            self._zeroed_rows = total


def _choose(manifests: Sequence[Manifest], table: str | None) -> Manifest:
    names = [manifest.name for manifest in manifests]
    if table is None and len(manifests) == 1:
        return manifests[0]
    if table is None:
        raise ValueError(f"the checkpoint has {len(names)} tables, name one: {', '.join(names)}")
    if table not in names:
        raise ValueError(f"table needs one of {', '.join(names)}, got {table!r}")
    return manifests[names.index(table)]


def _native_hash(manifest: Manifest) -> _core.NgramHash | None:
    constants = manifest.hash
    if constants is None:
        return None
    return _core.NgramHash(
        ngram_size=constants.ngram_size,
        heads_per_ngram=constants.heads_per_ngram,
        vocab_size=constants.vocab_size,
        eos=constants.eos,
        multipliers=constants.multipliers,
        sizes=constants.sizes,
        offsets=constants.offsets,
    )
