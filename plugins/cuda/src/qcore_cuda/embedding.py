"""The kernel of the contract ``embedding``: ``cuda.embedding``."""

from __future__ import annotations

import torch
from torch import Tensor

from qcore import EmbeddingRequest
from qcore.plugin_api import Packed, runs_now
from qcore_triton.packing import PackedKernel, has_half

from . import ops


class CudaEmbedding(PackedKernel):
    """Gathers rows and dequantizes only those; packs like `FloatLinear`, so tied layers share one copy.

    An index out of range triggers a device-side assertion, as in torch.
    """

    def __init__(self, request: EmbeddingRequest) -> None:
        half = request.out_dtype == torch.float16 and has_half(request.weight)
        super().__init__("cuda.embedding", request.weight, request.n, request.k, half=half)
        self.out_dtype = request.out_dtype

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None = None, **_given: Tensor) -> Tensor:
        """Indices x, int32 or int64 of any shape, to ``(*x.shape, D)``."""
        del bias  # an embedding has none
        call = ops.embedding if runs_now(x) else ops.op_embedding
        parts = packed["data"], packed["scale"], packed.get("zero"), packed.get("factor")
        return call(x, *parts, *self.sizes, self.element, self.out_dtype)
