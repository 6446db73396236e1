"""A table of a loaded model as an engine wants it: rows read in time, and counters to show.

Joins what the store has counted with what the ways to GPUs have; owns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rowstream.prefetch import Ticket

if TYPE_CHECKING:
    from rowstream.device.lookup import Lookup
    from rowstream.store import Run

__all__ = ["ModelTable"]


class ModelTable:
    """One table of a model, whichever device the model is on. Any thread may call."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    @property
    def name(self) -> str:
        """The table's name, as `inspect` has it."""
        return self._lookup.store.manifest.name

    def prefetch(self, runs: Sequence[Run]) -> Ticket:
        """Start to read the rows of runs that will be looked up soon, and return at once."""
        return self._lookup.stage(runs)

    def stats(self) -> dict[str, Any]:
        """Return `RowStore.stats()` and, as `gpus`, what each GPU's way to the table counts.

        Never raises what a step has failed with: that is for whoever ran the step.
        """
        return self._lookup.store.stats() | {"gpus": self._lookup.counters()}

    def ways(self) -> list[str]:
        """Return a line for each GPU that rows go to: how, and how many bytes are held for it."""
        return [_way(device, found) for device, found in self._lookup.counters().items()]


def _way(device: str, found: dict[str, Any]) -> str:
    if "sync" in found:
        return (
            f"{device}: sync {found['sync']} ({found['sync_reason']}),"
            f" {found['channel_bytes'] >> 20} MiB pinned for channels"
        )
    return (
        f"{device}: addressed in {found['addressed']} memory,"
        f" {found['addressed_bytes'] / 2**30:.2f} GiB in {found['fill_s']:.1f} s"
    )
