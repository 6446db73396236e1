from __future__ import annotations

import errno
import pickle

import pytest

from rowstream.errors import (
    ManifestError,
    ReadError,
    RowstreamError,
    UnavailableError,
    shown,
)


def test_each_error_is_also_the_built_in_that_callers_know() -> None:
    for error, built_in in (
        (ManifestError("x"), ValueError),
        (ReadError(errno.EIO, "x"), OSError),
        (UnavailableError("x"), RuntimeError),
    ):
        assert isinstance(error, RowstreamError)
        assert isinstance(error, built_in)


def test_mismatch_names_file_tensor_needed_and_found() -> None:
    error = ManifestError.mismatch("rows", 12, 11, file="model-7.safetensors", tensor="shard_3")
    assert str(error) == "model-7.safetensors: shard_3 rows needs 12, found 11"
    assert (error.file, error.tensor) == ("model-7.safetensors", "shard_3")
    assert (error.needed, error.found) == (12, 11)
    assert str(ManifestError.mismatch("", "x", "y", file="f")) == "f needs x, found y"


def test_read_error_says_where_and_how_much() -> None:
    error = ReadError(errno.EIO, "input/output error", "a.bin", offset=4096, needed=160, got=32)
    assert str(error) == "a.bin: needs 160 bytes at 4096, got 32: input/output error (errno 5)"
    assert (error.errno, error.filename) == (errno.EIO, "a.bin")
    bare = ReadError(errno.EIO, "input/output error")
    assert str(bare) == "input/output error (errno 5)"
    assert bare.filename is None


@pytest.mark.parametrize(
    "error",
    [
        ManifestError("m", file="f", tensor="t", needed=1, found=2),
        ReadError(errno.EIO, "s", "f", offset=1, needed=2, got=3),
        ReadError(errno.EIO, "s"),
        UnavailableError("u", probe="io_uring_setup", auto="pool"),
    ],
)
def test_errors_survive_pickling(error: RowstreamError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert copy.args == error.args


def test_shown_values_are_one_short_printable_line() -> None:
    deep: object = 0
    for _ in range(100_000):
        deep = [deep]
    for value in ("a\nb\x1b[31m\ud800", "é" * 1000, deep, list(range(1000)), 10**4000, "", None):
        text = shown(value)
        assert text.isascii()
        assert text.isprintable()
        assert 0 < len(text) <= 160
    assert shown("F8_E4M3") == "F8_E4M3"
    assert shown([1, 2]) == "[1, 2]"
