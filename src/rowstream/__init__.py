"""Row streaming for embedding tables that are larger than memory.

The table stays in the checkpoint; `RowStore` reads the rows that are asked for. Needs NumPy alone.
"""

from rowstream.catalog import tables
from rowstream.errors import ManifestError, ReadError, RowstreamError, UnavailableError
from rowstream.manifest import Manifest
from rowstream.store import RowStore

__all__ = [
    "Manifest",
    "ManifestError",
    "ReadError",
    "RowStore",
    "RowstreamError",
    "UnavailableError",
    "__version__",
    "tables",
]
__version__ = "0.1.0"
