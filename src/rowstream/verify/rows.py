"""Rows of one table, sampled or all of them, read in several ways and compared byte for byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rowstream.errors import ManifestError
from rowstream.manifest import Manifest
from rowstream.store import RowStore
from rowstream.synth import Recipe
from rowstream.synth.stream import TableStream
from rowstream.synth.write import RECIPE_FILE
from rowstream.verify.checks import way_of
from rowstream.verify.checksums import Checksums
from rowstream.verify.comparison import Comparison
from rowstream.verify.report import OK, WARNING, Check
from rowstream.verify.second_path import SecondPath

__all__ = ["all_rows", "open_ways", "recipe_of", "sample", "sampled_rows"]

_BATCH_ROWS: Final = 1 << 16
_GATHER_ALL_BYTES: Final = 32 << 20  # of a larger table the store gathers a share in a full pass
_GATHER_SHARE: Final = 64
_SECOND: Final = "the second path"


def open_ways(
    stack: ExitStack, manifest: Manifest, backends: Sequence[str], readers: Sequence[str]
) -> list[RowStore]:
    """Open the table in every way asked for; else as "auto" does and in one other way.

    Raises UnavailableError where one cannot run here.
    """

    def add(backend: str, reader: str) -> None:
        store = stack.enter_context(RowStore(manifest, backend=backend, reader=reader))
        if way_of(store) in map(way_of, stores):
            store.close()
        else:
            stores.append(store)

    stores: list[RowStore] = []
    if backends or readers:
        for backend in backends or ("auto",):
            for reader in readers or ("auto",):
                add(backend, reader)
    else:
        add("auto", "auto")
        # not mmap where there is a choice: a file cut short would end the process, unreported
        add(*(("mmap", "auto") if way_of(stores[0]) == "disk/pool" else ("disk", "pool")))
    return stores


def sample(
    num_rows: int, first_rows: Sequence[int], count: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return the first row, the last, those at both sides of `first_rows`, and random ones.

    int64, each once, in random order.
    """
    if count >= num_rows:
        return rng.permutation(num_rows).astype(np.int64)
    first = np.array(first_rows, np.int64)
    borders = np.concatenate((first, first - 1, [0, num_rows - 1]))
    ids = np.concatenate((borders, rng.integers(num_rows, size=count)))
    return rng.permutation(np.unique(ids[(ids >= 0) & (ids < num_rows)]))


def recipe_of(manifest: Manifest) -> Recipe | None:
    """Return how the table was made, if `synth` made it. Raises ManifestError, OSError."""
    if not os.path.isfile(manifest.root / RECIPE_FILE):
        return None
    try:
        recipe = Recipe.read(manifest.root)
        row_bytes = recipe.rows([0]).shape[1]
    except (TypeError, ValueError) as error:
        raise ManifestError.mismatch(
            "", "the recipe of a table", str(error), file=RECIPE_FILE
        ) from error
    found, needed = (recipe.num_rows, row_bytes), (manifest.num_rows, manifest.row_bytes)
    if found != needed:
        raise ManifestError.mismatch("rows and row bytes", needed, found, file=RECIPE_FILE)
    return recipe


def sampled_rows(
    ids: NDArray[np.int64],
    second: SecondPath,
    stores: Sequence[RowStore],
    recipe: Recipe | None,
    other: RowStore | None,
) -> list[Check]:
    """Compare rows with what every store gathers, the recipe computes and `other` holds."""
    ways: list[tuple[Callable[[NDArray[np.int64]], NDArray[np.uint8]], Comparison]] = [
        (store.gather, Comparison(f"rows {way_of(store)}", "the store", _SECOND))
        for store in stores
    ]
    if recipe is not None:
        ways.append((recipe.rows, Comparison("rows synth", f"seed {recipe.seed}", "the file")))
    if other is not None:
        ways.append((other.gather, Comparison("against rows", "the other", "this one")))
    values = 0
    affected = 0
    for start in range(0, len(ids), _BATCH_ROWS):
        batch = ids[start : start + _BATCH_ROWS]
        needed = second.rows(batch)
        for gather, comparison in ways:
            comparison.add(batch, gather(batch), needed)
        not_finite = second.not_finite(needed)
        values += int(not_finite.sum())
        affected += int(np.count_nonzero(not_finite))
    kind = "NaN codes" if second.dtype == "F8_E4M3" else "values that are not finite"
    found = f"{values:,} {kind} in {affected:,} of" if values else f"no {kind} in"
    return [
        *(comparison.check() for _, comparison in ways),
        Check("values", WARNING if values else OK, f"{found} {len(ids):,} rows"),
    ]


def all_rows(
    second: SecondPath,
    store: RowStore,
    recipe: Recipe | None,
    other: SecondPath | None,
    rng: np.random.Generator,
    progress: Callable[[int], None],
) -> tuple[Checksums, list[Check]]:
    """Read the whole table once, in order, and compare it with the same as `sampled_rows` does.

    The store gathers a share of a large table, in runs of neighboring rows.
    """
    gathered = Comparison(f"full {way_of(store)}", "the store", _SECOND)
    whole = Comparison("full synth", "" if recipe is None else f"seed {recipe.seed}", "the file")
    against = Comparison("against full", "the other", "this one")
    stream = None if recipe is None or recipe.sparse else TableStream(recipe.seed, recipe.dtype)
    share = 1 if second.num_rows * second.row_bytes <= _GATHER_ALL_BYTES else _GATHER_SHARE

    def look(first_row: int, rows: NDArray[np.uint8]) -> None:
        count = max(1, len(rows) // share)
        skip = int(rng.integers(len(rows) - count + 1))
        ids = np.arange(first_row + skip, first_row + skip + count)
        gathered.add(ids, store.gather(ids[:, None])[:, 0], rows[skip : skip + count])
        if recipe is not None:
            expected = np.zeros_like(rows)
            if stream is not None:
                stream.fill(first_row * second.row_bytes, expected.reshape(-1))
            whole.add(range(first_row, first_row + len(rows)), expected, rows)
        if other is not None:
            ours = range(first_row, first_row + len(rows))
            against.add(ours, other.span(first_row, len(rows)), rows)

    checksums = Checksums.of(second, look, progress)
    checks = [Check("full", OK, f"{second.num_rows:,} rows, sha256 {checksums.table}")]
    checks.append(gathered.check())
    if recipe is not None:
        checks.append(whole.check())
    if other is not None:
        checks.append(against.check())
    return checksums, checks
