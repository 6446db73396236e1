"""Whether two tables are described alike, wherever their rows lie. Reads no row."""

from __future__ import annotations

from rowstream.manifest import Manifest
from rowstream.verify.report import FAILED, OK, SKIPPED, Check

__all__ = ["described_alike"]

_FIELDS = (
    *("ngram_size", "heads_per_ngram", "vocab_size", "eos"),
    *("multipliers", "sizes", "offsets"),
)


def described_alike(manifest: Manifest, other: Manifest) -> list[Check]:
    """Compare all but the rows.

    Where rows are of another size or type and cannot be compared, the first check fails and is the
    only one.
    """
    problem = None
    for what, ours, theirs in (
        ("codec", manifest.codec, other.codec),
        ("rows", manifest.num_rows, other.num_rows),
        ("values a row", manifest.row_values, other.row_values),
    ):
        if ours != theirs:
            problem = f"{what} needs {ours}, the other has {theirs}"
            if what == "codec":
                problem += ": different codecs hold different bytes, rows are not compared"
            break
    geometry = Check.of(
        "against geometry",
        problem,
        f"{other.num_rows:,} rows of {other.row_values} values, {other.codec}, in both",
    )
    if problem is not None:
        return [geometry]
    return [geometry, _scale(manifest, other), _hash(manifest, other)]


def _scale(manifest: Manifest, other: Manifest) -> Check:
    name = "against scale"
    if manifest.scale == other.scale:
        return Check(name, OK, "none in both" if other.scale is None else f"{other.scale} in both")
    return Check(name, FAILED, f"needs {manifest.scale}, the other has {other.scale}")


def _hash(manifest: Manifest, other: Manifest) -> Check:
    name = "against hash"
    if manifest.hash is None or other.hash is None:
        where = manifest if manifest.hash is None else other
        return Check(name, SKIPPED, f"{where.root} has no config.json to compare")
    for field in _FIELDS:
        ours, theirs = getattr(manifest.hash, field), getattr(other.hash, field)
        if ours != theirs:
            return Check(name, FAILED, f"{field} needs {ours}, the other has {theirs}")
    return Check(name, OK, f"the constants of {manifest.heads} heads are equal")
