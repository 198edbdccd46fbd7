"""The kernel of the contract ``embedding``: ``xpu.embedding``."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from qcore import EmbeddingRequest
from qcore.plugin_api import Packed, runs_now
from qcore_triton.packing import PackedKernel

from . import triton_ops
from .triton_linear import why_not_weight


class XpuEmbedding(PackedKernel):
    """Gathers rows and dequantizes only those.

    An index out of range triggers a device-side assertion, which aborts the process, or, on GPUs on which Triton's
    assertions have no effect, gives a row of NaN; on a CPU it raises `IndexError`.
    """

    note = "Triton gathers and dequantizes only the requested rows."

    def __init__(self, request: EmbeddingRequest) -> None:
        super().__init__("xpu.embedding", request.weight, request.n, request.k)
        self.out_dtype = request.out_dtype

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None = None, **_given: Tensor) -> Tensor:
        """Indices x, int32 or int64 of any shape, to ``(*x.shape, D)``."""
        del bias  # an embedding has none
        call: Callable[..., Tensor] = triton_ops.embedding if runs_now(x) else triton_ops.op_embedding
        return call(x, packed["data"], packed["scale"], packed.get("zero"), *self.sizes, self.out_dtype)


def why_not(request: EmbeddingRequest) -> str:
    """Why a request that `eligibility` accepts has no kernel here; empty if it has one."""
    return why_not_weight(request)


def kernel(request: EmbeddingRequest) -> XpuEmbedding:
    """The kernel for a request that `why_not` accepts."""
    return XpuEmbedding(request)
