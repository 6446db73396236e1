"""What a row's bytes become on a device: contracts, and tables that make it the same everywhere.

An E4M3 code has 256 outputs. They are computed here, on the CPU, and the kernels look them up: a
GPU gives the CPU's bits whatever its arithmetic.
"""

from __future__ import annotations

import torch

from rowstream.codecs import CODECS

__all__ = ["CODES", "CONTRACTS", "ROUNDINGS", "lut", "reference", "void_bits", "void_byte"]

CONTRACTS = ("raw", "scaled")
"""`raw`: the bytes of the row, an engine makes values of them. `scaled`: values in its dtype."""

ROUNDINGS = ("f32", "out")
"""What is rounded to the output dtype, to the nearest, ties to even. `f32`: the product of code and
scale in float32. `out`: code and scale each, then their product."""

CODES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
}

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000}


def lut(scale: float, dtype: torch.dtype, rounding: str = "f32") -> torch.Tensor:
    """The output of every E4M3 code under `scale`, as bits: int16 or int32 [256] on the CPU.

    NaN codes give NaN, negative zero stays negative. `dtype` is bfloat16, float16 or float32.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding needs one of {', '.join(ROUNDINGS)}, got {rounding!r}")
    bits = _bits(dtype)
    # By name: models are built under torch.device("meta"), and under other default devices.
    codes = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn)
    exact = torch.tensor(scale, dtype=torch.float32, device="cpu")
    if rounding == "f32":
        values = (codes.to(torch.float32) * exact).to(dtype)
    else:
        values = codes.to(dtype) * exact.to(dtype)
    # one NaN, where torch's depends on how it was vectorized
    values[torch.isnan(values)] = torch.nan
    return values.view(bits)


def reference(
    rows: torch.Tensor,
    codec: str,
    scale: float | None,
    dtype: torch.dtype,
    contract: str,
    rounding: str = "f32",
) -> torch.Tensor:
    """What a lookup gives for rows uint8 [..., row_bytes], on the CPU.

    `raw`: the rows. `scaled`: [..., row_values] in `dtype`; a codec without a scale is converted.
    """
    if contract not in CONTRACTS:
        raise ValueError(f"contract needs one of {', '.join(CONTRACTS)}, got {contract!r}")
    if codec not in CODECS:
        raise ValueError(f"codec needs one of {', '.join(CODECS)}, got {codec!r}")
    if contract == "raw":
        return rows
    if (scale is None) == (codec == "fp8_e4m3"):
        raise ValueError(f"{codec} needs {'a' if scale is None else 'no'} scale, got {scale}")
    if scale is None:
        return rows.contiguous().view(CODES[codec]).to(dtype)
    return lut(scale, dtype, rounding)[rows.long()].view(dtype)


def void_byte(codec: str) -> int:
    """The byte that fills a raw row of a void step, such that every value is NaN."""
    # 0x7F7F is a number in bfloat16; 0x7F is the NaN that an E4M3 encoder writes
    return 0x7F if codec == "fp8_e4m3" else 0xFF


def void_bits(dtype: torch.dtype) -> int:
    """The bits of the NaN that fills a scaled row of a void step."""
    _bits(dtype)
    return _NAN[dtype]


def _bits(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _BITS:
        raise TypeError(f"dtype needs bfloat16, float16 or float32, got {dtype}")
    return _BITS[dtype]
