"""Checkpoints that are broken, hostile or half there, through the command line: one line, status 1,
no traceback, at once.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpoints import FILE, INDEX, write_index, write_tiny
from children import unmeasured
from fuzz import fuzz_checkpoint
from hostile_files import HEADERS, NAME, NAMES, linked
from hostile_tables import CONFIGS, TABLES
from looks import PAUSE_S
from rowstream import ManifestError, ReadError, RowStore, tables
from rowstream.cli import main

Capture = pytest.CaptureFixture[str]


def refusal(capsys: Capture, path: Path) -> str:
    """The one line that `inspect` has to say."""
    began = time.process_time()
    status = main(["inspect", os.fspath(path)])
    spent = time.process_time() - began
    out, err = capsys.readouterr()
    assert (status, out) == (1, "")
    assert spent < 2
    assert err.startswith("rowstream: error: ")
    assert err.endswith("\n")
    assert err[:-1].isprintable()
    assert err.isascii()
    assert len(err) < 1000
    return err[len("rowstream: error: ") : -1]


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_headers(case: str, tmp_path: Path, capsys: Capture) -> None:
    write, message = HEADERS[case]
    write(tmp_path)
    for path in (tmp_path, tmp_path / FILE):
        assert re.search(message, refusal(capsys, path))
    (tmp_path / "config.json").unlink(missing_ok=True)
    if case not in ("another width", "more rows", "one axis"):
        refusal(capsys, tmp_path)


def test_every_truncation_is_refused(tmp_path: Path, capsys: Capture) -> None:
    write_tiny(tmp_path)
    content = (tmp_path / FILE).read_bytes()
    cuts = [*range(0, 40), *range(40, len(content), 37), *range(len(content) - 9, len(content))]
    for cut in cuts:
        (tmp_path / FILE).write_bytes(content[:cut])
        assert refusal(capsys, tmp_path).startswith(
            (FILE, f"{tmp_path} needs tensors like") if cut < len(content) else FILE
        )


@pytest.mark.parametrize("case", TABLES)
def test_tables_that_do_not_fit_together(case: str, tmp_path: Path, capsys: Capture) -> None:
    write, message = TABLES[case]
    write(tmp_path)
    assert re.search(message, refusal(capsys, tmp_path))


@pytest.mark.parametrize("case", CONFIGS)
def test_nonsense_configs(case: str, tmp_path: Path, capsys: Capture) -> None:
    write, message = CONFIGS[case]
    write(tmp_path)
    assert re.search(message, refusal(capsys, tmp_path))


@pytest.mark.parametrize("case", NAMES)
def test_names_and_kinds_of_file(case: str, tmp_path: Path, capsys: Capture) -> None:
    write, message = NAMES[case]
    write(tmp_path)
    assert re.search(message, refusal(capsys, tmp_path))


def test_an_index_without_a_size_is_an_empty_one(tmp_path: Path, capsys: Capture) -> None:
    # reading it to its end would take hours
    linked(INDEX, "/proc/self/pagemap")(tmp_path)
    assert main(["inspect", os.fspath(tmp_path)]) == 0
    assert "layers.1.ple" in capsys.readouterr().out


def test_a_link_out_of_the_folder_is_followed(tmp_path: Path, capsys: Capture) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write_tiny(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../blobs/{path.name}")
    write_index(snapshot, {f"{NAME}.shard_0.weight": FILE})
    assert main(["inspect", os.fspath(snapshot)]) == 0
    assert "layers.1.ple" in capsys.readouterr().out


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("drops root to see what an ordinary user sees")
    write_tiny(tmp_path)
    (tmp_path / FILE).chmod(0)
    for folder in (tmp_path, *tmp_path.parents):
        folder.chmod(folder.stat().st_mode | 0o055)
    # once as root: what is imported late may lie where an ordinary user cannot read
    script = (
        "import contextlib, os, sys; from rowstream.cli import main;"
        " contextlib.redirect_stdout(open(os.devnull, 'w')).__enter__();"
        " main(sys.argv[1:]); os.setuid(65534); sys.exit(main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", script, "inspect", os.fspath(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=unmeasured())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"rowstream: error: {tmp_path / FILE}: permission denied\n"


# --- files that change


@pytest.mark.parametrize("backend", ["disk", "mmap", "pinned"])
def test_a_file_that_changed_between_header_and_opening(backend: str, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (manifest,) = tables(tmp_path)
    os.utime(tmp_path / FILE, ns=(1, 1))
    with pytest.raises(ManifestError, match=f"^{FILE}: identity needs"):
        RowStore(manifest, backend=backend)
    (manifest,) = tables(tmp_path)
    os.truncate(tmp_path / FILE, (tmp_path / FILE).stat().st_size - 1)
    with pytest.raises((ManifestError, ValueError), match=FILE):
        RowStore(manifest, backend=backend)


@pytest.mark.parametrize("backend", ["disk", "mmap"])
def test_a_file_that_changes_after_opening(backend: str, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    with RowStore.open(tmp_path, backend=backend) as store:
        store.gather([1])
        os.utime(tmp_path / FILE, ns=(1, 1))
        time.sleep(PAUSE_S)
        with pytest.raises(ReadError, match="file changed since it was opened"):
            store.gather([1])


# --- the fuzzer's harness, so that it does not rot where atheris is not installed


def test_seeds_of_the_fuzzer_and_some_thousand_changes(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "work").mkdir()
    seeds = fuzz_checkpoint.seeds(tmp_path / "scratch")
    rng = random.Random(os.urandom(8))

    def bend(data: bytes, max_size: int) -> bytes:
        bent = bytearray(data or b"x")
        for _ in range(rng.randint(1, 4)):
            word = rng.choice(fuzz_checkpoint.WORDS).encode()
            at = rng.randrange(len(bent))
            bent[at : at + rng.choice([0, 0, 1, len(word)])] = word
        return bytes(bent[:max_size])

    ended: dict[str, int] = {}
    for _ in range(600):
        data = rng.choice(seeds)
        for _ in range(rng.randint(0, 2)):
            data = fuzz_checkpoint.mutate(data, 8192, rng.getrandbits(32), bend)
        try:
            fuzz_checkpoint.unpack(data, tmp_path / "work")
            how = fuzz_checkpoint.check(tmp_path / "work")
        except Exception as error:
            pytest.fail(f"{error!r} of {data!r}")
        ended[how] = ended.get(how, 0) + 1
    assert ended["tables"] > 20
    assert ended["ManifestError"] > 20
