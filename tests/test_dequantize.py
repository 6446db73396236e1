from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import rowstream

torch = pytest.importorskip("torch")

from rowstream.device.dequantize import lut, reference, void_bits, void_byte  # noqa: E402

NEGATIVE_ZERO = 0x80
NAN_CODES = (0x7F, 0xFF)
FOLDER = Path(rowstream.__file__).parent / "device"

# explicit fraction bits, lowest exponent of a normal number, largest finite value
FORMATS = {
    "bfloat16": (7, -126, float.fromhex("0x1.fep127")),
    "float16": (10, -14, 65504.0),
    "float32": (23, -126, float.fromhex("0x1.fffffep127")),
}


def _codes() -> NDArray[np.float64]:
    """E4M3 by its definition: bias 7, no infinity, NaN where all seven low bits are set."""
    values = []
    for code in range(256):
        exponent, mantissa = (code >> 3) & 15, code & 7
        if exponent == 0:
            magnitude = mantissa / 8 * 2.0**-6
        else:
            magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        if code & 127 == 127:
            magnitude = math.nan
        values.append(-magnitude if code >> 7 else magnitude)
    return np.array(values)


def _rounded(exact: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    """Round float64 to the nearest number of the format, ties to even, by integer arithmetic."""
    fraction_bits, lowest, largest = FORMATS[name]
    _, exponent = np.frexp(exact)
    step_exponent = np.maximum(exponent - 1, lowest) - fraction_bits
    # np.rint ties to even; scaling by a power of two is exact in float64
    steps = np.rint(np.ldexp(exact, -step_exponent))
    rounded = np.ldexp(steps, step_exponent)
    rounded = np.where(np.abs(rounded) > largest, np.copysign(np.inf, exact), rounded)
    return np.where(np.isfinite(exact), rounded, exact)


def _scales() -> NDArray[np.float32]:
    random = np.random.default_rng(20)
    fractions = random.uniform(1, 2, 1000) * np.where(random.random(1000) < 0.1, -1, 1)
    scales = (fractions * 2.0 ** random.integers(-30, 20, 1000)).astype(np.float32)
    # of real tables; ties of bfloat16 and float16; products that vanish or overflow
    scales[:8] = [0.00019931793212890625, 1.0, 0.0, 1.00390625, 1.00048828125, 1e-38, 1e38, -1.0]
    return scales


def _values(bits: NDArray[np.signedinteger], name: str) -> NDArray[np.float64]:
    if name == "bfloat16":
        words = bits.astype(np.int16).view(np.uint16).astype(np.uint32) << 16
        return words.view(np.float32).astype(np.float64)
    return bits.view(np.float16 if name == "float16" else np.float32).astype(np.float64)


@pytest.mark.parametrize("rounding", ["f32", "out"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_under_many_scales_is_the_rounded_product(name: str, rounding: str) -> None:
    codes = _codes()
    for scale in _scales().tolist():
        bits = lut(scale, getattr(torch, name), rounding).numpy()
        assert bits.shape == (256,)
        with np.errstate(invalid="ignore", over="ignore"):
            if rounding == "f32":
                expected = _rounded(_rounded(codes * scale, "float32"), name)
            else:
                of_scale = float(_rounded(np.array([scale]), name)[0])
                expected = _rounded(_rounded(codes, name) * of_scale, name)
            got = _values(bits, name)
        assert np.array_equal(got, expected, equal_nan=True), scale
        numbers = ~np.isnan(expected)
        assert np.array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers])), scale


@pytest.mark.parametrize("name", FORMATS)
def test_negative_zero_and_nan_codes_survive(name: str) -> None:
    dtype = getattr(torch, name)
    values = lut(0.25, dtype, "f32").view(dtype)
    assert values[NEGATIVE_ZERO] == 0
    assert torch.signbit(values[NEGATIVE_ZERO])
    assert [code for code in range(256) if torch.isnan(values[code])] == list(NAN_CODES)


def test_the_roundings_differ_where_the_scale_is_not_of_the_output_type() -> None:
    scale = 1.0035
    assert not torch.equal(lut(scale, torch.bfloat16, "f32"), lut(scale, torch.bfloat16, "out"))
    assert torch.equal(lut(scale, torch.float32, "f32"), lut(scale, torch.float32, "out"))


def test_a_table_is_made_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        assert lut(1.0, torch.bfloat16).device.type == "cpu"


@pytest.mark.parametrize("name", FORMATS)
def test_scaled_rows_are_codes_looked_up(name: str) -> None:
    dtype = getattr(torch, name)
    rows = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (2, 3, 10), np.uint8))
    values = reference(rows, "fp8_e4m3", 0.5, dtype, "scaled")
    assert values.dtype == dtype
    assert values.shape == (2, 3, 10)
    expected = _codes()[rows.numpy()] * 0.5
    assert np.array_equal(values.double().numpy(), _rounded(expected, name), equal_nan=True)


def test_raw_rows_and_passed_through_rows_keep_their_bytes() -> None:
    rows = torch.arange(24, dtype=torch.uint8).reshape(2, 12)
    assert torch.equal(reference(rows, "fp8_e4m3", 0.5, torch.bfloat16, "raw"), rows)
    kept = reference(rows, "bf16", None, torch.bfloat16, "scaled")
    assert kept.shape == (2, 6)
    assert torch.equal(kept.view(torch.uint8), rows)


@pytest.mark.parametrize("codec", ["fp8_e4m3", "bf16", "f16", "f32"])
def test_a_void_row_is_nan_throughout(codec: str) -> None:
    rows = torch.full((8,), void_byte(codec), dtype=torch.uint8)
    scale = 1.0 if codec == "fp8_e4m3" else None
    assert torch.isnan(reference(rows, codec, scale, torch.float32, "scaled")).all()


@pytest.mark.parametrize("name", FORMATS)
def test_void_bits_are_nan(name: str) -> None:
    bits = void_bits(getattr(torch, name))
    assert np.isnan(_values(np.array([bits], np.int32 if name == "float32" else np.int16), name))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fp8_e4m3", None, "scaled", "f32"), "fp8_e4m3 needs a scale"),
        (("bf16", 1.0, "scaled", "f32"), "bf16 needs no scale"),
        (("fp8_e4m3", 1.0, "cooked", "f32"), "contract needs one of raw, scaled"),
        (("int3", 1.0, "scaled", "f32"), "codec needs one of"),
        (("fp8_e4m3", 1.0, "scaled", "up"), "rounding needs one of f32, out"),
    ],
)
def test_what_does_not_fit_is_refused(
    arguments: tuple[str, float | None, str, str], message: str
) -> None:
    codec, scale, contract, rounding = arguments
    rows = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        reference(rows, codec, scale, torch.bfloat16, contract, rounding)


def test_an_integer_output_is_refused() -> None:
    with pytest.raises(TypeError, match="dtype needs bfloat16"):
        lut(1.0, torch.int16)


# --- the kernels' text: what can be told without a GPU ----------------------------------------


def _ptx() -> str:
    return (FOLDER / "kernels.ptx").read_text()


def test_the_ptx_belongs_to_the_source() -> None:
    digest = hashlib.sha256((FOLDER / "kernels.cu").read_bytes()).hexdigest()
    first = _ptx().splitlines()[0]
    assert first.endswith(f"kernels.cu sha256 {digest}"), "make ptx"


def test_the_ptx_is_taken_by_drivers_of_cuda_12_0_and_volta() -> None:
    ptx = _ptx()
    assert ".version 8.0\n" in ptx
    assert ".target sm_70\n" in ptx
    assert set(re.findall(r"\.entry (\w+)\(", ptx)) == {
        "post",
        "verdict",
        "take_bytes",
        "take_lut16",
        "take_lut32",
        "rows_bytes",
        "rows_lut16",
        "rows_lut32",
    }


def test_staging_is_read_by_wide_loads_that_no_stale_cache_answers() -> None:
    ptx = _ptx()
    assert ".nc." not in ptx
    for name, body in zip(*[iter(re.split(r"\.entry (\w+)\(", ptx)[1:])] * 2, strict=True):
        assert ("ld.acquire.sys" in body) == (name == "verdict" or name.startswith("take")), name
        if name == "post":  # its own mark, the ids before the door, the epoch after it
            assert re.findall(r"membar\.\w+", body) == ["membar.gl", "membar.sys", "membar.gl"]
        if name not in ("post", "verdict"):
            assert "ld.global.v4.u32" in body, name
            assert "st.global.v4.u32" in body, name


def test_the_launches_pass_as_many_arguments_as_the_kernels_take() -> None:
    from rowstream.device.kernels import _ARGUMENTS

    entries = dict(re.findall(r"\.entry (\w+)\((.*?)\)", _ptx(), re.DOTALL))
    assert {name: text.count(".param") for name, text in entries.items()} == _ARGUMENTS
