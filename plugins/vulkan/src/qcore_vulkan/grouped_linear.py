"""The kernels of the contract ``grouped_linear``, such as ``vulkan.grouped_w4a16``."""

from __future__ import annotations

from torch import Tensor

from qcore import FormatError
from qcore.plugin_api import GroupedLinearRequest, Packed, runs_now

from . import ops
from .calls import form, grouped_linear
from .kernel import HandleKernel, precision
from .weights import find


class VulkanGroupedLinear(HandleKernel):
    """All experts in one product: the device reads the ends of their rows."""

    def __init__(self, request: GroupedLinearRequest) -> None:
        r = request
        super().__init__(f"vulkan.grouped_{precision(r.weight, r.activation)}", r.weight, r.experts, r.n, r.k)
        self.out_dtype = r.out_dtype
        self._form = form(r.activation, None, r.out_dtype)
        self._quantization = (r.activation is not None, *ops.flat(r.activation, None))

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        """Run on x ``(T, K)`` with ``offsets`` int32 ``(E,)``, giving ``(T, N)``; raises `FormatError` for other x."""
        if x.dim() != 2 or x.shape[1] != self.k:
            raise FormatError(f"{self.name}: x has shape {tuple(x.shape)}; it must be (T, K) with K={self.k}.")
        if runs_now(x):
            return grouped_linear(x, given["offsets"], find(packed["weight"]), bias, self._form)
        return ops.op_grouped_linear(  # type: ignore[no-any-return]
            x, given["offsets"], packed["weight"], bias, self.n, *self._quantization, self.out_dtype
        )
