"""Where a checkpoint lies, and its config.json."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from checkpoints import write_tiny
from rowstream.catalog import tables
from rowstream.checkpoint import locate, open_regular, read_config
from rowstream.errors import ManifestError

HUB_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME")


# where a checkpoint lies


def _write_hub(hub: Path, repository: str, revision: str = "0a1b2c") -> Path:
    folder = hub / repository
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision + "\n")
    return snapshot


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for variable in HUB_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def test_a_folder_and_a_file_in_it_are_the_folder(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").touch()
    assert locate(tmp_path) == tmp_path
    assert locate(str(tmp_path)) == tmp_path
    assert locate(tmp_path / "x.safetensors") == tmp_path


@pytest.mark.parametrize(
    ("variable", "value", "hub"),
    [
        ("HF_HUB_CACHE", "h", "h"),
        ("HUGGINGFACE_HUB_CACHE", "h", "h"),
        ("HF_HOME", "h", "h/hub"),
        ("XDG_CACHE_HOME", "h", "h/huggingface/hub"),
        ("HOME", "h", "h/.cache/huggingface/hub"),
    ],
)
def test_an_id_is_found_in_the_local_hub_cache(
    no_hub: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, hub: str
) -> None:
    monkeypatch.setenv(variable, str(no_hub / value))
    snapshot = _write_hub(no_hub / hub, "models--Qwen--Qwen3.8-Flash-Next-FP8")
    assert locate("Qwen/Qwen3.8-Flash-Next-FP8") == snapshot
    plain = _write_hub(no_hub / hub, "models--gpt2")
    assert locate("gpt2") == plain


def test_a_folder_wins_over_an_id(no_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(no_hub / "hub"))
    _write_hub(no_hub / "hub", "models--a--b")
    (no_hub / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(no_hub)
    assert locate("a/b") == Path("a/b")


@pytest.mark.parametrize(
    "name", ["", "a/b", "a/b/c", "../hub", "a/..", "/no/such/folder", "a\0b", "\ud800", "a/b@main"]
)
def test_what_is_nowhere_is_said_to_be_nowhere(
    no_hub: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(no_hub)
    if name:
        with pytest.raises(ManifestError, match="found nothing"):
            locate(name)
    else:
        assert locate(name) == Path()


def test_a_cache_without_the_snapshot_is_no_checkpoint(
    no_hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(no_hub))
    snapshot = _write_hub(no_hub, "models--a--b")
    for content in ("../../secret", "", "123\n456", "\xff"):
        (snapshot.parent.parent / "refs" / "main").write_text(content)
        with pytest.raises(ManifestError, match="found nothing"):
            locate("a/b")


def test_a_snapshot_of_links_is_opened_with_its_config(
    no_hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(no_hub))
    snapshot = _write_hub(no_hub, "models--a--b")
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    write_tiny(blobs)
    for name in ("config.json", "model.safetensors"):
        (blobs / name).rename(blobs / f"blob-{name}")
        (snapshot / name).symlink_to(f"../../blobs/blob-{name}")
    (manifest,) = tables("a/b")
    assert manifest.root == snapshot
    assert manifest.hash is not None
    assert manifest.files[0].path == snapshot / "model.safetensors"
    assert manifest.files[0].identity.inode == (blobs / "blob-model.safetensors").stat().st_ino


# config.json and other files


def test_the_config_is_an_object_or_absent(tmp_path: Path) -> None:
    assert read_config(tmp_path) is None
    path = tmp_path / "config.json"
    path.write_text('{"a": NaN}')
    config = read_config(tmp_path)
    assert config is not None
    assert list(config) == ["a"]
    for content in (b"", b"[1]", b"{", b"\xff\xfe{\0}\0", b'{"a":' * 100_000, b"9" * 5000):
        path.write_bytes(content)
        with pytest.raises(ManifestError, match=r"^config.json needs a JSON object, found "):
            read_config(tmp_path)
    with path.open("wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(ManifestError, match="16000000 bytes at most, found 100000001"):
        read_config(tmp_path)


def test_a_config_that_is_a_broken_link_is_not_an_absent_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("gone")
    with pytest.raises(ManifestError, match=r"config.json needs a file, found nothing"):
        read_config(tmp_path)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ManifestError, match="needs a regular file"):
            open_regular(path)
    for path in (tmp_path / "none", tmp_path / "pipe" / "none"):
        with pytest.raises(ManifestError, match="needs a file, found nothing"):
            open_regular(path)
