"""The kernels of the contract ``conv2d``: ``xla.conv2d_w4a16``, ``..._w8a16``, ``..._w4a8``, ``..._w8a8``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qcore import Conv2dRequest
from qcore.plugin_api import Packed, check_image, runs_now

from .. import ops
from ..packing import PackedKernel, wants_rows


class XlaConv2d(PackedKernel):
    """A product of columns in (KH, KW, IC) order; results are channels last."""

    def __init__(self, request: Conv2dRequest) -> None:
        r = self.request = request
        quantization = ops.flat(r.activation, r.output)
        name = f"xla.conv2d_w{r.weight.bits}a{16 if r.activation is None else 8}"
        sums = quantization[0] in {"asymmetric", "given"}
        rows = wants_rows(r.device, r.k, r.weight.group_size, r.groups, quantization[0])
        super().__init__(name, r.weight, r.n, r.k, sums=sums, heads=r.groups, rows=rows)
        self.out_dtype = r.out_dtype
        geometry = (list(r.kernel_size), list(r.stride), list(r.padding), list(r.dilation), r.groups)
        weight = (r.weight.bits, r.weight.group_size or 0)
        self._constants: tuple[Any, ...] = (r.n, *geometry, *weight, *quantization, r.out_dtype)

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **_given: Tensor) -> Tensor:
        """Run on x ``(B, IC, H, W)``, giving ``(B, OC, OH, OW)``; raises `FormatError` for a wrong channel count."""
        check_image(self.name, x, self.request)
        call = ops.conv2d if runs_now(x) else ops.op_conv2d
        weight = (packed["data"], packed["scale"], packed.get("zero"), packed.get("sums"))
        return call(x, *weight, bias, *self._constants)
