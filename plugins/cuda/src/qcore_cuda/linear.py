"""The kernels of the contract ``linear``: ``cuda.w4a16``, ``cuda.wfp8a16``, ``cuda.w8a8``, ``cuda.wfp8afp8``, ..."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from qcore import DynamicFP8, LinearRequest, StaticFP8, ZeroPoint
from qcore.plugin_api import Packed, RowsKernel, given_numbers, runs_now
from qcore_triton.codes import numbers_of
from qcore_triton.packing import SQUARE, PackedKernel, has_blocks, has_half, has_units, weight_of

from . import ops
from .eligibility import takes_any_group
from .runtime.replay import replays


class _Linear(PackedKernel, RowsKernel):
    """The common base of both kernels. A call of a known form replays recorded launches, see `replay`.

    ``numbers``: further values that results depend on, apart from the weight's format and sizes.
    """

    def __init__(
        self, request: LinearRequest, kind: str, numbers: tuple[Any, ...], *, sums: bool = False, units: bool = False,
        half: bool = False, blocks: bool = False,
    ) -> None:  # fmt: skip
        element = request.weight.element
        name = f"cuda.w{element.bits if element.is_integer else element.name}{kind}"
        super().__init__(name, request.weight, request.n, request.k, sums=sums, units=units, half=half, blocks=blocks)
        self.out_dtype = request.out_dtype
        self._constants = (*self.sizes, *numbers, request.out_dtype)
        zero = () if self.format.zero is ZeroPoint.NONE else ("zero",)
        factor = ("factor",) if self.format.scale.has_global or half else ()
        flags = {"sums": sums, "units": units, "blocks": blocks}
        more = (*zero, *factor, *(name for name, there in flags.items() if there))
        self._parts = itemgetter("data", "scale", *more)
        self._replays = replays(self.name, self.format, *self._constants)

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        """Run on x ``(..., K)``, giving ``(..., N)``; raises `FormatError` for another K."""
        if given or not runs_now(x):
            return super().__call__(x, packed, bias, **given)
        parts = self._parts(packed)
        # Everything that a recorded call assumes, the devices of all tensors and the shape of a bias included.
        key: Any = (x.shape, x.stride(), x.dtype, x.get_device(), parts[0].get_device(), parts[1].dtype)
        tensors: tuple[Tensor, ...] = (x, *parts)
        if self.units or self.half or self.blocks:  # the last part may be empty
            key = (*key, parts[-1].shape)
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
        half = torch.float16 == request.x_dtype == request.out_dtype and has_half(request.weight)
        super().__init__(request, "a16", (), half=half)
        self._arguments: tuple[Any, ...] = (*self.sizes, self.element, request.out_dtype)

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        del given  # float activations have no parameters
        call = ops.linear_a16 if runs_now(x) else ops.op_linear_a16
        parts = packed["data"], packed["scale"], packed.get("zero"), bias, packed.get("factor")
        return call(x, *parts, *self._arguments)

    def tune(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> None:
        """Measure every configuration for this number of rows; the fastest is used from now on."""
        del given
        from .tuning import tune_float

        with ops.device_guard(x):
            weight = weight_of(packed, self.format, self.n, self.k)
            tune_float(x.reshape(-1, self.k), weight, bias, self.out_dtype)


class FP8Linear(_Linear):
    """Activations in e4m3, quantized at run time or by a given scale: float32 sums, rounded once to ``out_dtype``."""

    def __init__(self, request: LinearRequest) -> None:
        activation = request.activation
        group = activation.group or 0 if isinstance(activation, DynamicFP8) else 0
        numbers = (0 if group >= request.k else group, given_numbers(activation)[0])
        half = request.out_dtype.itemsize == 2 and has_half(request.weight)
        blocks = numbers[0] in {0, SQUARE} and has_blocks(request.weight)
        super().__init__(request, "afp8", numbers, half=half, blocks=blocks)
        self._arguments: tuple[Any, ...] = (*self.sizes, self.element, *numbers, request.out_dtype)

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        del given  # a scale is a number of the request
        call = ops.linear_afp8 if runs_now(x) else ops.op_linear_afp8
        parts = packed["data"], packed["scale"], packed.get("zero"), bias, packed.get("factor"), packed.get("blocks")
        return call(x, *parts, *self._arguments)


class Int8Linear(_Linear):
    """Int8 activations, dynamic or given: exact int32 sums per group, the rest in float32, rounded once."""

    def __init__(self, request: LinearRequest) -> None:
        quantization = numbers_of(request.activation, request.output)
        # Only a zero point of activations is multiplied by the sums of codes.
        super().__init__(request, "a8", quantization, sums=not quantization[0], units=has_units(request.weight))

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        call = ops.linear_a8 if runs_now(x) else ops.op_linear_a8
        return call(
            x, packed["data"], packed["scale"], packed.get("zero"), packed.get("sums"), packed.get("units"), bias,
            given.get("x_scale"), given.get("x_zero_point"), given.get("out_scale"), given.get("out_zero_point"),
            *self._constants,
        )  # fmt: skip

    def tune(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> None:
        """Measure every configuration for this number of rows; the fastest is used from now on."""
        del bias, given
        from .tuning import tune_int8

        if x.dtype == torch.int8:
            return  # parameters per token come with each call; its products are measured as those of the dynamic form
        weight = weight_of(packed, self.format, self.n, self.k)
        with ops.device_guard(x):
            tune_int8(x.reshape(-1, self.k), weight, self.out_dtype)


def kernel(request: LinearRequest) -> RowsKernel:
    """The kernel for a request that `eligibility` accepts."""
    if takes_any_group(request):
        from .any_group import AnyGroupLinear

        return AnyGroupLinear(request)
    if isinstance(request.activation, (DynamicFP8, StaticFP8)):
        return FP8Linear(request)
    return FloatLinear(request) if request.activation is None else Int8Linear(request)
