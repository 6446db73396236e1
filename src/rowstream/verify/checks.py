"""What is checked of one table besides its rows: constants, geometry, scale, tokens, identity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from rowstream.hashing import ngram_row_ids
from rowstream.manifest import FileIdentity, Manifest
from rowstream.store import RowStore
from rowstream.verify.checksums import Checksums
from rowstream.verify.report import SKIPPED, Check
from rowstream.verify.second_hash import Constants, token_rows
from rowstream.verify.second_path import SecondPath

__all__ = ["checksums", "constants", "geometry", "identity", "scale", "tokens"]

_RUNS: Final = 32
_RUN_TOKENS: Final = 8
_FIELDS: Final = (
    *("ngram_size", "heads_per_ngram", "vocab_size", "eos"),
    *("multipliers", "sizes", "offsets"),
)
_STORED_AS: Final = {
    "layer_multipliers": "multipliers",
    "ngram_heads_vocab_sizes": "sizes",
    "ngram_heads_offsets": "offsets",
}


def constants(manifest: Manifest, second: SecondPath, derived: Constants | None) -> Check:
    """Compare the hash constants in use with those derived anew and those stored."""
    name = "constants"
    used = manifest.hash
    if used is None or derived is None:
        return Check(name, SKIPPED, "no config.json: rows can be read, tokens cannot be hashed")
    for field in _FIELDS:
        problem = _unequal(field, getattr(derived, field), getattr(used, field))
        if problem is not None:
            return Check.of(name, f"{problem} (derived anew from config.json)", "")
    for buffer, field in _STORED_AS.items():
        if buffer in second.buffers:
            problem = _unequal(buffer, getattr(used, field), second.buffers[buffer])
            if problem is not None:
                return Check.of(name, problem, "")
    count = len(second.buffers)
    stored = (
        f"equal the {count} stored buffer{'' if count == 1 else 's'}"
        if count
        else "the checkpoint stores none to compare with"
    )
    return Check.of(name, None, f"{used.heads} heads, derived twice from config.json; {stored}")


def geometry(manifest: Manifest, second: SecondPath, derived: Constants | None) -> Check:
    """Compare where the rows lie with what a second look at the headers says."""
    (plane,) = manifest.planes
    problem = (
        _unequal("rows", second.num_rows, manifest.num_rows)
        or _unequal("row bytes", second.row_bytes, manifest.row_bytes)
        or _unequal("row values", second.row_values, manifest.row_values)
        or _unequal("shards", len(second.shards), len(plane.extents))
    )
    if problem is None and derived is not None:
        problem = _unequal("rows by config.json", derived.num_rows, second.num_rows) or _unequal(
            "row values by config.json", derived.row_values, second.row_values
        )
    if problem is None:
        for number, (shard, extent) in enumerate(zip(second.shards, plane.extents, strict=True)):
            place = (shard.path.name, shard.offset, shard.first_row, shard.num_rows)
            file = manifest.files[extent.file].path.name
            found = (file, extent.offset, extent.first_row, extent.num_rows)
            if place != found:
                problem = (
                    f"shard {number} needs file, offset, first row and rows {place}, found {found}"
                )
                break
    return Check.of(
        "geometry",
        problem,
        f"{len(second.shards)} shards in {second.num_files} files hold {second.num_rows:,} rows"
        f" of {second.row_bytes} bytes; file lengths are exact",
    )


def scale(manifest: Manifest, second: SecondPath) -> Check:
    """Compare the scale of an FP8 table with the stored one."""
    stored = second.scale
    if stored is None and manifest.scale is None:
        return Check("scale", SKIPPED, f"{manifest.codec} has none")
    problem = _unequal("scale", stored, manifest.scale)
    if problem is None and not (stored is not None and math.isfinite(stored) and stored > 0):
        problem = f"scale needs to be finite and positive, found {stored}"
    return Check.of("scale", problem, f"{stored}: finite and positive")


def tokens(
    stores: Sequence[RowStore],
    second: SecondPath,
    derived: Constants | None,
    rng: np.random.Generator,
) -> Check:
    """Hash random windows in three ways and compare the rows of their tokens."""
    name = "tokens"
    used = stores[0].manifest.hash
    if used is None or derived is None:
        return Check(name, SKIPPED, "no config.json: rows can be read, tokens cannot be hashed")
    reach = derived.ngram_size - 1
    runs = []
    expected = []
    for number in range(_RUNS):
        ids = rng.integers(derived.vocab_size, size=reach + _RUN_TOKENS)
        ids[rng.random(len(ids)) < 1 / 8] = derived.eos  # n-grams stop there
        ids[-2:] = 0, derived.vocab_size - 1
        context = ids[:reach] if number else None
        new = ids[reach:]
        history = [derived.eos] * reach if context is None else context.tolist()
        scalar = []
        for token in new.tolist():
            history.append(token)
            scalar.append(token_rows(derived, history))
        for way, rows in (
            ("the native hash", stores[0].row_ids(context, new)),
            ("the NumPy hash", ngram_row_ids(used, context, new)),
        ):
            if rows.tolist() != scalar:
                token, head = np.argwhere(rows != np.array(scalar))[0].tolist()
                return Check.of(
                    name,
                    f"{way} gives row {rows[token, head]} for token {new[token]}, head {head},"
                    f" the scalar one {scalar[token][head]}",
                    "",
                )
        runs.append((context, new))
        expected += scalar
    needed = second.rows(expected).reshape(len(expected), -1, second.row_bytes)
    for store in stores:
        if not np.array_equal(store.gather_tokens(runs), needed):
            return Check.of(name, f"{way_of(store)} gives other bytes for the same tokens", "")
    return Check.of(
        name,
        None,
        f"{len(expected)} tokens: native, NumPy and scalar hash give the same rows,"
        f" and their {needed.shape[0] * needed.shape[1]:,} rows the same bytes",
    )


def checksums(name: str, found: Checksums, known: Mapping[str, Checksums]) -> Check:
    """Compare the checksums of a table with those of another time."""
    problem = f"{name} is not among those known" if name not in known else None
    return Check.of(
        "checksums", problem or found.difference(known[name]), "equal to those of the file"
    )


def identity(name: str, manifest: Manifest) -> Check:
    """Check that no file has changed since its header was read."""
    problem = None
    for file in manifest.files:
        found = FileIdentity.of(file.path)
        if found != file.identity:
            problem = f"{file.path.name} has changed since verification began"
            break
    count = len(manifest.files)
    files = "file has" if count == 1 else "files have"
    return Check.of(name, problem, f"{count} {files} not changed meanwhile")


def way_of(store: RowStore) -> str:
    """Return the backend of a store and its reader, in a word."""
    reader = store.stats()["reader"]
    return store.backend if reader is None else f"{store.backend}/{reader}"


def _unequal(what: str, needed: Any, found: Any) -> str | None:
    if needed == found:
        return None
    if isinstance(needed, tuple) and isinstance(found, tuple) and len(needed) == len(found):
        at = next(i for i, (a, b) in enumerate(zip(needed, found, strict=True)) if a != b)
        return f"{what}[{at}] needs {needed[at]}, found {found[at]}"
    return f"{what} needs {needed}, found {found}"
