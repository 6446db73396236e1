"""Writes a synthetic checkpoint: plans its files, has them filled, publishes them at the end.

Table files are written with direct I/O where the file system has it, under a temporary name until
every byte is on the device; config.json comes last. What a failed or interrupted run has written is
removed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rowstream.synth.config import (
    base_for,
    constants_for,
    generation_config,
    model_config,
    padded_rows,
)
from rowstream.synth.files import Publication, write_tables
from rowstream.synth.layout import FilePlan, check_layout, plan_files, shard_tensors
from rowstream.synth.model import dense_tensors
from rowstream.synth.stream import (
    GENERATOR,
    ROW_VALUES,
    check_dtype,
    check_seed,
    row_bytes,
    table_rows,
)
from rowstream.synth.tokenizer import tokenizer_config, tokenizer_json

RECIPE_FILE: Final = "synth.json"

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What synth.json holds: all that is needed to recompute any row."""

    generator: str
    seed: int
    dtype: str
    layout: str
    sparse: bool
    base: int
    num_rows: int
    row_bytes: int
    table_bytes: int

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Recipe:
        """Read a checkpoint's recipe. Raises OSError; ValueError for another generator's."""
        stored = json.loads((Path(folder) / RECIPE_FILE).read_text(encoding="utf-8"))
        found = stored.get("generator") if isinstance(stored, dict) else None
        if found != GENERATOR:
            raise ValueError(f"{RECIPE_FILE}: generator needs {GENERATOR!r}, got {found!r}")
        return cls(**stored)

    def rows(self, row_ids: ArrayLike) -> NDArray[np.uint8]:
        """Recompute rows as the files hold them: uint8 [..., row_bytes], zeroes if sparse."""
        rows = table_rows(self.seed, self.dtype, row_ids)
        return np.zeros_like(rows) if self.sparse else rows


@dataclass(frozen=True, slots=True)
class Summary:
    """What was written; `total_bytes` is the length of all files, `written_bytes` without holes."""

    folder: Path
    recipe: Recipe
    num_files: int
    total_bytes: int
    written_bytes: int
    elapsed_s: float


def write_checkpoint(
    folder: str | os.PathLike[str],
    *,
    table_gib: float = 1.0,
    dtype: str = "fp8",
    layout: str = "qwen",
    sparse: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
    base: int | None = None,
) -> Summary:
    """Write a loadable qwen4_exp checkpoint with a table of about `table_gib` GiB.

    `folder` must be new or empty. `dtype` is `fp8` or `bf16`, `layout` `qwen` or `radixark`.
    `sparse` leaves holes in place of the table's bytes. `base` sets the config's
    `ngram_vocab_size_base` (about a sixteenth of the rows) instead of `table_gib`. `progress` is
    called with bytes done and bytes in all. Raises FileExistsError if the folder holds anything,
    OSError if a write fails; nothing stays behind then.
    """
    started = time.perf_counter()
    check_seed(seed)
    check_dtype(dtype)
    check_layout(layout)
    base = base_for(table_gib, dtype) if base is None else base
    constants = constants_for(base)
    num_rows = padded_rows(constants)
    recipe = Recipe(
        generator=GENERATOR,
        seed=seed,
        dtype=dtype,
        layout=layout,
        sparse=sparse,
        base=base,
        num_rows=num_rows,
        row_bytes=row_bytes(dtype),
        table_bytes=num_rows * row_bytes(dtype),
    )
    dense = dense_tensors(seed, dtype, constants)
    plans = plan_files(layout, dense, shard_tensors(num_rows, ROW_VALUES, dtype))
    config = model_config(base, dtype, layout, (t.name for t in dense if len(t.shape) == 2))
    with Publication(Path(folder)) as publication:
        written = write_tables(publication, plans, seed, dtype, sparse=sparse, progress=progress)
        texts = {
            "model.safetensors.index.json": _index(plans),
            "tokenizer.json": tokenizer_json(),
            "tokenizer_config.json": tokenizer_config(),
            "generation_config.json": generation_config(),
            RECIPE_FILE: asdict(recipe),
            "config.json": config,
        }
        for name, content in texts.items():
            written += publication.add_text(name, _json(content))
        publication.commit()
    return Summary(
        folder=Path(folder),
        recipe=recipe,
        num_files=len(plans) + len(texts),
        total_bytes=written + (recipe.table_bytes if sparse else 0),
        written_bytes=written,
        elapsed_s=time.perf_counter() - started,
    )


def _index(plans: list[FilePlan]) -> dict[str, Any]:
    places = {tensor.name: plan.name for plan in plans for tensor in plan.tensors}
    total = sum(plan.tensor_bytes for plan in plans)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
