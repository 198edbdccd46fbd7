"""The kernels of the contract ``linear``: ``cuda.w4a16``, ``cuda.w8a16``, ``cuda.w4a8``, ``cuda.w8a8``."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from qcore import LinearRequest, ZeroPoint
from qcore.plugin_api import Packed, RowsKernel, runs_now
from qcore_triton.codes import numbers_of
from qcore_triton.packing import PackedKernel
from qcore_triton.weights import Weight

from . import ops
from .runtime.replay import replays


class _Linear(PackedKernel, RowsKernel):
    """The common base of both kernels. A call of a known form replays recorded launches, see `replay`.

    ``numbers``: further values that results depend on, apart from the weight's format and sizes.
    """

    def __init__(self, request: LinearRequest, kind: str, numbers: tuple[Any, ...], *, sums: bool = False) -> None:
        super().__init__(f"cuda.w{request.weight.bits}{kind}", request.weight, request.n, request.k, sums=sums)
        self.out_dtype = request.out_dtype
        self._constants = (*self.sizes, *numbers, request.out_dtype)
        zero = () if self.format.zero is ZeroPoint.NONE else ("zero",)
        self._parts = itemgetter("data", "scale", *zero, *(("sums",) if sums else ()))
        self._replays = replays(self.name, self.format, *self._constants)

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        """Run on x ``(..., K)``, giving ``(..., N)``; raises `FormatError` for another K."""
        if given or not runs_now(x):
            return super().__call__(x, packed, bias, **given)
        parts = self._parts(packed)
        # Everything that a recorded call assumes, the devices of all tensors and the shape of a bias included.
        key: Any = (x.shape, x.stride(), x.dtype, x.get_device(), parts[0].get_device(), parts[1].dtype)
        tensors: tuple[Tensor, ...] = (x, *parts)
        if bias is not None:
            form = (bias.dtype, bias.shape, bias.stride(), bias.get_device(), bias.is_neg())
            key, tensors = (*key, *form), (*tensors, bias)
        replay = self._replays.get(key)
        if replay is not None and (y := replay(tensors)) is not None:
            return y
        return self._replays.first(key, tensors, RowsKernel.__call__, self, x, packed, bias)


class FloatLinear(_Linear):
    """Float activations: ``y = x @ W^T + bias``, accumulated in float32, rounded once to ``out_dtype``."""

    def __init__(self, request: LinearRequest) -> None:
        super().__init__(request, "a16", ())

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        del given  # float activations have no parameters
        call = ops.linear_a16 if runs_now(x) else ops.op_linear_a16
        return call(x, packed["data"], packed["scale"], packed.get("zero"), bias, *self._constants)

    def tune(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> None:
        """Measure every configuration for this number of rows; the fastest is used from now on."""
        del given
        from .tuning import tune_float

        with ops.device_guard(x):
            tune_float(x.reshape(-1, self.k), self._weight(packed), bias, self.out_dtype)

    def _weight(self, packed: Packed) -> Weight:
        return Weight(packed["data"], packed["scale"], packed.get("zero"), *self.sizes)


class Int8Linear(_Linear):
    """Int8 activations, dynamic or given: exact int32 sums per group, the rest in float32, rounded once."""

    def __init__(self, request: LinearRequest) -> None:
        quantization = numbers_of(request.activation, request.output)
        # Only a zero point of activations is multiplied by the sums of codes.
        super().__init__(request, "a8", quantization, sums=not quantization[0])

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        call = ops.linear_a8 if runs_now(x) else ops.op_linear_a8
        return call(
            x, packed["data"], packed["scale"], packed.get("zero"), packed.get("sums"), bias,
            given.get("x_scale"), given.get("x_zero_point"), given.get("out_scale"), given.get("out_zero_point"),
            *self._constants,
        )  # fmt: skip

    def tune(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> None:
        """Measure every configuration for this number of rows; the fastest is used from now on."""
        del bias, given
        from .tuning import tune_int8

        if x.dtype == torch.int8:
            return  # parameters per token come with each call; its products are measured as those of the dynamic form
        weight = Weight(packed["data"], packed["scale"], packed.get("zero"), *self.sizes)
        with ops.device_guard(x):
            tune_int8(x.reshape(-1, self.k), weight, self.out_dtype)


def kernel(request: LinearRequest) -> FloatLinear | Int8Linear:
    """The kernel for a request that `eligibility` accepts."""
    return FloatLinear(request) if request.activation is None else Int8Linear(request)
