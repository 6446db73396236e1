from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from rowstream.errors import ManifestError
from rowstream.manifest import Extent, FileIdentity, Manifest, Plane, TableFile


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    path = tmp_path / "table.bin"
    path.write_bytes(bytes(3 + 10 * 4))
    return Manifest(
        name="layers.1.ple",
        tensor="layers.1.ple.ple_embedding.ngram_embedding",
        layer=1,
        family="ple",
        format="safetensors",
        root=tmp_path,
        codec="bf16",
        scale=None,
        num_rows=10,
        row_values=2,
        heads=4,
        groups=(2, 2),
        planes=(Plane("codes", 4, (Extent(0, 3, 0, 6), Extent(0, 27, 6, 4))),),
        files=(TableFile(path, FileIdentity.of(path)),),
        hash=None,
    )


def test_sizes_add_up_over_planes(manifest: Manifest) -> None:
    assert (manifest.row_bytes, manifest.table_bytes) == (4, 40)
    scales = Plane("scales", 1, (Extent(0, 0, 0, 10),))
    wider = replace(manifest, planes=(*manifest.planes, scales))
    assert (wider.row_bytes, wider.table_bytes) == (5, 50)


@pytest.mark.parametrize(
    "extents",
    [
        (Extent(0, 3, 0, 6),),  # the last rows missing
        (Extent(0, 3, 0, 6), Extent(0, 27, 7, 3)),  # a gap
        (Extent(0, 3, 0, 6), Extent(0, 23, 5, 5)),  # a row twice
        (Extent(0, 27, 6, 4), Extent(0, 3, 0, 6)),  # out of order
        (Extent(0, 3, 0, 0), Extent(0, 3, 0, 10)),  # an empty extent
        (Extent(0, 4, 0, 10),),  # one byte over the end of the file
        (Extent(0, -1, 0, 10),),
        (Extent(1, 3, 0, 10),),  # no such file
        (),
    ],
)
def test_every_row_lies_once_and_inside_its_file(
    manifest: Manifest, extents: tuple[Extent, ...]
) -> None:
    with pytest.raises(ManifestError):
        replace(manifest, planes=(Plane("codes", 4, extents),))


def test_heads_are_those_of_the_groups(manifest: Manifest) -> None:
    with pytest.raises(ManifestError, match="heads needs 4, found 3"):
        replace(manifest, groups=(2, 1))


def test_identity_follows_links_and_sees_a_changed_file(tmp_path: Path) -> None:
    path, link = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"12")
    link.symlink_to(path)
    identity = FileIdentity.of(path)
    assert identity == FileIdentity.of(link)
    assert identity.size == 2
    with path.open("rb") as file:
        assert FileIdentity.of(file.fileno()) == identity
    os.utime(path, ns=(1, 2))
    assert FileIdentity.of(path) != identity
