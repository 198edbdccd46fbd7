"""``torch.plain.embedding``: gathers the requested rows in any layout and dequantizes only those."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contracts import EmbeddingRequest
from ..contracts.embedding import check_indices
from ..discovery.kernels import Packed
from ..formats.bits import raw
from .weights import NeutralKernel


class PlainEmbedding(NeutralKernel):
    """`embedding` in plain torch ops: int32 or int64 indices of any shape to ``(*indices.shape, D)``."""

    def __init__(self, request: EmbeddingRequest) -> None:
        super().__init__("torch.plain.embedding", request.weight, request.n, request.k)
        self.out_dtype = request.out_dtype

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None = None, **_runtime_params: Tensor) -> Tensor:
        """Look up rows. Raises `IndexError` on a CPU for an index outside 0..V-1; accelerators assert on the device."""
        del bias  # an embedding has none
        if torch.compiler.is_compiling():
            return self._gather(x, packed)
        try:
            return self._gather(x, packed)
        except (IndexError, RuntimeError):  # RuntimeError: the table has no rows
            check_indices(x, self.n)  # raises the error of the contract instead
            raise

    def _gather(self, x: Tensor, packed: Packed) -> Tensor:
        indices, zero = x.reshape(-1), packed.get("zero")
        data, scale = packed["data"].index_select(0, indices), packed["scale"]
        scale = raw(scale).index_select(1, indices).view(scale.dtype)
        zero = None if zero is None else zero.index_select(1, indices)
        rows = self.reader.restore_order(
            self.reader.dense(data, scale, zero, self.out_dtype, packed.get("global_scale"))
        )
        return rows.reshape(*x.shape, self.k).contiguous()  # of a ragged last group it has room for a whole one
