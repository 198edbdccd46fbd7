"""The kernels of the contract ``conv2d``: ``xla.conv2d_w4a16``, ``..._w8a8``, ``..._wfp8a16``, ..."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qcore import Conv2dRequest
from qcore.plugin_api import Packed, check_image, runs_now

from .. import calls, ops
from ..eligibility import scheme_text
from ..packing import PackedKernel
from .names import kernel_name


class XlaConv2d(PackedKernel):
    """A product of columns in (KH, KW, IC) order; results are channels last."""

    def __init__(self, request: Conv2dRequest) -> None:
        r, scheme = request, scheme_text(request)
        self.request, self.out_dtype = r, r.out_dtype
        rows = calls.call_of(r.device, r.n, r.k, scheme, r.groups, r.out_dtype).plan.by_rows
        sums = calls.has_zeros(r.activation)
        super().__init__(kernel_name("conv2d_w", r), r.weight, r.n, r.k, sums=sums, heads=r.groups, rows=rows)
        geometry = (list(r.kernel_size), list(r.stride), list(r.padding), list(r.dilation), r.groups)
        self._constants: tuple[Any, ...] = (r.n, *geometry, scheme, r.out_dtype)

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **_given: Tensor) -> Tensor:
        """Run on x ``(B, IC, H, W)``, giving ``(B, OC, OH, OW)``; raises `FormatError` for a wrong channel count."""
        check_image(self.name, x, self.request)
        call = ops.conv2d if runs_now(x) else ops.op_conv2d
        return call(x, *calls.Weight.of(packed), bias, *self._constants)
