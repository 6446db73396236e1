"""What of a model's options only a GPU has: which, how a store and a lookup take them, and a no.

A refusal comes before a model is loaded; whether one GPU can what another can is its lookup's to
say.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rowstream.errors import UnavailableError

if TYPE_CHECKING:
    from rowstream.device.lookup import LookupOptions

__all__ = ["addressed", "need_gpu", "placed"]

# backends that only a GPU has: what the store itself is there
_STORES = {"device": "disk", "file": "mmap"}


def placed(table_backend: str, lookup: LookupOptions | None) -> tuple[str, LookupOptions | None]:
    """Return the store's backend, and where the GPU finds the table."""
    if table_backend not in _STORES:
        return table_backend, lookup
    from rowstream.device.lookup import LookupOptions

    place = dataclasses.replace(lookup or LookupOptions(), place=table_backend)
    return _STORES[table_backend], place


def addressed(lookup: LookupOptions | None) -> bool:
    """Whether the GPU finds rows by itself, so that there is nothing to read ahead."""
    from rowstream.device.addressed import ADDRESSED

    return lookup is not None and lookup.place in ADDRESSED


def need_gpu(
    table_backend: str, lookup: LookupOptions | None, device: Any, device_map: Any
) -> None:
    """Raise UnavailableError for what needs a GPU where the model will not be on one.

    A device map is taken at its word.
    """
    wish = _wish(table_backend, lookup)
    if wish is None:
        return
    on_gpu = isinstance(device, int) or str(device).startswith("cuda")
    if not on_gpu and (device is not None or device_map is None):
        found = "cpu" if device is None else device
        raise UnavailableError(
            f"{wish} needs a model on a GPU (device cuda), its device is {found}"
        )
    from rowstream.device import driver

    usable, reason = driver.available()
    if not usable:
        raise UnavailableError(f"{wish} needs a GPU: {reason}")


def _wish(table_backend: str, lookup: LookupOptions | None) -> str | None:
    if table_backend in _STORES:
        return f"table_backend {table_backend}"
    if lookup is not None and lookup.place in _STORES:
        return f"place {lookup.place}"
    if lookup is not None and lookup.sync != "auto":
        return f"sync {lookup.sync}"
    return None
