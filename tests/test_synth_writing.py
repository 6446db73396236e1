"""How a synthetic checkpoint is written: the same every time, whole or not at all, of any size."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rowstream.synth import Recipe, files, write_checkpoint

BASE = 700


def test_same_seed_same_files(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(tmp_path / name, base=50, seed=seed)
    same = [p.name for p in (tmp_path / "a").iterdir()]
    assert len(same) == 43
    for name in same:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    other = "model-00001-of-00037.safetensors"
    assert (tmp_path / "a" / other).read_bytes() != (tmp_path / "c" / other).read_bytes()


def test_several_chunks_and_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CHUNK_BYTES", 64 * 1024)
    seen: list[tuple[int, int]] = []
    write_checkpoint(
        tmp_path / "a", base=BASE, layout="radixark", progress=lambda d, t: seen.append((d, t))
    )
    monkeypatch.undo()
    write_checkpoint(tmp_path / "b", base=BASE, layout="radixark")
    for path in (tmp_path / "b").iterdir():
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_table_gib_sets_the_size(tmp_path: Path) -> None:
    for dtype in ("fp8", "bf16"):
        summary = write_checkpoint(tmp_path / dtype, table_gib=0.75, dtype=dtype, sparse=True)
        assert summary.recipe.table_bytes == pytest.approx(0.75 * 2**30, rel=0.001)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="table_gib needs"):
            write_checkpoint(tmp_path / "bad", table_gib=bad)
    with pytest.raises(ValueError, match="layout needs one of qwen, radixark, got 'mlx'"):
        write_checkpoint(tmp_path / "bad", layout="mlx")
    assert not (tmp_path / "bad").exists()


def test_sparse_leaves_holes_and_everything_else_in_place(tmp_path: Path) -> None:
    summary = write_checkpoint(tmp_path / "s", base=200_000, layout="radixark", sparse=True)
    whole = write_checkpoint(tmp_path / "w", base=BASE, layout="radixark")
    paths = list((tmp_path / "s").iterdir())
    assert summary.total_bytes == sum(p.stat().st_size for p in paths)
    assert summary.total_bytes - summary.written_bytes == summary.recipe.table_bytes
    assert whole.total_bytes == whole.written_bytes
    assert sum(p.stat().st_blocks * 512 for p in paths) < summary.recipe.table_bytes // 10
    last = tmp_path / "s" / "model-plefp8-00009.safetensors"
    assert last.read_bytes()[-2:] == b"\x51\x39"  # the scale behind the hole
    recipe = Recipe.read(tmp_path / "s")
    assert recipe.sparse
    assert not recipe.rows([0, recipe.num_rows - 1]).any()


def test_refuses_a_folder_with_anything_in_it(tmp_path: Path) -> None:
    (tmp_path / "keep").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty") as error:
        write_checkpoint(tmp_path, base=BASE)
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["keep"]
    (tmp_path / "keep").unlink()
    write_checkpoint(tmp_path, base=50)
    assert (tmp_path / "config.json").exists()


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
def test_full_device_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool, sparse: bool
) -> None:
    folder = tmp_path / "deep" / "model"
    if existing:
        folder.mkdir(parents=True)
    pwrite, calls = os.pwrite, 0

    def full(fd: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(folder, base=BASE, sparse=sparse)
    assert folder.exists() == existing
    assert not existing or not list(folder.iterdir())
    assert (tmp_path / "deep").exists() == existing
    assert not [t for t in threading.enumerate() if t.name.startswith("rowstream-synth")]


def test_interrupt_leaves_nothing_and_no_table_appears_before_the_end(tmp_path: Path) -> None:
    names: list[str] = []

    def interrupt(_done: int, _total: int) -> None:
        names.extend(p.name for p in (tmp_path / "m").iterdir())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "m", base=BASE, progress=interrupt)
    assert not (tmp_path / "m").exists()
    assert len(names) == 37
    assert all(name.endswith(".part") for name in names)


def test_too_little_space_is_said_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage(_path: Path) -> Any:
        return type("usage", (), {"free": 1000})

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(OSError, match=r"needs \d+ bytes, 1000 free") as error:
        write_checkpoint(tmp_path / "m", base=BASE)
    assert error.value.errno == errno.ENOSPC
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("refuse_at", ["open", "write"])
def test_file_systems_without_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse_at: str
) -> None:
    import fcntl

    write_checkpoint(tmp_path / "direct", base=BASE)
    pwrite, opened = os.pwrite, os.open
    refused = 0

    def direct(flags: int) -> bool:
        return bool(flags & getattr(os, "O_DIRECT", 0))

    def refuse() -> None:
        nonlocal refused
        refused += 1
        raise OSError(errno.EINVAL, "no direct writes here")

    def write(fd: int, data: memoryview, offset: int) -> int:
        if direct(fcntl.fcntl(fd, fcntl.F_GETFL)):
            refuse()
        return pwrite(fd, memoryview(data)[:1000], offset)  # and short ones

    def open_file(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        fd = opened(path, flags, *rest, **named)
        if direct(flags):
            os.close(fd)
            refuse()
        return fd

    substitute: Callable[..., int] = write if refuse_at == "write" else open_file
    monkeypatch.setattr(os, "pwrite" if refuse_at == "write" else "open", substitute)
    write_checkpoint(tmp_path / "buffered", base=BASE)
    monkeypatch.undo()
    assert refused or not hasattr(os, "O_DIRECT")
    for path in (tmp_path / "direct").iterdir():
        assert path.read_bytes() == (tmp_path / "buffered" / path.name).read_bytes()
