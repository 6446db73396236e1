"""Device profiles: what a real device gives, which ones are slow, and memory, which is none."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import checkpoints
import raw_tables
from made_up_devices import FOUND, NVME
from rowstream import ReadError, RowStore, UnavailableError, _core, profile, tables
from rowstream.block_device import device_of
from rowstream.depth_search import DEPTHS
from rowstream.profile import DeviceProfile, expectation, slowness

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
