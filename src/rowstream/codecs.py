"""How the bytes of a row become float32 values. Knows no file; a device has its own kernels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["CODECS", "Codec", "decode"]


class Codec(NamedTuple):
    """Bytes of one value, and the name that safetensors gives the type."""

    value_bytes: int
    dtype: str


CODECS: dict[str, Codec] = {
    "fp8_e4m3": Codec(1, "F8_E4M3"),
    "bf16": Codec(2, "BF16"),
    "f16": Codec(2, "F16"),
    "f32": Codec(4, "F32"),
}


def _e4m3_values() -> NDArray[np.float32]:
    # OCP 8-bit floating point, E4M3: bias 7, no infinities, NaN where all seven low bits are set
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    magnitude = np.where(
        exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10)
    )
    magnitude[127] = np.nan
    return np.concatenate((magnitude, -magnitude)).astype(np.float32)


_E4M3 = _e4m3_values()


def decode(codec: str, rows: NDArray[np.uint8], scale: float | None = None) -> NDArray[np.float32]:
    """Decode rows uint8 [..., row_bytes] into float32 [..., row_values].

    Rows may be strided and start at any address. `scale` multiplies the codes of an FP8 table and
    belongs to no other. NaN codes give NaN, negative zero stays negative.
    """
    if codec not in CODECS:
        raise ValueError(f"codec needs one of {', '.join(CODECS)}, got {codec!r}")
    if rows.dtype != np.uint8:
        raise TypeError(f"rows need uint8, got {rows.dtype}")
    value_bytes = CODECS[codec].value_bytes
    if rows.ndim == 0 or rows.shape[-1] % value_bytes:
        raise ValueError(f"rows need a last axis of {value_bytes}-byte values, got {rows.shape}")
    if (scale is None) == (codec == "fp8_e4m3"):
        raise ValueError(f"{codec} needs {'a' if scale is None else 'no'} scale, got {scale}")

    packed = np.ascontiguousarray(rows)
    # a signaling NaN or a product out of range is the table's own value, no fault of the arithmetic
    with np.errstate(all="ignore"):
        if codec == "bf16":
            values = (packed.view("<u2").astype(np.uint32) << 16).view(np.float32)
        elif codec == "fp8_e4m3":
            values = _E4M3[packed]
        else:
            values = packed.view("<f2" if codec == "f16" else "<f4").astype(np.float32)
        return values if scale is None else values * np.float32(scale)
