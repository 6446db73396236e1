"""Which rows a token needs: one module for each family of tables, and the list of families."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rowstream.families import ple
from rowstream.formats.tensor import Tensor
from rowstream.manifest import Manifest

__all__ = ["FAMILIES", "Family"]

Build = Callable[[Iterable[Tensor], "dict[str, Any] | None", Path, str], "list[Manifest]"]


@dataclass(frozen=True, slots=True)
class Family:
    """How the tables of a family are found in a checkpoint and described."""

    name: str
    marker: bytes  # in the name of every tensor that belongs to a table
    pattern: str  # how such a name reads, for people
    manifests: Build
    role: Callable[[str], str | None]  # of a tensor, by name: "rows", "constant", None for others


FAMILIES = (Family(ple.FAMILY, ple.MARKER, ple.PATTERN, ple.manifests, ple.role),)
