"""The kernel of the contract ``embedding``: ``vulkan.embedding``."""

from __future__ import annotations

from torch import Tensor

from qcore import EmbeddingRequest
from qcore.plugin_api import Packed, runs_now

from . import ops
from .calls import embedding
from .kernel import HandleKernel
from .weights import find


class VulkanEmbedding(HandleKernel):
    """Gathers rows and dequantizes only those; its packed table is that of a linear layer, so tied layers share it."""

    def __init__(self, request: EmbeddingRequest) -> None:
        super().__init__("vulkan.embedding", request.weight, request.n, request.k)
        self.out_dtype = request.out_dtype

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None = None, **_given: Tensor) -> Tensor:
        """Indices x, int32 or int64 of any shape, to ``(*x.shape, D)``; raises `IndexError` outside of ``0..V-1``."""
        del bias  # an embedding has none
        if runs_now(x):
            return embedding(x, find(packed["weight"]), self.out_dtype)
        return ops.op_embedding(x, packed["weight"], self.k, self.out_dtype)  # type: ignore[no-any-return]
