"""``torch.ops.qcore_vulkan.*``: the kernels as ops of a graph.

Weights are handles (see `weights`), every other argument is flat. Ops read the number of rows when they run, so one
graph supports any. In eager mode kernels call `calls` directly if `qcore.plugin_api.runs_now` allows it.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from qcore import DynamicInt8, Format, OutputInt8, ScaleType, StaticInt8, ZeroPoint
from qcore.plugin_api import GIVEN_NAMES, Activation, convolved_size, define_op, given_numbers

NAMESPACE = "qcore_vulkan"

# ruff: noqa: ARG001 - a fake has the signature of its op
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

_Pair = list[int]


def flat(activation: Activation | None, output: OutputInt8 | None) -> tuple[bool, float | None, int, float | None, int]:
    """A request's activation and output as arguments of an op.

    Whether activations are quantized symmetrically; their scale (None: dynamic, or given per token) and zero point;
    the output's.
    """
    symmetric = isinstance(activation, DynamicInt8) and activation.symmetric
    return (symmetric, *given_numbers(activation), *given_numbers(output))


@lru_cache(maxsize=1024)
def _activation(symmetric: bool, scale: float | None, zero_point: int, per_token: bool) -> DynamicInt8 | StaticInt8:
    """The inverse of `flat`, for activations."""
    if per_token:
        return StaticInt8(per_token=True)
    return DynamicInt8(symmetric) if scale is None else StaticInt8(scale, zero_point)


@lru_cache(maxsize=1024)
def _output(scale: float | None, zero_point: int, per_token: bool) -> OutputInt8 | None:
    if per_token:
        return OutputInt8(per_token=True)
    return None if scale is None else OutputInt8(scale, zero_point)


def _linear_a16(x: Tensor, weight: Tensor, bias: Tensor | None, n: int, out_dtype: torch.dtype) -> Tensor:
    from .calls import form, linear
    from .weights import find

    return linear(x, find(weight), bias, form(None, None, out_dtype))


def _linear_a16_fake(x: Tensor, weight: Tensor, bias: Tensor | None, n: int, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], n), dtype=out_dtype)


def _linear_a8(
    x: Tensor, weight: Tensor, bias: Tensor | None,
    x_scale: Tensor | None, x_zero_point: Tensor | None, out_scale: Tensor | None, out_zero_point: Tensor | None,
    n: int, symmetric: bool, static_scale: float | None, static_zero_point: int,
    output_scale: float | None, output_zero_point: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    from .calls import form, linear
    from .weights import find

    activation = _activation(symmetric, static_scale, static_zero_point, x_scale is not None)
    output = _output(output_scale, output_zero_point, out_scale is not None)
    vectors = zip(GIVEN_NAMES, (x_scale, x_zero_point, out_scale, out_zero_point), strict=True)
    given = {name: vector for name, vector in vectors if vector is not None}
    return linear(x, find(weight), bias, form(activation, output, out_dtype), given)


def _linear_a8_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None,
    x_scale: Tensor | None, x_zero_point: Tensor | None, out_scale: Tensor | None, out_zero_point: Tensor | None,
    n: int, *rest: Any,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], n), dtype=rest[-1])


def _grouped_linear(
    x: Tensor, offsets: Tensor, weight: Tensor, bias: Tensor | None, n: int,
    quantized: bool, symmetric: bool, static_scale: float | None, static_zero_point: int,
    output_scale: float | None, output_zero_point: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    from .calls import form, grouped_linear
    from .weights import find

    activation = _activation(symmetric, static_scale, static_zero_point, False) if quantized else None
    return grouped_linear(x, offsets, find(weight), bias, form(activation, None, out_dtype))


def _grouped_linear_fake(x: Tensor, offsets: Tensor, weight: Tensor, bias: Tensor | None, n: int, *rest: Any) -> Tensor:
    return x.new_empty((x.shape[0], n), dtype=rest[-1])


def _embedding(indices: Tensor, weight: Tensor, d: int, out_dtype: torch.dtype) -> Tensor:
    from .calls import embedding
    from .weights import find

    return embedding(indices, find(weight), out_dtype)


def _embedding_fake(indices: Tensor, weight: Tensor, d: int, out_dtype: torch.dtype) -> Tensor:
    return indices.new_empty((*indices.shape, d), dtype=out_dtype)


def _conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, n: int,
    kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, groups: int,
    quantized: bool, symmetric: bool, static_scale: float | None, static_zero_point: int,
    output_scale: float | None, output_zero_point: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    from .calls import conv2d, form, geometry
    from .weights import find

    activation = _activation(symmetric, static_scale, static_zero_point, False) if quantized else None
    made = form(activation, _output(output_scale, output_zero_point, False), out_dtype)
    return conv2d(x, find(weight), bias, made, geometry(kernel, stride, padding, dilation, groups))


def _conv2d_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, n: int,
    kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, *rest: Any,
) -> Tensor:  # fmt: skip
    size = convolved_size(x.shape[2:], kernel, stride, padding, dilation)
    return x.new_empty((x.shape[0], *size, n), dtype=rest[-1]).movedim(-1, 1)


def _unpack(weight: Tensor, shape: list[int], format: str) -> list[Tensor]:
    from .layout import download
    from .weights import find

    # A graph has to know the dtype of scales, which a handle does not reveal; float32 holds each of them.
    found = download(find(weight).weight)
    scale = found.scale.float() if found.format.scale is ScaleType.FLOAT else found.scale
    zero = None if found.zero is None else _wide(found.zero)
    return [part.contiguous() for part in (found.data, scale, zero, found.global_scale) if part is not None]


def _unpack_fake(weight: Tensor, shape: list[int], format: str) -> list[Tensor]:
    made = Format.parse(format)
    *experts, n, k = shape
    codes = made.codec.encode(weight.new_empty((n, k), dtype=made.element.code_dtype))
    kept = torch.float32 if made.scale is ScaleType.FLOAT else made.scale.dtypes[0]
    scale = weight.new_empty((made.groups(k), n), dtype=kept)
    parts = [codes, scale]
    if made.zero is not ZeroPoint.NONE:
        parts.append(made.codec.encode_zero(scale.to(torch.int8)) if made.zero is ZeroPoint.INT else scale)
    if made.scale.has_global:
        parts.append(weight.new_empty((), dtype=torch.float32))
    return [part.new_empty((*experts, *part.shape)) for part in parts]


def _wide(zero: Tensor) -> Tensor:
    return zero.float() if zero.is_floating_point() else zero


_define = partial(define_op, _library, keys=("CPU",))

_QUANTIZATION = (
    "bool symmetric, float? static_scale, int static_zero_point, float? output_scale, int output_zero_point, "
    "ScalarType out_dtype"
)

op_linear_a16 = _define(
    "linear_a16(Tensor x, Tensor weight, Tensor? bias, int n, ScalarType out_dtype) -> Tensor",
    _linear_a16,
    _linear_a16_fake,
)
op_linear_a8 = _define(
    f"linear_a8(Tensor x, Tensor weight, Tensor? bias, Tensor? x_scale, Tensor? x_zero_point, Tensor? out_scale, "
    f"Tensor? out_zero_point, int n, {_QUANTIZATION}) -> Tensor",
    _linear_a8,
    _linear_a8_fake,
)
op_grouped_linear = _define(
    f"grouped_linear(Tensor x, Tensor offsets, Tensor weight, Tensor? bias, int n, bool quantized, {_QUANTIZATION}) "
    f"-> Tensor",
    _grouped_linear,
    _grouped_linear_fake,
)
op_embedding = _define(
    "embedding(Tensor indices, Tensor weight, int d, ScalarType out_dtype) -> Tensor", _embedding, _embedding_fake
)
op_unpack = _define("unpack(Tensor weight, int[] shape, str format) -> Tensor[]", _unpack, _unpack_fake)
op_conv2d = _define(
    f"conv2d(Tensor x, Tensor weight, Tensor? bias, int n, int[2] kernel, int[2] stride, int[2] padding, "
    f"int[2] dilation, int groups, bool quantized, {_QUANTIZATION}) -> Tensor",
    _conv2d,
    _conv2d_fake,
)
