"""`StreamedEmbedding`: the torch module that stands where a model's n-gram `nn.Embedding` stood.

Owns the way from row ids on any device to values in the model's dtype. Which rows a token needs is
the model's business, where they come from the store's.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch

from rowstream.device.dequantize import CODES
from rowstream.device.lookup import Lookup, LookupOptions
from rowstream.store import RowStore


class StreamedEmbedding(torch.nn.Module):
    """Look rows up in a `RowStore` as an `nn.Embedding` would in its weight.

    Holds no parameter and no buffer: nothing to load, save, move or count. `.to()`, `.half()` and
    their like change the dtype of the values as they would change an `nn.Embedding`'s. A copy made
    by `copy.deepcopy` shares the store; pickling is refused.

    On a GPU the lookup is a part of the stream, and of a graph that is captured from it: see
    `lookup` for its start and finish apart, for warming up and for what went wrong.
    """

    def __init__(
        self,
        store: RowStore,
        dtype: torch.dtype | None = None,
        options: LookupOptions | None = None,
    ) -> None:
        super().__init__()
        manifest = store.manifest
        self.store = store
        self.lookup = Lookup(store, options)
        # called after each lookup with its tokens and the seconds that the model waited for them
        self.observe: Callable[[int, float], None] | None = None
        self.num_embeddings = manifest.num_rows
        self.embedding_dim = manifest.row_values
        self._codes = CODES[manifest.codec]
        # Always there, so that it also carries the dtype. On the CPU by name: transformers builds
        # models under torch.device("meta").
        self._scale = torch.tensor(
            [1.0 if manifest.scale is None else manifest.scale],
            dtype=torch.get_default_dtype() if dtype is None else dtype,
            device="cpu",
        )
        self._weight = self._stub()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self._scale.dtype

    @property
    def weight(self) -> torch.Tensor:
        """A tensor on the meta device with the table's shape, for code that asks for either."""
        return self._weight

    def forward(self, ids: torch.Tensor, live: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values of rows `ids` [..., heads] as [..., heads, row_values], on ids' device.

        A last axis of the table's head count lets the store plan one n-gram's rows together.
        `live`, int32 on a GPU, says how many tokens count; the others are zeroes. Raises IndexError
        for an id outside the table: on a GPU at a later call, and the values are NaN until then.
        """
        if ids.is_cuda and ids.ndim > 0 and ids.shape[-1] == self.store.heads:
            shape = (*ids.shape, self.embedding_dim)
            out = torch.empty(shape, dtype=self.dtype, device=ids.device)
            self.lookup(ids, out, live)
            return out
        gathered: torch.Tensor = self._gather(ids)
        return gathered

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _gather(self, ids: torch.Tensor) -> torch.Tensor:
        wanted = ids.detach().to("cpu", torch.int64).contiguous()
        # Fresh memory for each call: torch may read it, or a view of it, after the next gather.
        rows = torch.empty((*wanted.shape, self.store.row_bytes), dtype=torch.uint8, device="cpu")
        began_s = time.perf_counter()
        self.store.gather(wanted.numpy(), out=rows.numpy())
        if self.observe is not None:
            self.observe(wanted.numel() // self.store.heads, time.perf_counter() - began_s)
        # Codes travel, not values: an FP8 row has half the bytes.
        codes = rows.view(self._codes).to(ids.device)
        if self.store.manifest.scale is None:
            return codes.to(self.dtype)
        if self.lookup.options.rounding == "f32":
            return (codes.to(torch.float32) * self.store.manifest.scale).to(self.dtype)
        if self._scale.device != ids.device:
            self._scale = self._scale.to(ids.device)
        return codes.to(self.dtype) * self._scale

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, backend={self.store.backend}"

    def _stub(self) -> torch.Tensor:
        shape = (self.num_embeddings, self.embedding_dim)
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # There is no parameter, buffer or child that the inherited one would have to visit.
        # The dtype and device that `fn` gives, never its values: to_empty() has none.
        moved = fn(self._scale)
        self._scale = self._scale.to("cpu" if moved.is_meta else moved.device, moved.dtype)
        self._weight = self._stub()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamedEmbedding:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        memo[id(self.store)] = self.store
        memo[id(self.lookup)] = self.lookup
        memo[id(self.observe)] = self.observe
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self.store.manifest.name}: a streamed table cannot be pickled, its rows are in open "
            "files; save the state_dict, or load the checkpoint again where it is needed"
        )
