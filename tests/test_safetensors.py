from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import Array, write_file, write_header
from rowstream.errors import ManifestError
from rowstream.formats.safetensors import read_header
from rowstream.formats.tensor import Tensor


def _tensors(path: Path) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in read_header(path).tensors()}


def _entry(
    dtype: object = "U8", shape: object = (4,), span: object = (0, 4), **more: object
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span, **more}


@pytest.mark.parametrize("padding", [0, 1, 7, 4096])
@pytest.mark.parametrize("gap", [0, 3])
def test_tensors_lie_where_they_were_written(tmp_path: Path, padding: int, gap: int) -> None:
    path = tmp_path / "a.safetensors"
    arrays = [
        Array("codes", "F8_E4M3", (3, 5), bytes(range(15))),
        Array("empty", "F32", (0, 5), b""),
        Array("scalar", "F16", (), b"\x00\x3c"),
        Array("ids", "I64", (2,), struct.pack("<2q", -1, 2**62)),
    ]
    places = write_file(
        path, arrays, listed=[2, 0, 3, 1], padding=padding, gap=gap, metadata={"format": "pt"}
    )
    found = _tensors(path)
    assert set(found) == {"codes", "empty", "scalar", "ids"}
    for array in arrays:
        tensor = found[array.name]
        assert (tensor.dtype, tensor.shape) == (array.dtype, array.shape)
        assert (tensor.offset, tensor.num_bytes) == (places[array.name], len(array.data or b""))
        assert tensor.read() == array.data
    assert found["scalar"].num_values == 1
    assert found["empty"].num_values == 0


def test_packed_and_unknown_types_are_taken_at_their_offsets(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    document = {"x": _entry("F4", [3, 2], [0, 3]), "y": _entry("NEW", [9], [3, 4])}
    base = write_header(path, json.dumps(document).encode(), bytes(4))
    found = _tensors(path)
    assert (found["x"].offset, found["x"].num_bytes) == (base, 3)
    assert (found["y"].offset, found["y"].num_bytes) == (base + 3, 1)


def test_a_file_without_tensors_is_a_header_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_header(path, b"{}")
    assert _tensors(path) == {}
    write_header(path, b"{}", b"x")
    with pytest.raises(ManifestError, match="needs 10 bytes, found 11"):
        _tensors(path)


def test_a_marker_is_found_without_parsing(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_header(path, b'{"a.marker.b" but no JSON')
    header = read_header(path)
    assert header.mentions(b".marker.")
    assert not header.mentions(b".other.")
    with pytest.raises(ManifestError, match="needs a JSON object"):
        header.tensors()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "needs at least 8 bytes, found 0"),
        (b"\x02\0\0\0\0\0\0", "needs at least 8 bytes, found 7"),
        (b"\x02\0\0\0\0\0\0\0{", "header needs 2 bytes, file has 1"),
        (b"\0\0\0\0\0\0\0\0", "header needs 0 bytes"),
        (b"\xff" * 64, "header needs 18446744073709551615 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"version https://git-lf", "header needs"),
    ],
)
def test_files_too_short_for_their_header_are_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "model-1.safetensors"
    path.write_bytes(content)
    with pytest.raises(ManifestError, match=message) as caught:
        read_header(path)
    assert str(caught.value).startswith("model-1.safetensors")
    assert caught.value.file == "model-1.safetensors"


def test_a_header_over_the_limit_of_the_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(200_000_000)
    with pytest.raises(ManifestError, match="the limit is 100000000"):
        read_header(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[]", "starts with {"),
        (b" {}", "starts with {"),
        (b"\xef\xbb\xbf{}", "starts with {"),
        (b"{}x", "Extra data"),
        (b"{} {}", "Extra data"),
        (b'{"a": "\xff"}', "utf-8"),
        ('{"a":1}'.encode("utf-16-le"), "needs a JSON object"),
        (b"{" + b'"a":{' * 100_000, "recursion"),
        (b'{"a":' + b"[" * 100_000, "recursion"),
        (b'{"a":{"shape":[' + b"9" * 5000 + b"]}}", "digits"),
        (b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}', "finite numbers"),
        (b'{"a":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,0]}}', "finite numbers"),
        (b'{"a":{"dtype":"U8","shape":[1e999],"data_offsets":[0,0]}}', "a shape needs a list"),
        (b'{"a":1,"a":1}', "a twice"),
        (b'{"a":{"dtype":"U8","dtype":"U8"}}', "dtype twice"),
        (b'{"__metadata__":{},"__metadata__":{}}', "__metadata__ twice"),
        (b'{"__metadata__":{"a":1}}', "__metadata__ needs an object of strings"),
        (b'{"__metadata__":[]}', "__metadata__ needs an object of strings"),
        (b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", "a entry needs an object"),
    ],
)
def test_malformed_headers_are_refused(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "a.safetensors"
    write_header(path, text)
    with pytest.raises(ManifestError, match=message) as caught:
        _tensors(path)
    assert caught.value.file == "a.safetensors"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (None, "w entry needs an object"),
        ([], "w entry needs an object"),
        ({}, "w dtype needs a string, found None"),
        (_entry(dtype=1), "w dtype needs a string"),
        (_entry(shape=None), "w shape needs a list of sizes"),
        (_entry(shape=4), "w shape needs a list of sizes"),
        (_entry(shape="4"), "w shape needs a list of sizes"),
        (_entry(shape=[4.0]), "w shape needs a list of sizes"),
        (_entry(shape=[True, 4]), "w shape needs a list of sizes"),
        (_entry(shape=[-4]), "w shape needs a list of sizes"),
        (_entry(shape=[-2, -2]), "w shape needs a list of sizes"),
        (_entry(shape=[2**63]), "w shape needs a list of sizes"),
        (_entry(span=None), "w data_offsets needs a begin and an end"),
        (_entry(span=[0]), "w data_offsets needs a begin and an end"),
        (_entry(span=[0, 4, 8]), "w data_offsets needs a begin and an end"),
        (_entry(span=[False, 4]), "w data_offsets needs a begin and an end"),
        (_entry(span=[0.0, 4]), "w data_offsets needs a begin and an end"),
        (_entry(span=[-4, 0]), "w data_offsets needs a begin and an end"),
        (_entry(span=[4, 0]), "w data_offsets needs a begin and an end"),
        (_entry(span=[0, 10**400]), "w data_offsets needs a begin and an end"),
        (_entry(shape=[5]), r"w U8 \[5\] needs 5 bytes, found 4"),
        (_entry(dtype="I64"), r"w I64 \[4\] needs 32 bytes, found 4"),
        (_entry(shape=[2**62, 2**62]), "w U8 .* needs 9223372036854775807 bytes, found 4"),
        (_entry(shape=[2**62] * 10_000), "w U8 .* needs 9223372036854775807 bytes, found 4"),
        (_entry(shape=[]), r"w U8 \[\] needs 1 bytes, found 4"),
    ],
)
def test_malformed_entries_are_refused(tmp_path: Path, entry: Any, message: str) -> None:
    path = tmp_path / "a.safetensors"
    write_header(path, json.dumps({"w": entry}).encode(), bytes(4))
    with pytest.raises(ManifestError, match=message) as caught:
        _tensors(path)
    assert (caught.value.file, caught.value.tensor) == ("a.safetensors", "w")
    assert str(caught.value).startswith("a.safetensors: w ")


def test_a_truncated_file_says_what_it_needs_where_and_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    places = write_file(path, [Array("v", "U8", (4,)), Array("w", "U8", (8,))])
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1)
    message = f"a.safetensors: w needs 8 bytes at {places['w']}, file has {size - 1}"
    with pytest.raises(ManifestError) as caught:
        _tensors(path)
    assert str(caught.value) == message
    with path.open("r+b") as file:
        file.truncate(size + 1)
    with pytest.raises(ManifestError, match=f"a.safetensors needs {size} bytes, found {size + 1}"):
        _tensors(path)


def test_overlaps_are_refused_and_holes_are_not(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"

    def write(first: list[int], second: list[int], size: int = 8) -> None:
        document = {
            name: _entry("U8", [end - begin], [begin, end])
            for name, (begin, end) in (("v", first), ("w", second))
        }
        write_header(path, json.dumps(document).encode(), bytes(size))

    for first, second in (([0, 4], [3, 8]), ([2, 8], [0, 3]), ([0, 8], [2, 3]), ([0, 8], [0, 8])):
        write(first, second)
        with pytest.raises(ManifestError, match="data needs to start at"):
            _tensors(path)
    for first, second in (([0, 4], [4, 8]), ([6, 8], [0, 1]), ([1, 2], [7, 8]), ([4, 4], [0, 8])):
        write(first, second)
        assert len(_tensors(path)) == 2


def test_extra_keys_of_an_entry_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_header(path, json.dumps({"w": _entry(note=[1, {"a": 2}])}).encode(), bytes(4))
    assert _tensors(path)["w"].shape == (4,)


def test_a_tensor_of_a_file_changed_since_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_file(path, [Array("w", "U8", (4,), b"1234")])
    tensor = _tensors(path)["w"]
    assert tensor.read() == b"1234"
    write_file(path, [Array("w", "U8", (4,), b"1234")], padding=1)
    with pytest.raises(ManifestError, match="changed since"):
        tensor.read()


def test_a_large_header_with_a_key_twice_at_its_end_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    entry = json.dumps(_entry(shape=[0], span=[0, 0]))
    names = [*range(50_000), 49_999]
    write_header(path, ("{" + ",".join(f'"{name}":{entry}' for name in names) + "}").encode())
    with pytest.raises(ManifestError, match="49999 twice"):
        _tensors(path)


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-1, 9)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["F16", "U8", "dtype", "shape", "data_offsets"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(max_size=4) | st.sampled_from(["dtype", "shape", "data_offsets"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(_json | st.dictionaries(st.text(max_size=8), _json, max_size=4), st.binary(max_size=16))
@settings(deadline=None)
def test_no_json_raises_anything_but_a_manifest_error(
    tmp_path_factory: pytest.TempPathFactory, document: Any, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    write_header(path, json.dumps(document).encode(), data)
    try:
        tensors = read_header(path).tensors()
    except ManifestError:
        return
    assert all(tensor.offset + tensor.num_bytes <= path.stat().st_size for tensor in tensors)


@given(st.binary(max_size=64) | st.binary(max_size=48).map(lambda raw: b"\x20" + bytes(7) + raw))
@settings(deadline=None)
def test_no_bytes_raise_anything_but_a_manifest_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(content)
    try:
        tensors = read_header(path).tensors()
    except ManifestError:
        return
    assert tensors == []
