"""Cache policies over keys, simulated exactly by policy.cpp: which one, and how large."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from benchmarks.native import compiled
from numpy.typing import NDArray

__all__ = ["POLICIES", "ROWSTREAM", "Outcome", "Policy", "Simulator"]


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy of policy.cpp with its settings."""

    kind: int
    a: float = 0.0
    b: float = 0.0
    c: float = 0.0


POLICIES = {
    "LRU": Policy(0),
    "segmented LRU": Policy(0, 0.8),
    "S3-FIFO": Policy(1, 0.1, 1, 1.0),
    "S3-FIFO, two uses": Policy(1, 0.1, 2, 1.0),
    "S3-FIFO, no ghosts": Policy(1, 0.1, 1, 0.0),
    "SIEVE": Policy(2),
    "TinyLFU, exact": Policy(3, 0.01),
}
ROWSTREAM = Policy(1, 0.1, 1, -1.0)  # the cache of the store


class Outcome(NamedTuple):
    """Distinct keys of each gather that were not there, and that were: uint32 [gathers]."""

    missed: NDArray[np.uint32]
    found: NDArray[np.uint32]


class Simulator:
    """One cache; a key is an index into `hashes`."""

    def __init__(
        self, policy: Policy, hashes: NDArray[np.uint64], shard_entries: int, shards: int = 1
    ) -> None:
        """Make an empty cache; bits of a key's hash choose its shard, as in the real one."""
        if shards & (shards - 1) or shard_entries < 1:
            raise ValueError(f"{shards} shards of {shard_entries} entries cannot be")
        hashes = np.ascontiguousarray(hashes, np.uint64)
        self._num_keys = len(hashes)
        self._library = compiled("policy")
        self._library.policy_new.restype = ctypes.c_void_p
        self._library.policy_new.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_uint32,
            ctypes.c_uint64,
            *[ctypes.c_double] * 3,
        ]
        self._library.policy_run.restype = None
        self._library.policy_run.argtypes = [
            *[ctypes.c_void_p] * 3,
            ctypes.c_uint64,
            *[ctypes.c_void_p] * 2,
        ]
        self._library.policy_delete.restype = None
        self._library.policy_delete.argtypes = [ctypes.c_void_p]
        self._handle = self._library.policy_new(
            policy.kind,
            hashes.ctypes.data,
            len(hashes),
            shards,
            shard_entries,
            policy.a,
            policy.b,
            policy.c,
        )

    def run(self, trace: NDArray[np.uint32], ends: NDArray[np.int64]) -> Outcome:
        """Run gathers of trace[ends[i - 1]:ends[i]], after those of earlier calls."""
        if trace.dtype != np.uint32 or (len(trace) and int(trace.max()) >= self._num_keys):
            raise ValueError(f"a trace needs uint32 keys below {self._num_keys}")
        if (int(ends[-1]) if len(ends) else 0) != len(trace) or np.any(np.diff(ends) < 0):
            raise ValueError(f"ends need to rise to {len(trace)}")
        trace, bounds = np.ascontiguousarray(trace), np.ascontiguousarray(ends, np.uint64)
        outcome = Outcome(np.zeros(len(ends), np.uint32), np.zeros(len(ends), np.uint32))
        self._library.policy_run(
            self._handle,
            trace.ctypes.data,
            bounds.ctypes.data,
            len(bounds),
            outcome.missed.ctypes.data,
            outcome.found.ctypes.data,
        )
        return outcome

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.policy_delete(handle)
            self._handle = None
