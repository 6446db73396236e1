"""Runs the checks of every table of a checkpoint, each of them whatever the others found."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from rowstream import catalog
from rowstream.checkpoint import read_config
from rowstream.errors import ManifestError
from rowstream.manifest import Manifest
from rowstream.store import RowStore
from rowstream.verify import checks
from rowstream.verify.against import described_alike
from rowstream.verify.checksums import Checksums
from rowstream.verify.report import FAILED, Check, Report, TableReport
from rowstream.verify.rows import all_rows, open_ways, recipe_of, sample, sampled_rows
from rowstream.verify.second_hash import Constants, derive
from rowstream.verify.second_path import SecondPath

__all__ = ["verify"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Options:
    rows: int
    seed: int
    backends: Sequence[str]
    readers: Sequence[str]
    full: bool
    checksums: Mapping[str, Checksums] | None
    advance: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Place:
    """A table and where the second path looks for it: a folder, or the one file that was given."""

    manifest: Manifest
    path: Path

    @classmethod
    def all(cls, path: str | os.PathLike[str]) -> list[_Place]:
        file = Path(path) if os.path.isfile(path) else None
        return [cls(manifest, file or manifest.root) for manifest in catalog.tables(path)]


def verify(
    path: str | os.PathLike[str],
    *,
    table: str | None = None,
    against: str | os.PathLike[str] | None = None,
    rows: int = 4096,
    seed: int | None = None,
    backends: Sequence[str] = (),
    readers: Sequence[str] = (),
    full: bool = False,
    checksums: Mapping[str, Checksums] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Verify every table of a checkpoint, or the one named `table`.

    Reads `rows` random rows (and the first, the last and those at shard boundaries) through each of
    `backends` and `readers` (none: what "auto" chooses, and another) and a second way. `seed`
    chooses the rows; None is another one each time. `full` reads all rows once, in order, and
    compares them with `checksums` by table, where given; `progress` is then called with bytes done
    and bytes in all. `against` is a checkpoint that must hold the same rows. Raises ManifestError
    for a checkpoint that cannot be opened, UnavailableError for a backend that cannot run here,
    ValueError for an unknown table.
    """
    places = _Place.all(path)
    if table is not None:
        names = [place.manifest.name for place in places]
        if table not in names:
            raise ValueError(f"table needs one of {', '.join(names)}, got {table!r}")
        places = [places[names.index(table)]]
    others = None if against is None else _Place.all(against)
    total_bytes = sum(place.manifest.table_bytes for place in places)
    done_bytes = 0

    def advance(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        if progress is not None:
            progress(done_bytes, total_bytes)

    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    options = _Options(rows, seed, backends, readers, full, checksums, advance)
    return Report(
        os.fspath(path),
        None if against is None else os.fspath(against),
        seed,
        tuple(_Verification(place, options).run(others) for place in places),
    )


class _Verification:
    """One table, its checks so far, and what is open for them."""

    def __init__(self, place: _Place, options: _Options) -> None:
        self._place = place
        self._manifest = place.manifest
        self._options = options
        self._rng = np.random.default_rng(options.seed)
        self._checks: list[Check] = []
        self._checksums: Checksums | None = None
        self._derived: Constants | None = None

    def run(self, others: list[_Place] | None) -> TableReport:
        with ExitStack() as stack:
            second = self._attempt("second path", lambda: self._enter(stack, self._place))
            same_size = second is not None and self._describe(second)
            other = None if others is None else self._comparable(others)
            if second is not None and same_size:
                self._read(stack, second, other)
        self._add("identity", lambda: checks.identity("identity", self._manifest))
        if other is not None:
            name = "against identity"
            self._add(name, lambda: checks.identity(name, other.manifest))
        return TableReport(self._manifest.name, tuple(self._checks), self._checksums)

    def _comparable(self, others: list[_Place]) -> _Place | None:
        """Compare descriptions; return the other table if its rows mean the same."""
        names = [other.manifest.name for other in others]
        if self._manifest.name not in names:
            text = f"needs {self._manifest.name}, the other has {', '.join(names)}"
            self._checks.append(Check("against", FAILED, text))
            return None
        other = others[names.index(self._manifest.name)]
        found = described_alike(self._manifest, other.manifest)
        self._checks += found
        return None if found[0].status == FAILED else other

    def _describe(self, second: SecondPath) -> bool:
        """Compare all but rows; return whether both paths see a table of the same size."""
        manifest = self._manifest
        config = self._attempt("constants", lambda: read_config(manifest.root))
        derived = self._derived = None if config is None else derive(config, manifest.tensor)
        self._add("constants", lambda: checks.constants(manifest, second, derived))
        self._add("geometry", lambda: checks.geometry(manifest, second, derived))
        self._add("scale", lambda: checks.scale(manifest, second))
        return (second.num_rows, second.row_bytes) == (manifest.num_rows, manifest.row_bytes)

    def _read(self, stack: ExitStack, second: SecondPath, other: _Place | None) -> None:
        """Compare rows."""
        options, manifest, rng = self._options, self._manifest, self._rng
        stores = self._attempt(
            "rows", lambda: open_ways(stack, manifest, options.backends, options.readers)
        )
        if stores is None:
            return
        self._add("tokens", lambda: checks.tokens(stores, second, self._derived, rng))
        recipe = self._attempt("synth", lambda: recipe_of(manifest))
        first_rows = [shard.first_row for shard in second.shards]
        other_store = other_second = None
        if other is not None:
            first_rows += [e.first_row for plane in other.manifest.planes for e in plane.extents]
            other_store = self._attempt(
                "against rows", lambda: stack.enter_context(RowStore(other.manifest))
            )
        ids = sample(manifest.num_rows, first_rows, options.rows, rng)
        self._add("rows", lambda: sampled_rows(ids, second, stores, recipe, other_store))
        if not options.full:
            return
        if other is not None:
            other_second = self._attempt("against full", lambda: self._enter(stack, other))
        found = self._attempt(
            "full",
            lambda: all_rows(second, stores[0], recipe, other_second, rng, options.advance),
        )
        if found is not None:
            self._checksums, compared = found
            self._checks += compared
            if options.checksums is not None:
                self._checks.append(
                    checks.checksums(manifest.name, self._checksums, options.checksums)
                )

    def _enter(self, stack: ExitStack, place: _Place) -> SecondPath:
        return stack.enter_context(SecondPath(place.path, place.manifest.tensor))

    def _attempt(self, name: str, make: Callable[[], _T]) -> _T | None:
        """Return what `make` does, or None and a check that failed: a file cannot be read."""
        try:
            return make()
        except (ManifestError, OSError) as error:
            self._checks.append(Check(name, FAILED, " ".join(str(error).split())))
            return None

    def _add(self, name: str, check: Callable[[], Check | list[Check]]) -> None:
        found = self._attempt(name, check)
        if found is not None:
            self._checks += found if isinstance(found, list) else [found]
