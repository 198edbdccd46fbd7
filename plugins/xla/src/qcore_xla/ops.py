"""``torch.ops.qcore_xla.*``: the kernels as ops of a graph.

Arguments are flat and results new tensors. Every op reads the number of rows when it runs, so one graph supports any.
JAX is imported when an op first runs. In eager mode, kernels call `calls` directly if `runs_now` allows it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from qcore.plugin_api import check_offsets, convolved_size, define_op, given_numbers

from . import calls
from .calls import Given, Weight, call_of, number, scheme_of
from .columns import Geometry, convolve

NAMESPACE = "qcore_xla"

# ruff: noqa: ARG001 - a fake has the signature of its op
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

_Pair = list[int]


def linear(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, factor: Tensor | None, sums: Tensor | None,
    bias: Tensor | None, x_scale: Tensor | None, x_zero_point: Tensor | None,
    out_scale: Tensor | None, out_zero_point: Tensor | None, n: int, k: int, scheme: str, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``A(x) @ W^T + bias``: x ``(M, K)`` of any strides to ``(M, N)``; W as in `packing`.

    ``x_scale``, ``x_zero_point``, ``out_scale``, ``out_zero_point``: ``(M,)``, if the text ``scheme`` has parameters
    per token.
    """
    given = _given(scheme, x.device, x_scale, x_zero_point, out_scale, out_zero_point)
    call = call_of(x.device, n, k, scheme, 1, out_dtype)
    return calls.linear(x, Weight(data, scale, zero, factor, sums), bias, given, call)


def _given(scheme: str, device: torch.device, *tokens: Tensor | None) -> Given:
    """Parameters per token, or else those of the scheme."""
    of = scheme_of(scheme)
    found: list[Tensor | None] = []
    for part, pair in ((of.activation, tokens[:2]), (of.output, tokens[2:])):
        scale, zero = given_numbers(part)
        own = (None, None) if scale is None else (number(scale, device), number(float(zero), device))
        found += own if not pair or pair[0] is None else pair
    return Given(*found)


def _linear_fake(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, factor: Tensor | None, sums: Tensor | None,
    bias: Tensor | None, x_scale: Tensor | None, x_zero_point: Tensor | None,
    out_scale: Tensor | None, out_zero_point: Tensor | None, n: int, *rest: Any,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], n), dtype=rest[-1])


def grouped_linear(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, factor: Tensor | None, sums: Tensor | None,
    bias: Tensor | None, offsets: Tensor, n: int, k: int, scheme: str, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``A(x) @ W[e]^T + bias[e]`` for the rows of each expert: x ``(T, K)`` to ``(T, N)``, offsets int32 ``(E,)``."""
    check_offsets(offsets, data.shape[0], x.shape[0])
    if offsets.device.type != "cpu":
        ascends = (offsets.diff() >= 0).all() & (offsets[0] >= 0) & (offsets[-1] <= x.shape[0])
        torch._assert_async(ascends)  # noqa: SLF001 - torch's own way for devices
    call = call_of(x.device, n, k, scheme, 1, out_dtype)
    weight = Weight(data, scale, zero, factor, sums)
    return calls.experts(x, weight, bias, offsets, _given(scheme, x.device), call)


def _grouped_linear_fake(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, factor: Tensor | None, sums: Tensor | None,
    bias: Tensor | None, offsets: Tensor, n: int, *rest: Any,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], n), dtype=rest[-1])


def conv2d(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, factor: Tensor | None, sums: Tensor | None,
    bias: Tensor | None, n: int, kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, groups: int,
    scheme: str, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``conv2d(A(x), W) + bias``: x ``(B, IC, H, W)`` to ``(B, OC, OH, OW)``, which is channels last in memory."""
    geometry = Geometry(tuple(kernel), tuple(stride), tuple(padding), tuple(dilation), groups)
    k = kernel[0] * kernel[1] * x.shape[1] // groups
    call, given = call_of(x.device, n, k, scheme, groups, out_dtype), _given(scheme, x.device)
    filling = given_numbers(scheme_of(scheme).activation)[1] if x.dtype == torch.int8 else 0
    return convolve(x, Weight(data, scale, zero, factor, sums), bias, given, call, geometry, filling)


def _conv2d_fake(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, factor: Tensor | None, sums: Tensor | None,
    bias: Tensor | None, n: int, kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, *rest: Any,
) -> Tensor:  # fmt: skip
    size = convolved_size(x.shape[2:], kernel, stride, padding, dilation)
    return x.new_empty((x.shape[0], *size, n), dtype=rest[-1]).movedim(-1, 1)


def _embedding_fake(
    indices: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, factor: Tensor | None,
    v: int, d: int, format: str, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return indices.new_empty((*indices.shape, d), dtype=out_dtype)


# The device of the tensors determines the engine.
_define = partial(define_op, _library, keys=("CPU", "CUDA", "XLA", "PrivateUse1"))

_WEIGHT = "Tensor data, Tensor scale, Tensor? zero, Tensor? factor"

op_linear = _define(
    f"linear(Tensor x, {_WEIGHT}, Tensor? sums, Tensor? bias, Tensor? x_scale, Tensor? x_zero_point, "
    f"Tensor? out_scale, Tensor? out_zero_point, int n, int k, str scheme, ScalarType out_dtype) -> Tensor",
    linear,
    _linear_fake,
)
op_grouped_linear = _define(
    f"grouped_linear(Tensor x, {_WEIGHT}, Tensor? sums, Tensor? bias, Tensor offsets, int n, int k, str scheme, "
    f"ScalarType out_dtype) -> Tensor",
    grouped_linear,
    _grouped_linear_fake,
)
op_conv2d = _define(
    f"conv2d(Tensor x, {_WEIGHT}, Tensor? sums, Tensor? bias, int n, int[2] kernel, int[2] stride, int[2] padding, "
    f"int[2] dilation, int groups, str scheme, ScalarType out_dtype) -> Tensor",
    conv2d,
    _conv2d_fake,
)
op_embedding = _define(
    f"embedding(Tensor indices, {_WEIGHT}, int v, int d, str format, ScalarType out_dtype) -> Tensor",
    calls.embedding,
    _embedding_fake,
)
