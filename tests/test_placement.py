"""What `auto` chooses, from figures of memory that tests give and a page cache that they fill."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from rowstream import placement, tables
from rowstream.machine import Memory
from rowstream.manifest import Manifest
from rowstream.store import RowStore
from rowstream.synth import write_checkpoint

GIB = 1 << 30


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    write_checkpoint(tmp_path / "checkpoint", base=2000)
    (found,) = tables(tmp_path / "checkpoint")
    monkeypatch.setattr(placement, "_LARGE_BYTES", 0)
    return found


def have(monkeypatch: pytest.MonkeyPatch, available: int, limit: int | None = None) -> None:
    monkeypatch.setattr(placement, "memory", lambda: Memory(available, limit))


def cache(manifest: Manifest, *, cached: bool) -> None:
    for file in manifest.files:
        with open(file.path, "rb") as opened:
            os.fsync(opened.fileno())
            if cached:
                opened.read()
            else:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_a_small_table_stays_on_disk(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_LARGE_BYTES", manifest.table_bytes + 1)
    have(monkeypatch, 1000 * GIB)
    assert placement.place(manifest)[0] == "disk"


def test_a_table_that_memory_can_hold_is_mapped(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache(manifest, cached=False)
    enough = manifest.table_bytes + 16 * GIB
    for available, limit, fits in [
        (enough + 1, None, True),
        (enough, None, False),
        (enough + 1, enough, False),
        (enough + 1, enough + 1, True),
    ]:
        have(monkeypatch, available, limit)
        chosen, reason = placement.place(manifest)
        start = "0.0 GiB of table and 16 GiB to spare"
        if fits:
            assert (chosen, reason) == ("mmap", f"{start} fit into 16.0 GiB of available memory")
        else:
            assert reason.startswith(f"{start} do not fit into 16.0 GiB of available memory")
    with RowStore(manifest) as store, RowStore(manifest, backend="disk") as disk:
        assert store.backend == "mmap"
        assert "fit into" in store.reason
        ids = np.arange(64).reshape(4, 16)
        assert np.array_equal(store.gather(ids), disk.gather(ids))


def test_a_table_that_is_cached_is_mapped(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, 0)
    cache(manifest, cached=True)
    chosen, reason = placement.place(manifest)
    assert chosen == "mmap"
    assert "but 100% of 512 of its blocks are cached" in reason
    cache(manifest, cached=False)
    chosen, reason = placement.place(manifest)
    if "100%" in reason:
        pytest.skip("this file system lets go of nothing")
    assert chosen == "disk"


def test_files_of_others_are_not_asked_for(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, 0)
    cache(manifest, cached=True)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert placement.place(manifest) == (
        "disk",
        "0.0 GiB of table and 16 GiB to spare do not fit into 0.0 GiB of available memory, "
        "and which of its blocks are cached cannot be asked",
    )


def test_a_reader_that_was_asked_for_means_disk(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, 1000 * GIB)
    with RowStore(manifest, reader="pool") as store:
        assert store.backend == "disk"
        assert "a reader was asked for" in store.reason
