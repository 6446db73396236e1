from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest

from rowstream.codecs import CODECS, decode


def _e4m3(code: int) -> float:
    """The value of an E4M3 code by its definition, in exact arithmetic."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        value = Fraction(mantissa, 8) * Fraction(1, 2**6)
    else:
        value = Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
    return math.copysign(float(value), -1.0 if sign else 1.0)


def test_e4m3_codes_have_their_defined_values() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = decode("fp8_e4m3", codes, 1.0)
    assert values.dtype == np.float32
    expected = [_e4m3(code) for code in range(256)]
    assert [math.isnan(value) for value in values] == [math.isnan(value) for value in expected]
    assert values[126] == 448.0
    assert [value for value in values.tolist() if value == value] == [
        value for value in expected if value == value
    ]
    assert math.copysign(1.0, values[0x80]) == -1.0


def test_e4m3_is_multiplied_by_the_scale_in_float32() -> None:
    scale = 0.00019931793212890625
    codes = np.arange(256, dtype=np.uint8)
    values = decode("fp8_e4m3", codes, scale)
    for code in range(256):
        exact = _e4m3(code) * scale  # exact in double: 4 and 8 significant bits
        rounded = struct.unpack("<f", struct.pack("<f", exact))[0]
        assert values[code] == rounded or (math.isnan(rounded) and math.isnan(values[code]))


def test_a_scale_that_overflows_is_no_warning() -> None:
    assert decode("fp8_e4m3", np.array([126], np.uint8), 1e38)[0] == math.inf


def test_bf16_is_the_upper_half_of_a_float32_for_every_pattern() -> None:
    patterns = np.arange(65536, dtype="<u2")
    values = decode("bf16", patterns.view(np.uint8).reshape(256, 512))
    assert values.shape == (256, 256)
    assert np.array_equal(values.view(np.uint32).ravel(), patterns.astype(np.uint32) * 65536)


def test_f16_has_the_value_of_the_standard_library_for_every_pattern() -> None:
    raw = np.arange(65536, dtype="<u2").tobytes()
    values = decode("f16", np.frombuffer(raw, np.uint8))
    expected = np.array(struct.unpack("<65536e", raw), np.float32)
    numbers = ~np.isnan(expected)
    assert np.array_equal(~np.isnan(values), numbers)
    assert np.array_equal(values[numbers].view(np.uint32), expected[numbers].view(np.uint32))


def test_f32_keeps_its_bits() -> None:
    patterns = [0, 0x80000000, 1, 0x3F800000, 0x7F800000, 0xFF7FFFFF, 0x7FC00001]
    raw = np.array(patterns, "<u4").view(np.uint8)
    values = decode("f32", raw)
    assert values.view(np.uint32).tolist() == patterns
    values[:] = 0  # a copy, not a view of the rows
    assert raw.any()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("start", [1, 3])
def test_rows_may_be_unaligned_strided_and_of_any_rank(codec: str, start: int) -> None:
    scale = 0.5 if codec == "fp8_e4m3" else None
    rng = np.random.default_rng(start)
    block = rng.integers(0, 60, (2, 5, 40), np.uint8)  # small bytes: no NaN to compare
    rows = block[:, ::2, start : start + 16]
    expected = decode(codec, np.array(rows.tolist(), np.uint8), scale)
    assert expected.shape == (2, 3, 16 // CODECS[codec].value_bytes)
    assert np.array_equal(decode(codec, rows, scale), expected)
    flat = np.frombuffer(b"x" * start + bytes(rows[0, 0]), np.uint8)[start:]
    assert np.array_equal(decode(codec, flat, scale), expected[0, 0])
    assert decode(codec, np.empty((0, 16), np.uint8), scale).shape[0] == 0


def test_wrong_arguments_are_refused() -> None:
    row = np.zeros(6, np.uint8)
    with pytest.raises(ValueError, match="codec needs one of"):
        decode("int4", row)
    with pytest.raises(ValueError, match="needs a scale"):
        decode("fp8_e4m3", row)
    with pytest.raises(ValueError, match="needs no scale"):
        decode("bf16", row, 1.0)
    with pytest.raises(ValueError, match="4-byte values"):
        decode("f32", row)
    with pytest.raises(TypeError, match="uint8"):
        decode("bf16", row.astype(np.int8))
