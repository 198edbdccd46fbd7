"""``torch.ops.qcore_xla.*``: the kernels as ops of a graph.

Arguments are flat and results new tensors. Every op reads the number of rows when it runs, so one graph supports any.
JAX is imported when an op first runs. In eager mode, kernels call `calls` directly if `runs_now` allows it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from qcore import DynamicInt8, OutputInt8
from qcore.plugin_api import Activation, convolved_size, define_op, given_numbers

from . import calls
from .calls import Given, Weight, call_of, number
from .columns import Geometry, convolve

NAMESPACE = "qcore_xla"

# ruff: noqa: ARG001 - a fake has the signature of its op
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

_Pair = list[int]


def flat(
    activation: Activation | None, output: OutputInt8 | None
) -> tuple[str, float | None, int, bool, float | None, int]:
    """A request's activation and output as arguments of an op.

    The kind of activation, its scale (None: dynamic, or given per token) and zero point; whether results are int8,
    and their scale and zero point.
    """
    if activation is None:
        kind = "float"
    elif isinstance(activation, DynamicInt8):
        kind = "symmetric" if activation.symmetric else "asymmetric"
    else:
        kind = "given"
    return (kind, *given_numbers(activation), output is not None, *given_numbers(output))


def linear(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, sums: Tensor | None, bias: Tensor | None,
    x_scale: Tensor | None, x_zero_point: Tensor | None, out_scale: Tensor | None, out_zero_point: Tensor | None,
    n: int, k: int, bits: int, group: int, activation: str, static_scale: float | None, static_zero_point: int,
    requantize: bool, output_scale: float | None, output_zero_point: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``A(x) @ W^T + bias``: x ``(M, K)`` of any strides to ``(M, N)``; W as in `packing`.

    ``activation``: see `qcore_xla.bodies.form`. "given" means ``x_scale`` and ``x_zero_point`` ``(M,)`` if they
    are passed, otherwise the static ones; likewise for int8 results.
    """
    given = Given(
        *_either(x_scale, x_zero_point, static_scale, static_zero_point, x.device),
        *_either(out_scale, out_zero_point, output_scale, output_zero_point, x.device),
    )
    call = call_of(x.device, n, k, bits, group, 1, activation, requantize, out_dtype)
    return calls.linear(x, Weight(data, scale, zero, sums), bias, given, call)


def _either(
    scale: Tensor | None, zero: Tensor | None, number_scale: float | None, number_zero: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    if scale is not None:
        return scale, zero
    if number_scale is None:
        return None, None
    return number(number_scale, device), number(float(number_zero), device)


def _linear_fake(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, sums: Tensor | None, bias: Tensor | None,
    x_scale: Tensor | None, x_zero_point: Tensor | None, out_scale: Tensor | None, out_zero_point: Tensor | None,
    n: int, *rest: Any,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], n), dtype=rest[-1])


def conv2d(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, sums: Tensor | None, bias: Tensor | None, n: int,
    kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, groups: int, bits: int, group: int,
    activation: str, static_scale: float | None, static_zero_point: int,
    requantize: bool, output_scale: float | None, output_zero_point: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``conv2d(A(x), W) + bias``: x ``(B, IC, H, W)`` to ``(B, OC, OH, OW)``, which is channels last in memory."""
    given = Given(
        *_either(None, None, static_scale, static_zero_point, x.device),
        *_either(None, None, output_scale, output_zero_point, x.device),
    )
    geometry = Geometry(tuple(kernel), tuple(stride), tuple(padding), tuple(dilation), groups)
    k = kernel[0] * kernel[1] * x.shape[1] // groups
    call = call_of(x.device, n, k, bits, group, groups, activation, requantize, out_dtype)
    filling = static_zero_point if x.dtype == torch.int8 else 0
    return convolve(x, Weight(data, scale, zero, sums), bias, given, call, geometry, filling)


def _conv2d_fake(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, sums: Tensor | None, bias: Tensor | None, n: int,
    kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, *rest: Any,
) -> Tensor:  # fmt: skip
    size = convolved_size(x.shape[2:], kernel, stride, padding, dilation)
    return x.new_empty((x.shape[0], *size, n), dtype=rest[-1]).movedim(-1, 1)


def _embedding_fake(
    indices: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None,
    v: int, d: int, bits: int, group: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return indices.new_empty((*indices.shape, d), dtype=out_dtype)


# The device of the tensors determines the engine.
_define = partial(define_op, _library, keys=("CPU", "CUDA", "XLA", "PrivateUse1"))

_WEIGHT = "Tensor data, Tensor scale, Tensor? zero"
_QUANTIZATION = (
    "str activation, float? static_scale, int static_zero_point, bool requantize, float? output_scale, "
    "int output_zero_point, ScalarType out_dtype"
)

op_linear = _define(
    f"linear(Tensor x, {_WEIGHT}, Tensor? sums, Tensor? bias, Tensor? x_scale, Tensor? x_zero_point, "
    f"Tensor? out_scale, Tensor? out_zero_point, int n, int k, int bits, int group, {_QUANTIZATION}) -> Tensor",
    linear,
    _linear_fake,
)
op_conv2d = _define(
    f"conv2d(Tensor x, {_WEIGHT}, Tensor? sums, Tensor? bias, int n, int[2] kernel, int[2] stride, int[2] padding, "
    f"int[2] dilation, int groups, int bits, int group, {_QUANTIZATION}) -> Tensor",
    conv2d,
    _conv2d_fake,
)
op_embedding = _define(
    f"embedding(Tensor indices, {_WEIGHT}, int v, int d, int bits, int group, ScalarType out_dtype) -> Tensor",
    calls.embedding,
    _embedding_fake,
)
