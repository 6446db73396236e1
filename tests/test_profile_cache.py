"""What is kept of a profile, where, and whom it is given to."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

import checkpoints
from made_up_devices import FOUND
from rowstream import profile, tables
from rowstream.block_device import device_of
from rowstream.profile import DeviceProfile
from rowstream.profile_cache import cache_file, read_entry, write_entry


def test_kept_and_loaded_by_device(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.write_tiny(tmp_path)
    (manifest,) = tables(tmp_path)
    here = device_of(tmp_path)
    assert DeviceProfile.load(manifest) is None
    found = dataclasses.replace(FOUND, devices=(here,))
    assert found.keep()
    assert DeviceProfile.load(manifest) == DeviceProfile.load(tmp_path) == found
    assert DeviceProfile.load(manifest, "pool") is None
    assert FOUND.keep()  # another device's
    assert dataclasses.replace(found, reader="pool", queue_depth=16).keep()
    assert DeviceProfile.load(manifest) == found
    pool = DeviceProfile.load(manifest, "pool")
    assert pool is not None
    assert pool.queue_depth == 16
    monkeypatch.setattr("platform.node", lambda: "another machine, the same home")
    assert DeviceProfile.load(manifest) is None
    assert [path.name for path in cache.parent.iterdir()] == ["profiles.json"]


@pytest.mark.parametrize(
    "change",
    [{"conclusive": False}, {"from_device": False}, {"file_bytes": (16 << 20) - 1}],
)
def test_what_says_nothing_of_a_device_is_not_kept(cache: Path, change: dict[str, Any]) -> None:
    assert not dataclasses.replace(FOUND, **change).keep()
    assert not cache.exists()
    assert dataclasses.replace(FOUND, from_device=None).keep()


def entry() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(FOUND)))
    return found


def test_an_entry_comes_back_whole() -> None:
    assert profile._parsed(entry()) == FOUND


@pytest.mark.parametrize(
    "change",
    [
        {"queue_depth": 0},
        {"queue_depth": 4097},
        {"queue_depth": True},
        {"queue_depth": "64"},
        {"queue_depth": 64.0},
        {"block": -1},
        {"block": 513},
        {"devices": []},
        {"devices": [{"name": "sda"}]},
        {"devices": "sda"},
        {"depth_rates": []},
        {"depth_rates": [[16]]},
        {"depth_rates": [[16, "many"]]},
        {"depth_rates": None},
        {"p50_us": {}},
    ],
)
def test_an_entry_that_someone_else_wrote_is_nothing(change: dict[str, Any]) -> None:
    assert profile._parsed({**entry(), **change}) is None
    missing = entry()
    del missing[next(iter(change))]
    assert profile._parsed(missing) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"version": 1}',
        b'{"version": 1, "profiles": []}',
        b'{"version": 2, "profiles": {"a": {}}}',
        b"[" * 100_000,
        b'{"version": 1, "profiles": {}}' + b" " * (1 << 20),
    ],
)
def test_a_broken_cache_is_an_empty_one(cache: Path, text: bytes) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(text)
    assert read_entry("a") is None
    assert write_entry("a", {"b": 1})
    assert read_entry("a") == {"b": 1}


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert not FOUND.keep()
    assert read_entry("a") is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self")  # nobody writes there, not even root
    assert not FOUND.keep()


def test_a_cache_that_blocks_its_reader_is_an_empty_one(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    os.mkfifo(cache)
    assert read_entry("a") is None


def test_a_write_that_fails_leaves_what_was_there(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert write_entry("a", {"b": 1})

    def replace(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    assert not write_entry("a", {"b": 2})
    assert read_entry("a") == {"b": 1}
    assert [path.name for path in cache.parent.iterdir()] == ["profiles.json"]


def test_the_cache_does_not_grow_without_end(cache: Path) -> None:
    for number in range(260):
        assert write_entry(str(number), {})
    assert write_entry("100", {"again": 1})  # is the youngest now
    entries = json.loads(cache.read_text())["profiles"]
    assert len(entries) == 256
    assert "3" not in entries
    assert list(entries)[-1] == "100"


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_file() == tmp_path / ".cache/rowstream/profiles.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_file() == Path("/var/cache/rowstream/profiles.json")
