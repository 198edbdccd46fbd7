"""The kernels of the contract ``linear``: ``xla.w4a16``, ``xla.w8a8``, ``xla.wfp8a16``, ``xla.wfp8afp8``, ..."""

from __future__ import annotations

from torch import Tensor

from qcore import LinearRequest
from qcore.plugin_api import Packed, RowsKernel, given_numbers, runs_now

from .. import calls, ops
from ..eligibility import scheme_text
from ..packing import PackedKernel
from .names import kernel_name

_NO_NUMBERS = calls.Given()


class XlaLinear(PackedKernel, RowsKernel):
    """Float activations accumulate in float32; int8 ones exactly in int32, the rest in float32. Rounded once."""

    def __init__(self, request: LinearRequest) -> None:
        r, scheme = request, scheme_text(request)
        self._call = calls.call_of(r.device, r.n, r.k, scheme, 1, r.out_dtype)
        sums, rows = calls.has_zeros(r.activation), self._call.plan.by_rows
        super().__init__(kernel_name("w", r), r.weight, r.n, r.k, sums=sums, rows=rows)
        self.out_dtype = r.out_dtype
        self._constants = (r.n, r.k, scheme, r.out_dtype)
        self._without_numbers = given_numbers(r.activation)[0] is None and given_numbers(r.output)[0] is None

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        now, weight = runs_now(x), calls.Weight.of(packed)
        if now and self._without_numbers and not given:  # the shortest way
            return calls.linear(x, weight, bias, _NO_NUMBERS, self._call)
        call = ops.linear if now else ops.op_linear
        return call(
            x, *weight, bias,
            given.get("x_scale"), given.get("x_zero_point"), given.get("out_scale"), given.get("out_zero_point"),
            *self._constants,
        )  # fmt: skip
