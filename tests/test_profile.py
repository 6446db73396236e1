"""Device profiles: what is chosen from given rates, what is kept, and what a real device gives."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import checkpoints
import raw_tables
from rowstream import ReadError, RowStore, UnavailableError, _core, depth_search, profile, tables
from rowstream.block_device import BlockDevice, device_of
from rowstream.depth_search import DEPTHS, search
from rowstream.profile import DeviceProfile, expectation, slowness
from rowstream.profile_cache import cache_file, read_entry, write_entry

NVME = BlockDevice("ext4", "/", "nvme0n1p2", "259:2", "Fast 1", "nvme", False)
FOUND = DeviceProfile(
    devices=(NVME,),
    reader="uring",
    queue_depth=64,
    block=512,
    conclusive=True,
    depth_rates=((16, 50_000.0), (64, 100_000.0)),
    block_rates=((512, 100_000.0), (4096, 99_000.0)),
    p50_us=300.0,
    from_device=True,
    file_bytes=1 << 30,
    measured_at="2026-01-02T03:04:05+00:00",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/rowstream/profiles.json"


# --- the choice, on devices made of arithmetic


class Device:
    """A clock, and tables that take as long as a device of given rates would."""

    def __init__(self, rate: Callable[[int, int], float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.rate = rate
        self.now = 0.0
        self.closed: list[tuple[int, int]] = []
        self.opened: list[tuple[int, int]] = []
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(depth_search, "time", clock)

    def open(self, depth: int, block: int) -> Any:
        self.opened.append((depth, block))
        return Table(self, depth, block)


class Table:
    num_rows = 1000

    def __init__(self, device: Device, depth: int, block: int) -> None:
        self.device, self.depth, self.block = device, depth, block
        self.done = 0

    def gather(self, ids: Any, groups: Any, out: Any) -> None:
        assert ids.shape == (len(ids), 1)
        assert out.shape == (len(ids), 1, self.block)
        assert 0 <= ids.min() <= ids.max() < self.num_rows
        self.done += len(ids)
        self.device.now += len(ids) / self.device.rate(self.depth, self.block)

    def counters(self) -> dict[str, int]:
        return {"reads": self.done}

    def close(self) -> None:
        self.device.closed.append((self.depth, self.block))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Device]]:
    made: list[Device] = []

    def make(rate: Callable[[int, int], float]) -> Device:
        made.append(Device(rate, monkeypatch))
        return made[-1]

    yield make
    for one in made:
        assert sorted(one.closed) == sorted(one.opened)


@pytest.mark.parametrize(
    ("best_at", "chosen"), [(16, 16), (40, 64), (64, 64), (256, 256), (512, 512)]
)
def test_the_smallest_depth_that_is_as_good_as_the_best(
    device: Callable[..., Device], best_at: int, chosen: int
) -> None:
    made = device(lambda depth, block: 1000.0 * min(depth, best_at))
    found = search(made.open, (512,), 0.25)
    assert (found.queue_depth, found.block) == (chosen, 512)
    assert found.reads_per_s == pytest.approx(1000.0 * best_at, rel=0.01)
    assert found.p50_us == pytest.approx(16e6 / (1000.0 * min(16, best_at)))


@pytest.mark.parametrize(("gain", "chosen"), [(1.02, 64), (1.04, 128)])
def test_three_percent_are_not_worth_twice_the_depth(
    device: Callable[..., Device], gain: float, chosen: int
) -> None:
    made = device(lambda depth, block: 1e5 * min(depth, 64) / 64 * (gain if depth > 64 else 1.0))
    assert search(made.open, (512,), 0.25).queue_depth == chosen


def test_depths_that_the_kernel_does_not_queue_are_not_tried(device: Callable[..., Device]) -> None:
    made = device(lambda depth, block: 1000.0 * depth)
    found = search(made.open, (512,), 0.25, most_depth=100)
    assert found.queue_depth == 64
    assert max(depth for depth, _ in made.opened) == 64


def test_a_measurement_that_something_disturbed_decides_nothing(
    device: Callable[..., Device],
) -> None:
    made = device(lambda depth, block: 60_000.0 if depth == 16 else 40_000.0)
    found = search(made.open, (512, 4096), 0.25)
    assert (found.queue_depth, found.block) == (None, 512)
    assert dict(found.depth_rates)[16] == pytest.approx(60_000)


def test_of_several_turns_the_best_counts(device: Callable[..., Device]) -> None:
    turns = dict.fromkeys(DEPTHS, 0)

    def rate(depth: int, block: int) -> float:
        turns[depth] += 1
        slowed = depth == 64 and turns[depth] != 2  # but for one turn something else reads
        return 500.0 * min(depth, 64) * (0.4 if slowed else 1.0)

    assert search(device(rate).open, (512,), 0.25).queue_depth == 64


@pytest.mark.parametrize(
    ("larger", "block"), [(0.9, 512), (1.0, 512), (1.02, 512), (1.05, 4096), (2.0, 4096)]
)
def test_a_larger_block_has_to_be_faster(
    device: Callable[..., Device], larger: float, block: int
) -> None:
    made = device(lambda depth, size: 1000.0 * min(depth, 64) * (larger if size == 4096 else 1))
    found = search(made.open, (512, 4096), 0.25)
    assert (found.queue_depth, found.block) == (64, block)
    assert {size for size, _ in found.block_rates} == {512, 4096}


@pytest.mark.parametrize("rate", [100.0, 3_000.0, 20_000.0, 100_000.0, 2e6])
def test_the_budget_is_kept(device: Callable[..., Device], rate: float) -> None:
    made = device(lambda depth, block: rate * min(depth, 64) / 64)
    search(made.open, (512, 4096), 0.25)
    # a device too slow for its 16 reads takes what those take
    assert made.now <= max(0.3, 1.01 * 16 / (rate / 4))


def test_a_disk_of_a_hundred_reads_a_second_decides_nothing(device: Callable[..., Device]) -> None:
    made = device(lambda depth, block: 100.0)
    found = search(made.open, (512, 4096), 0.25)
    assert found.queue_depth is None
    assert [depth for depth, _ in found.depth_rates] == [16]
    assert found.reads_per_s == pytest.approx(100)


# --- measured


def test_this_machine_s_device(synth_checkpoint: Path) -> None:
    (manifest,) = tables(synth_checkpoint)
    began = time.perf_counter()
    found = DeviceProfile.measure(manifest)
    assert time.perf_counter() - began < 60  # 0.25 s, but 16 reads of a busy disk have to end
    assert found.queue_depth in (*DEPTHS, 128)
    assert found.reader in ("uring", "pool", "inline")
    assert found.block in (0, 512, 1024, 2048, 4096)
    assert found.p50_us > 0
    assert all(rate > 0 for _, rate in (*found.depth_rates, *found.block_rates))
    assert 4 << 20 < found.file_bytes <= manifest.table_bytes
    with RowStore(manifest, profile=found) as store:
        assert store.stats()["queue_depth"] == found.queue_depth


def test_only_the_table_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a table of two shards between other tensors; what is opened lies within its rows
    width = 512
    table = checkpoints.table_bytes(64, width)
    checkpoints.write_config(tmp_path, ple_embed_dim=width * 4, hidden_size=width * 4)
    other = checkpoints.Array("a", "U8", (5000,), bytes(5000))
    arrays = [other, checkpoints.scale(), *checkpoints.shards(table, [32, 32])]
    places = checkpoints.write_file(tmp_path / "model.safetensors", arrays, gap=3)
    (manifest,) = tables(tmp_path)
    found = DeviceProfile.measure(manifest, 0.05)
    spans = [(places[a.name], places[a.name] + a.num_bytes) for a in arrays if "shard" in a.name]
    for block in (512, 4096):
        size, extents = profile._blocks(manifest)[1](block)
        assert size == block
        for _, offset, _, count in extents:
            assert offset % block == 0
            assert any(low <= offset and offset + count * block <= high for low, high in spans)
    assert found.file_bytes <= 64 * width


def test_any_file_will_do_that_has_a_block(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(1 << 20))
    found = DeviceProfile.measure(file, 0.05)
    assert found.file_bytes == 1 << 20
    file.write_bytes(bytes(4095))
    with pytest.raises(UnavailableError, match="needs a block of 4096 bytes"):
        DeviceProfile.measure(file, 0.05)


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    checkpoints.write_tiny(tmp_path)
    (manifest,) = tables(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises((ReadError, FileNotFoundError)):
        DeviceProfile.measure(manifest)


def test_opening_measures_nothing(tmp_path: Path, cache: Path) -> None:
    checkpoints.write_tiny(tmp_path)
    with RowStore.open(tmp_path) as store:
        assert store.stats()["reads"] == 0
        assert store.stats()["queue_depth"] == 128
    assert not cache.exists()


def test_a_depth_that_is_given_wins_over_the_profile(tmp_path: Path) -> None:
    table = checkpoints.write_tiny(tmp_path)
    with RowStore.open(tmp_path, profile=FOUND) as store:
        assert store.stats()["queue_depth"] == 64
        assert np.array_equal(store.gather([5, 6]), table[[5, 6]])
    with RowStore.open(tmp_path, profile=FOUND, queue_depth=9) as store:
        assert store.stats()["queue_depth"] == 9


def test_the_profile_s_block_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    raw = raw_tables.write(tmp_path, rng, shard_rows=(40_000,))
    usual = raw.open("uring-direct")
    assert isinstance(usual, _core.DiskTable)
    if usual.files()[0].alignment != 512:
        pytest.skip("no file system with direct reads of 512 bytes")
    ids = rng.permutation(raw.num_rows)[:500, None]
    for block, alignment in [(512, 512), (4096, 4096), (1, 512), (8192, 8192)]:
        table = raw.open("uring-direct", block=block)
        assert isinstance(table, _core.DiskTable)
        assert table.files()[0].alignment == alignment
        assert np.array_equal(raw_tables.gather(table, ids), raw.expected(ids))
        assert table.counters()["read_bytes"] % alignment == 0
    buffered = raw.open("uring-buffered", block=4096)
    assert isinstance(buffered, _core.DiskTable)
    assert buffered.files()[0].alignment == 1
    for block in (3, 131_072):
        with pytest.raises(ValueError, match=f"block is {block}, needs to be 0 or a power of two"):
            raw.open("uring-direct", block=block)
    checkpoints.write_tiny(tmp_path)
    with RowStore.open(tmp_path, profile=dataclasses.replace(FOUND, block=4096)) as store:
        store.gather([0, 63])
        assert store.stats()["read_bytes"] == 4096


# --- kept


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


# --- slow devices


@pytest.mark.parametrize(
    ("kind", "rate", "word"),
    [
        ("nvme", 10_000.0, None),
        ("nvme", 9_999.0, "9,999 random reads/s at depth 64, 10,000 wanted"),
        ("nvme", None, None),
        ("rotating", 50_000.0, "nvme0n1p2 is a rotating disk"),
        ("network", None, "ext4 is a network or shared file system"),
        ("memory", 9_999.0, None),
        ("virtual", 9_999.0, "9,999 random"),
    ],
)
def test_slowness(kind: str, rate: float | None, word: str | None) -> None:
    found = slowness(dataclasses.replace(NVME, kind=kind), 64, rate)
    assert found == word or (word is not None and found is not None and found.startswith(word))


def test_of_several_devices_one_slow_one_is_named() -> None:
    assert FOUND.slow is None
    disk = dataclasses.replace(NVME, kind="rotating", name="sda")
    assert dataclasses.replace(FOUND, devices=(NVME, disk)).slow == "sda is a rotating disk"
    slow = dataclasses.replace(FOUND, depth_rates=((16, 400.0), (64, 900.0)))
    assert slow.slow == "900 random reads/s at depth 64, 10,000 wanted"


def test_what_to_expect_of_a_slow_device() -> None:
    text = expectation(100_000.0, 160.0, 16)
    assert "about 100.0 ms of reading for each token and 100.0 s for a prompt of 1,000" in text
    assert "200.0 ms of reading" in expectation(100_000.0, 160.0, 32)
    assert expectation(None, None, 16).startswith("move the checkpoint")


def test_serve_names_a_slow_device_once(
    synth_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    cache: Path,
) -> None:
    server = pytest.importorskip("rowstream.serve.server")
    slow = dataclasses.replace(FOUND, depth_rates=((16, 400.0), (64, 800.0)), p50_us=20_000.0)
    asked: list[str] = []

    def measure(cls: object, manifest: object, *, reader: str) -> DeviceProfile:
        asked.append(reader)
        return slow

    monkeypatch.setattr(DeviceProfile, "measure", classmethod(measure))
    with caplog.at_level(logging.WARNING):
        assert server._profile(str(synth_checkpoint), [], "auto", "pool") == slow
    (record,) = caplog.records
    assert "slow device: 800 random reads/s at depth 64" in record.getMessage()
    assert "20.0 ms of reading for each token and 20.0 s for a prompt" in record.getMessage()
    out = capsys.readouterr().out
    assert out == (
        "device nvme0n1p2: 800 random reads/s, 16 at once in 20,000 us; queue depth 64,"
        " blocks of 512 bytes\n"
    )
    assert asked == ["pool"]
    assert cache.exists()
    for backend, reader in [("mmap", "auto"), ("pinned", "auto"), ("disk", "inline")]:
        assert server._profile(str(synth_checkpoint), [], backend, reader) is None
    assert server._profile(str(synth_checkpoint / "absent"), [], "auto", "auto") is None
    # reads that never reached the device say nothing of it
    slow = dataclasses.replace(FOUND, from_device=False)
    assert server._profile(str(synth_checkpoint), [], "auto", "auto") is None
    assert len(asked) == 2


# --- memory has no device


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    folder = Path("/dev/shm") / f"rowstream-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("no /dev/shm to write to")
    if device_of(folder).file_system != "tmpfs":
        folder.rmdir()
        pytest.skip("/dev/shm is no tmpfs")
    yield folder
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def test_tmpfs_is_read_by_the_caller_and_row_by_row(in_memory: Path) -> None:
    rng = np.random.default_rng()
    raw = raw_tables.write(in_memory, rng)
    table = raw.open("auto-direct")
    assert isinstance(table, _core.DiskTable)
    assert (table.reader, table.reader_note) == ("inline", "the table is on tmpfs")
    for file in table.files():
        assert (file.direct, file.alignment) == (False, 1)
        assert file.note == "tmpfs has no device to read directly from"
    # too far apart to be read at once
    ids = rng.permutation(np.arange(0, raw.num_rows, 30))[:, None]
    assert np.array_equal(raw_tables.gather(table, ids), raw.expected(ids))
    counters = table.counters()
    assert (counters["reads"], counters["read_bytes"]) == (len(ids), len(ids) * 160)
    for kind in ("uring-direct", "pool-direct"):
        assert np.array_equal(raw_tables.gather(raw.open(kind), ids), raw.expected(ids))


def test_a_profile_of_memory_is_not_kept(in_memory: Path, cache: Path) -> None:
    file = in_memory / "file"
    file.write_bytes(bytes(17 << 20))
    found = DeviceProfile.measure(file, 0.05)
    assert (found.reader, found.block, found.slow) == ("inline", 0, None)
    assert found.devices[0].kind == "memory"
    assert not found.keep()
