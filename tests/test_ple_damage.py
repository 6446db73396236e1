"""Headers and configs with damage anywhere: the same table, or a refusal."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import FILE, TINY_CONFIG, write_config, write_tiny
from rowstream.catalog import tables
from rowstream.errors import ManifestError
from rowstream.manifest import Manifest


def _soundly(manifest: Manifest) -> tuple[object, ...]:
    return (
        manifest.planes,
        manifest.codec,
        manifest.scale,
        manifest.num_rows,
        manifest.hash,
        manifest.tensor,
    )


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_header_bytes_open_the_same_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    if not folder.exists():
        folder.mkdir()
    write_tiny(folder)
    (sound,) = tables(folder)
    path = folder / FILE
    content = bytearray(path.read_bytes())
    base = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, base - 1))
        length = data.draw(st.integers(0, 3))
        digits = st.sampled_from([b"0", b"9", b"1", b'"', b"{", b"}", b",", b"-", b"e"])
        content[at : at + length] = data.draw(digits | st.binary(max_size=3))
    path.write_bytes(content)
    try:
        (found,) = tables(folder)
    except ManifestError:
        return
    assert _soundly(found) == _soundly(sound)


_HOSTILE: list[Any] = [None, True, -1, 0, 1, 2**62, 2**63, 10**100, 1.5, 1e308, "", "x", [], {}]
_HOSTILE += [[2**62] * 9, [-1], [0, 0], [[[[]]]], {"dtype": "U8"}, "\ud800", "../x", "\x00"]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_hostile_values_in_a_header_open_the_same_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile"
    if not folder.exists():
        folder.mkdir()
    write_tiny(folder)
    (sound,) = tables(folder)
    path = folder / FILE
    content = path.read_bytes()
    base = 8 + struct.unpack("<Q", content[:8])[0]
    document = json.loads(content[8:base])
    node: Any = document
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(st.sampled_from(_HOSTILE))
    text = json.dumps(document, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[base:])
    try:
        (found,) = tables(folder)
    except ManifestError:
        return
    moved = len(text) + 8 - base  # the header has another length, so the data start elsewhere
    assert [extent.offset - moved for extent in found.planes[0].extents] == [
        extent.offset for extent in sound.planes[0].extents
    ]
    assert _soundly(found)[1:] == _soundly(sound)[1:]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_hostile_values_in_a_config_raise_manifest_errors_only(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "config"
    if not folder.exists():
        folder.mkdir()
        write_tiny(folder)
    fields = st.dictionaries(
        st.sampled_from(sorted(TINY_CONFIG)), st.sampled_from(_HOSTILE), max_size=3
    )
    changes = data.draw(fields)
    write_config(folder, **changes)
    with contextlib.suppress(ManifestError):
        tables(folder)
