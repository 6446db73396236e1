"""Fixtures that several test modules share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
