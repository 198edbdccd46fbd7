"""The kernels of the contract ``linear``: ``vulkan.w4a16``, ``vulkan.w8a16``, ``vulkan.w4a8``, ``vulkan.w8a8``."""

from __future__ import annotations

from torch import Tensor

from qcore import LinearRequest
from qcore.plugin_api import GIVEN_NAMES, Packed, RowsKernel, runs_now

from . import ops
from .calls import form, linear
from .kernel import HandleKernel, precision
from .weights import find


class VulkanLinear(HandleKernel, RowsKernel):
    """Float activations accumulate in float32; int8 ones exactly in int32, the rest in float32. Rounded once."""

    def __init__(self, request: LinearRequest) -> None:
        r = request
        super().__init__(f"vulkan.{precision(r.weight, r.activation)}", r.weight, r.n, r.k)
        self.out_dtype = r.out_dtype
        self._form = form(r.activation, r.output, r.out_dtype)
        self._quantization = ops.flat(r.activation, r.output)

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        weight = packed["weight"]
        if runs_now(x):
            return linear(x, find(weight), bias, self._form, given)
        if self._form.activation is None:
            return ops.op_linear_a16(x, weight, bias, self.n, self.out_dtype)  # type: ignore[no-any-return]
        vectors = map(given.get, GIVEN_NAMES)
        return ops.op_linear_a8(  # type: ignore[no-any-return]
            x, weight, bias, *vectors, self.n, *self._quantization, self.out_dtype
        )

    def tune(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> None:
        """Measure every kernel that the device has for this number of rows; the fastest is used from now on."""
        from .tuning import tune_linear

        tune_linear(x.reshape(-1, self.k), find(packed["weight"]), bias, self._form, given)
