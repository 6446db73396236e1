"""What a lookup makes of a table's bytes for each output dtype: the tables and fills for kernels.

The tables themselves are computed in dequantize.py; they stay on a device for good, as captured
graphs read them.
"""

from __future__ import annotations

import torch

from rowstream.device import dequantize
from rowstream.device.channel import Output
from rowstream.manifest import Manifest

__all__ = ["Outputs"]

# never freed
_luts: dict[tuple[torch.device, float, torch.dtype, str], torch.Tensor] = {}


class Outputs:
    """Outputs of one table's rows, on any device."""

    def __init__(self, manifest: Manifest, rounding: str) -> None:
        self._codec = manifest.codec
        self._scale = manifest.scale
        self._rounding = rounding
        self._row_bytes = manifest.row_bytes
        self._made: dict[tuple[torch.device, torch.dtype], Output] = {}

    def of(self, out: torch.Tensor) -> Output:
        """What a kernel needs to fill `out`, for which `target` has given it."""
        key = (out.device, out.dtype)
        if key not in self._made:
            if self._scale is None or out.dtype in (torch.uint8, dequantize.CODES[self._codec]):
                made = Output(dequantize.void_byte(self._codec))
            else:
                table = _lut(out.device, self._scale, out.dtype, self._rounding)
                made = Output(dequantize.void_bits(out.dtype), out.dtype.itemsize, table)
            self._made[key] = made
        return self._made[key]

    def check(self, dtype: torch.dtype) -> None:
        """Raise TypeError where rows cannot become values of `dtype`."""
        if self._scale is not None and dtype not in (torch.uint8, dequantize.CODES[self._codec]):
            dequantize.void_bits(dtype)

    def target(self, out: torch.Tensor) -> torch.Tensor:
        """What a kernel can fill for `out`: itself, or room for the bytes of its rows."""
        own = out.dtype in (torch.uint8, dequantize.CODES[self._codec])
        if own or self._scale is not None:
            return out
        shape = (*out.shape[:-1], self._row_bytes)
        return torch.empty(shape, dtype=torch.uint8, device=out.device)

    def convert(self, target: torch.Tensor, out: torch.Tensor) -> None:
        """Bring what was filled in place of `out` to it."""
        if target is not out:
            out.copy_(target.view(dequantize.CODES[self._codec]))

    def fill_on_host(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Make values of rows uint8 [..., row_bytes], all on the CPU."""
        if out.dtype == torch.uint8:
            out.copy_(rows)
            return
        values = rows.view(dequantize.CODES[self._codec])
        if self._scale is None or out.dtype == values.dtype:
            out.copy_(values)
        elif self._rounding == "out":
            scale = torch.tensor(self._scale, dtype=out.dtype, device="cpu")
            torch.mul(values.to(out.dtype), scale, out=out)
        else:
            out.copy_(values.to(torch.float32) * self._scale)


def _lut(device: torch.device, scale: float, dtype: torch.dtype, rounding: str) -> torch.Tensor:
    key = (device, scale, dtype, rounding)
    if key not in _luts:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"lookup needs warm_up() with {dtype} before its first capture")
        _luts[key] = dequantize.lut(scale, dtype, rounding).to(device)
    return _luts[key]
