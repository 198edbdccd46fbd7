"""The kernels of the contract ``conv2d``: ``vulkan.conv2d_w4a16``, ``..._w8a16``, ``..._w4a8``, ``..._w8a8``."""

from __future__ import annotations

from torch import Tensor

from qcore import Conv2dRequest
from qcore.plugin_api import Packed, check_image, runs_now

from . import ops
from .calls import conv2d, form, geometry
from .kernel import HandleKernel, precision
from .weights import find


class VulkanConv2d(HandleKernel):
    """A product of columns that the device gathers, in (KH, KW, IC) order; results are channels last."""

    def __init__(self, request: Conv2dRequest) -> None:
        r = self.request = request
        super().__init__(f"vulkan.conv2d_{precision(r.weight, r.activation)}", r.weight, r.n, r.k)
        self.out_dtype = r.out_dtype
        self._sizes = (list(r.kernel_size), list(r.stride), list(r.padding), list(r.dilation), r.groups)
        self._geometry = geometry(*self._sizes)
        self._form = form(r.activation, r.output, r.out_dtype)
        self._quantization = (r.activation is not None, *ops.flat(r.activation, r.output))

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **_given: Tensor) -> Tensor:
        """Run on x ``(B, IC, H, W)``, giving ``(B, OC, OH, OW)``; raises `FormatError` for a wrong channel count."""
        check_image(self.name, x, self.request)
        if runs_now(x):
            return conv2d(x, find(packed["weight"]), bias, self._form, self._geometry)
        return ops.op_conv2d(  # type: ignore[no-any-return]
            x, packed["weight"], bias, self.n, *self._sizes, *self._quantization, self.out_dtype
        )
