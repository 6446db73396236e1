"""Synthetic qwen4_exp checkpoints: real names, layouts and table geometry, a tiny model.

Every row of the table can be recomputed without the file. NumPy is all that writing needs.
"""

from __future__ import annotations

from rowstream.synth.layout import LAYOUTS
from rowstream.synth.stream import DTYPES, row_bytes, table_rows
from rowstream.synth.write import Recipe, Summary, write_checkpoint

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "Recipe",
    "Summary",
    "row_bytes",
    "table_rows",
    "write_checkpoint",
]
