"""The kernels of the contract ``grouped_linear``: ``xla.grouped_w4a16``, ``..._w8a8``, ``..._wfp8a16``, ..."""

from __future__ import annotations

from torch import Tensor

from qcore import FormatError
from qcore.plugin_api import GroupedLinearRequest, Packed, runs_now

from .. import calls, ops
from ..eligibility import scheme_text
from ..packing import PackedKernel
from .names import kernel_name


class XlaGroupedLinear(PackedKernel):
    """All experts in one program, which finds each row's expert by itself."""

    def __init__(self, request: GroupedLinearRequest) -> None:
        r, scheme = request, scheme_text(request)
        rows = calls.call_of(r.device, r.n, r.k, scheme, 1, r.out_dtype).plan.by_rows
        sums, name = calls.has_zeros(r.activation), kernel_name("grouped_w", r)
        super().__init__(name, r.weight, r.n, r.k, sums=sums, rows=rows, experts=r.experts)
        self.out_dtype = r.out_dtype
        self._constants = (r.n, r.k, scheme, r.out_dtype)

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        """Run on x ``(T, K)`` with ``offsets`` int32 ``(E,)``, giving ``(T, N)``; raises `FormatError` for other x."""
        offsets = given["offsets"]
        if x.dim() != 2 or x.shape[1] != self.k:
            raise FormatError(f"{self.name}: x has shape {tuple(x.shape)}; it must be (T, K) with K={self.k}.")
        if bias is not None and bias.shape != (self.experts, self.n):
            have, needs = tuple(bias.shape), (self.experts, self.n)
            raise FormatError(f"{self.name}: bias has shape {have}; this weight needs {needs}.")
        call = ops.grouped_linear if runs_now(x) else ops.op_grouped_linear
        return call(x, *calls.Weight.of(packed), bias, offsets, *self._constants)
