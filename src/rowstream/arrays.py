"""Arrays given by callers, checked and brought into the form that the core takes.

Raises TypeError and ValueError; copies only what is not in that form already.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["integers", "output", "vector"]

_INT64 = np.dtype(np.int64)


def integers(values: ArrayLike, name: str) -> NDArray[np.int64]:
    """Return int64 in C order of any shape, the array itself where it is that already."""
    if type(values) is np.ndarray and values.dtype == _INT64 and values.flags.c_contiguous:
        return values
    ids = np.asarray(values)
    if ids.size == 0 and not isinstance(values, np.ndarray):
        ids = ids.astype(np.int64)  # an empty list has no type of its own
    if ids.dtype.kind not in "iu" or not np.can_cast(ids.dtype, np.int64):
        raise TypeError(f"{name} need integers that fit int64, got {ids.dtype}")
    return np.ascontiguousarray(ids, np.int64).reshape(ids.shape)


def vector(values: ArrayLike, name: str) -> NDArray[np.int64]:
    """Return int64 [n]."""
    ids = integers(values, name)
    if ids.ndim != 1:
        raise ValueError(f"{name} need one axis, got {ids.ndim}")
    return ids


def output(out: NDArray[np.uint8] | None, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return `out` if rows of such a shape can be written to it, a new array if it is None."""
    if out is None:
        return np.empty(shape, np.uint8)
    if not isinstance(out, np.ndarray) or out.dtype != np.uint8:
        raise TypeError(f"out needs a uint8 array, got {getattr(out, 'dtype', type(out))}")
    if out.shape != shape:
        raise ValueError(f"out needs shape {shape}, got {out.shape}")
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("out needs to be writable and C-contiguous")
    return out
