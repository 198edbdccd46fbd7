"""`VocabParallelEmbedding`: a quantized table whose rows are spread over the ranks."""

# ruff: noqa: SLF001 - made from layers of qcore.nn, whose store and dtype they take

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contracts.embedding import check_indices
from ..errors import UnsupportedError
from ..formats.bits import has_values
from ..nn.base import adopt
from ..nn.embedding import QuantizedEmbedding
from ..nn.parts import mark_part
from ..nn.scaled_embedding import QuantizedScaledEmbedding
from ..resolving.binding import WeightStore
from ..weights.schemes import Scheme
from .cutting import Share, cut_rows, shares
from .ranks import Ranks


class VocabParallelEmbedding(QuantizedEmbedding):
    """The rows ``start .. stop`` of a table ``(V, D)``: each rank looks up its own rows, and the results are summed.

    ``indices``: of the whole table, the same on every rank; result: ``(*indices.shape, D)``, equal on every rank and to
    one device's, because all but one of the summands are 0. One all_reduce.
    """

    ranks: Ranks
    share: Share

    @classmethod
    def from_embedding(
        cls, layer: QuantizedEmbedding, *, group: Any = None, unit: int = 1, ranks: Ranks | None = None
    ) -> VocabParallelEmbedding:
        """Cut a whole `QuantizedEmbedding`, which is left unchanged; arguments as for `ColumnParallelLinear`."""
        if isinstance(layer, cls) or len(layer._store.users) > 1:
            raise UnsupportedError("the embedding is cut already, or shares its table with a layer: leave it whole.")
        if isinstance(layer, QuantizedScaledEmbedding):
            raise UnsupportedError("the embedding multiplies its rows by a number: leave it whole.")
        ranks = ranks or Ranks(group)
        share = shares(layer.num_embeddings, ranks.size, unit, what="rows")[ranks.rank]
        made = cls._made(WeightStore(cut_rows(layer._store.neutral(), share)), layer.scheme, layer, ranks, share)
        adopt(made, layer)
        return made

    @classmethod
    def _made(
        cls, store: WeightStore, scheme: Scheme, like: QuantizedEmbedding, ranks: Ranks, share: Share
    ) -> VocabParallelEmbedding:
        made = cls.__new__(cls)
        object.__setattr__(made, "ranks", ranks)
        object.__setattr__(made, "share", share)
        made.__init__(store, scheme, like._dtype, like.padding_idx)  # type: ignore[misc]
        mark_part(made, ranks.rank, ranks.size)
        return made

    def _remade(self, store: WeightStore, scheme: Scheme) -> VocabParallelEmbedding:
        """Make the same part of another table."""
        return self._made(store, scheme, self, self.ranks, self.share)

    def forward(self, indices: Tensor) -> Tensor:
        """Look up rows of the whole table. On a CPU, an index out of range raises `IndexError`."""
        if not torch.compiler.is_compiling() and indices.device.type == "cpu" and has_values(indices):
            check_indices(indices, self.share.total)
        own = (indices >= self.share.start) & (indices < self.share.stop)
        rows = super().forward(torch.where(own, indices - self.share.start, 0))
        return self.ranks.sum(torch.where(own.unsqueeze(-1), rows, 0))
