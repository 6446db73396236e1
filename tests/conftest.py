"""Fixtures that several test modules share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from loops import OpenLoop
    from raw_tables import RawTable
    from rowstream import _core

# before torch is imported, and for child processes too: the threads of a tiny model mostly wait
# for each other, ten times as long when other processes use the same cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

# without it only what needs it is skipped
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # how long an example takes is the machine's business
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep device profiles out of the user's own cache, in child processes too."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def synth_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a loadable checkpoint with tokenizer and an FP8 table of 5 MB."""
    from rowstream.synth import write_checkpoint

    folder = tmp_path_factory.mktemp("synth") / "tiny-qwen"
    write_checkpoint(folder, base=2000)
    return folder


@pytest.fixture(scope="session")
def synth_model(synth_checkpoint: Path) -> Iterator[Any]:
    """Load the synthetic checkpoint with its table left on disk."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from rowstream.engines.transformers import close, load_model

    model = load_model(synth_checkpoint)
    yield model
    close(model)


@pytest.fixture(scope="session")
def synth_tokenizer(synth_checkpoint: Path) -> Any:
    """Load the synthetic checkpoint's tokenizer."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(synth_checkpoint)


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Path, NDArray[np.uint8]]:
    """A hand-written checkpoint and its table: 64 rows of 6 bytes."""
    import checkpoints

    return tmp_path, checkpoints.write_tiny(tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep a test's device profiles apart; return the file that they would be in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/rowstream/profiles.json"


# --- tables of random rows, and channels


@pytest.fixture
def rng() -> np.random.Generator:
    import numpy as np

    return np.random.default_rng()


@pytest.fixture
def raw(tmp_path: Path, rng: np.random.Generator) -> RawTable:
    import raw_tables

    return raw_tables.write(tmp_path, rng)


@pytest.fixture
def arena() -> _core.Arena:
    from rowstream import _core

    return _core.Arena(1 << 20)


@pytest.fixture
def open_loop(raw: RawTable) -> Iterator[OpenLoop]:
    """Open loops over the table, and close them in the end."""
    from rowstream import _core

    loops: list[_core.Loop] = []

    def open_one(kind: str = "uring-direct", faults: Any = (), **options: Any) -> _core.Loop:
        table = raw.open(kind, faults=list(faults)) if faults else raw.open(kind)
        loops.append(_core.Loop(table, [8, 8], **{"read_timeout_s": 60, **options}))
        return loops[-1]

    yield open_one
    for loop in loops:
        loop.close()
