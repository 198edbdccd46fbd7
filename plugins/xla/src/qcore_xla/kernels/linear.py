"""The kernels of the contract ``linear``: ``xla.w4a16``, ``xla.w8a16``, ``xla.w4a8``, ``xla.w8a8``."""

from __future__ import annotations

from torch import Tensor

from qcore import LinearRequest
from qcore.plugin_api import Packed, RowsKernel, runs_now

from .. import calls, ops
from ..packing import PackedKernel, wants_rows

_NO_NUMBERS = calls.Given()


class XlaLinear(PackedKernel, RowsKernel):
    """Float activations accumulate in float32; int8 ones exactly in int32, the rest in float32. Rounded once."""

    def __init__(self, request: LinearRequest) -> None:
        r, quantization = request, ops.flat(request.activation, request.output)
        name = f"xla.w{r.weight.bits}a{16 if r.activation is None else 8}"
        rows = wants_rows(r.device, r.k, r.weight.group_size, 1, quantization[0])
        super().__init__(name, r.weight, r.n, r.k, sums=quantization[0] in {"asymmetric", "given"}, rows=rows)
        self.out_dtype = r.out_dtype
        self._constants = (r.n, r.k, r.weight.bits, r.weight.group_size or 0, *quantization, r.out_dtype)
        self._call = calls.Call(self.plan, quantization[0], quantization[3], r.out_dtype)
        self._without_numbers = quantization[1] is None and quantization[4] is None

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        now = runs_now(x)
        if now and self._without_numbers and not given:  # the shortest way
            weight = calls.Weight(packed["data"], packed["scale"], packed.get("zero"), packed.get("sums"))
            return calls.linear(x, weight, bias, _NO_NUMBERS, self._call)
        call = ops.linear if now else ops.op_linear
        return call(
            x, packed["data"], packed["scale"], packed.get("zero"), packed.get("sums"), bias,
            given.get("x_scale"), given.get("x_zero_point"), given.get("out_scale"), given.get("out_zero_point"),
            *self._constants,
        )  # fmt: skip
