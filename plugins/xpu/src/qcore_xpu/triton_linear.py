"""Linear layers that ATen has no op for: ``xpu.w4a8``, grouped ``xpu.w8a8``, ``xpu.dense_w4a16``, ``..._w8a16``."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from qcore import LinearRequest
from qcore.plugin_api import AnyRequest, Packed, RowsKernel, runs_now
from qcore_triton.codes import numbers_of
from qcore_triton.packing import PackedKernel, why_not_group

from . import triton_ops
from .device import why_not_int8, why_not_triton


class DenseLinear(PackedKernel, RowsKernel):
    """Float activations: ``y = x @ W^T + bias`` with W dequantized by Triton, some output rows at a time."""

    note = (
        "Triton dequantizes the weight, some rows at a time, for torch's product: this saves memory, but with few rows "
        "is slower than the unquantized layer."
    )

    def __init__(self, request: LinearRequest) -> None:
        super().__init__(f"xpu.dense_w{request.weight.bits}a16", request.weight, request.n, request.k)
        self.out_dtype = request.out_dtype

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        del given  # float activations have no parameters
        call: Callable[..., Tensor] = triton_ops.linear_dense if runs_now(x) else triton_ops.op_linear_dense
        return call(x, packed["data"], packed["scale"], packed.get("zero"), bias, *self.sizes, self.out_dtype)


class Int8Linear(PackedKernel, RowsKernel):
    """Int8 activations, dynamic or given: exact int32 sums per group, the rest in float32, rounded once."""

    note = "Triton multiplies int8 codes on DPAS, one scale per group. Not tuned: no such GPU was available."

    def __init__(self, request: LinearRequest) -> None:
        numbers = numbers_of(request.activation, request.output)
        # Only a zero point of activations needs the sums of codes.
        name = f"xpu.w{request.weight.bits}a8"
        super().__init__(name, request.weight, request.n, request.k, sums=not numbers[0])
        self.out_dtype = request.out_dtype
        self._constants = (*self.sizes, *numbers, request.out_dtype)

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        call: Callable[..., Tensor] = triton_ops.linear_a8 if runs_now(x) else triton_ops.op_linear_a8
        return call(
            x, packed["data"], packed["scale"], packed.get("zero"), packed.get("sums"), bias,
            given.get("x_scale"), given.get("x_zero_point"), given.get("out_scale"), given.get("out_zero_point"),
            *self._constants,
        )  # fmt: skip


def why_not_weight(request: AnyRequest) -> str:
    """Why kernels in Triton do not support a packed weight; empty if they do."""
    return why_not_group(request.weight) or why_not_triton()


def why_not(request: LinearRequest) -> str:
    """Why a request that `eligibility` accepts has no kernel here; empty if it has one."""
    return why_not_weight(request) or ("" if request.activation is None else why_not_int8(request.device))


def kernel(request: LinearRequest) -> DenseLinear | Int8Linear:
    """The kernel for a request that `why_not` accepts."""
    return DenseLinear(request) if request.activation is None else Int8Linear(request)
