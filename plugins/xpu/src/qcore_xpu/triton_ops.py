"""``torch.ops.qcore_xpu.*`` that run in Triton, and their functions. Triton is imported when an op first runs.

In eager mode, kernels call the functions directly if `qcore.discovery.kernels.runs_now` allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qcore.plugin_api import GIVEN_NAMES
from qcore_triton import channel_groups
from qcore_triton.codes import given_of
from qcore_triton.geometry import Geometry
from qcore_triton.weights import Weight, bias_of, check_devices

from .ops import define, device_guard

# ruff: noqa: ARG001 - a fake has the signature of its op

_Pair = Sequence[int]


def linear_a8(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, sums: Tensor | None, bias: Tensor | None,
    x_scale: Tensor | None, x_zero_point: Tensor | None, out_scale: Tensor | None, out_zero_point: Tensor | None,
    n: int, k: int, bits: int, group: int, symmetric: bool, static_scale: float | None, static_zero_point: int,
    output_scale: float | None, output_zero_point: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``A(x) @ W^T + bias`` with int8 A(x): x ``(M, K)`` float or int8 codes, of any strides, to ``(M, N)``.

    Activations: ``x_scale`` and ``x_zero_point`` ``(M,)`` if given, else ``static_scale`` and ``static_zero_point``
    if given, else per token, ``symmetric`` or not. Results: int8 by ``out_scale`` and ``out_zero_point`` ``(M,)``,
    or by ``output_scale`` and ``output_zero_point``, else of ``out_dtype``. ``sums``: see `packing.pack`.
    """
    from . import tiles

    given = zip(GIVEN_NAMES, (x_scale, x_zero_point, out_scale, out_zero_point), strict=True)
    check_devices(x, data, {"bias": bias, **dict(given)})
    of_x = given_of(x_scale, x_zero_point, static_scale, static_zero_point)
    of_y = given_of(out_scale, out_zero_point, output_scale, output_zero_point)
    weight, how = Weight(data, scale, zero, n, k, bits, group), tiles.How(symmetric, of_x, of_y, out_dtype)
    with device_guard(x):
        return tiles.product(x, weight, sums, bias_of(bias, n), how)


def linear_dense(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None,
    n: int, k: int, bits: int, group: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``x @ W^T + bias``: x ``(M, K)`` float, of any strides, to ``(M, N)``; W is dequantized some rows at a time."""
    from . import dense

    check_devices(x, data, {"bias": bias})
    with device_guard(x):
        return dense.linear(x, Weight(data, scale, zero, n, k, bits, group), bias_of(bias, n), out_dtype)


def conv2d_a8(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, sums: Tensor | None, bias: Tensor | None,
    n: int, k: int, bits: int, group: int, kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, groups: int,
    symmetric: bool, static_scale: float | None, static_zero_point: int,
    output_scale: float | None, output_zero_point: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Int8 activations: x ``(B, IC, H, W)`` to ``(B, OC, OH, OW)``; other arguments as for `linear_a8`."""
    from . import columns, tiles

    check_devices(x, data, {"bias": bias})
    geometry = Geometry.of(kernel, stride, padding, dilation, groups)
    if not x.shape[0]:
        return _image(x, n, out_dtype, geometry)
    of_x = given_of(None, None, static_scale, static_zero_point)
    of_y = given_of(None, None, output_scale, output_zero_point)
    weight, how = Weight(data, scale, zero, n, k, bits, group), tiles.How(symmetric, of_x, of_y, out_dtype)
    with device_guard(x):
        y = columns.conv2d(x, weight, sums, bias_of(bias, n), geometry, how)
    return y.view(x.shape[0], *geometry.output(*x.shape[2:]), n).movedim(-1, 1)


def conv2d_groups_a8(x: Tensor, *arguments: Any) -> Tensor:
    """Int8 activations in narrow channel groups, see `qcore_triton.channel_groups`."""
    from .device import launch, options

    with device_guard(x):
        return channel_groups.convolve(launch, x, *arguments, **options(4))


def conv2d_dense(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None,
    n: int, k: int, bits: int, group: int, kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, groups: int,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Float activations: x ``(B, IC, H, W)`` to ``(B, OC, OH, OW)``; the weight is dequantized, torch convolves."""
    from . import dense

    check_devices(x, data, {"bias": bias})
    geometry = Geometry.of(kernel, stride, padding, dilation, groups)
    if not x.shape[0]:
        return _image(x, n, out_dtype, geometry)
    with device_guard(x):
        weight = Weight(data, scale, zero, n, k, bits, group)
        return dense.conv2d(x, weight, bias_of(bias, n), geometry, out_dtype)


def embedding(
    indices: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None,
    v: int, d: int, bits: int, group: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Rows of a table ``(v, d)``: int32 or int64 indices of any shape to ``(*indices.shape, d)``."""
    from . import gathering

    check_devices(indices, data, {})
    with device_guard(indices):
        found = gathering.rows(
            indices.reshape(-1).contiguous(), Weight(data, scale, zero, v, d, bits, group), out_dtype
        )
    return found.view(*indices.shape, d)


def _image(x: Tensor, n: int, out_dtype: torch.dtype, geometry: Geometry) -> Tensor:
    """An empty image ``(B, n, OH, OW)``, channels last, as results are."""
    return x.new_empty((x.shape[0], *geometry.output(*x.shape[2:]), n), dtype=out_dtype).movedim(-1, 1)


def _linear_a8_fake(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, sums: Tensor | None, bias: Tensor | None,
    x_scale: Tensor | None, x_zero_point: Tensor | None, out_scale: Tensor | None, out_zero_point: Tensor | None,
    n: int, *rest: Any,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], n), dtype=rest[-1])


def _linear_dense_fake(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, n: int, *rest: Any
) -> Tensor:
    return x.new_empty((x.shape[0], n), dtype=rest[-1])


def _conv2d_a8_fake(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, sums: Tensor | None, bias: Tensor | None,
    n: int, k: int, bits: int, group: int, kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, groups: int,
    *rest: Any,
) -> Tensor:  # fmt: skip
    return _image(x, n, rest[-1], Geometry.of(kernel, stride, padding, dilation, groups))


def _conv2d_dense_fake(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None,
    n: int, k: int, bits: int, group: int, kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, groups: int,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return _image(x, n, out_dtype, Geometry.of(kernel, stride, padding, dilation, groups))


def _embedding_fake(
    indices: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None,
    v: int, d: int, bits: int, group: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return indices.new_empty((*indices.shape, d), dtype=out_dtype)


_WEIGHT = "Tensor data, Tensor scale, Tensor? zero"
_SIZES = "int n, int k, int bits, int group"
_WINDOW = "int[2] kernel, int[2] stride, int[2] padding, int[2] dilation, int groups"
_NUMBERS = (
    "bool symmetric, float? static_scale, int static_zero_point, float? output_scale, int output_zero_point, "
    "ScalarType out_dtype"
)

op_linear_a8 = define(
    f"linear_a8(Tensor x, {_WEIGHT}, Tensor? sums, Tensor? bias, Tensor? x_scale, Tensor? x_zero_point, "
    f"Tensor? out_scale, Tensor? out_zero_point, {_SIZES}, {_NUMBERS}) -> Tensor",
    linear_a8,
    _linear_a8_fake,
)
op_linear_dense = define(
    f"linear_dense(Tensor x, {_WEIGHT}, Tensor? bias, {_SIZES}, ScalarType out_dtype) -> Tensor",
    linear_dense,
    _linear_dense_fake,
)
op_conv2d_a8 = define(
    f"conv2d_a8(Tensor x, {_WEIGHT}, Tensor? sums, Tensor? bias, {_SIZES}, {_WINDOW}, {_NUMBERS}) -> Tensor",
    conv2d_a8,
    _conv2d_a8_fake,
)
op_conv2d_groups_a8 = define(channel_groups.SCHEMA, conv2d_groups_a8, channel_groups.fake)
op_conv2d_dense = define(
    f"conv2d_dense(Tensor x, {_WEIGHT}, Tensor? bias, {_SIZES}, {_WINDOW}, ScalarType out_dtype) -> Tensor",
    conv2d_dense,
    _conv2d_dense_fake,
)
op_embedding = define(
    f"embedding(Tensor indices, {_WEIGHT}, int v, int d, int bits, int group, ScalarType out_dtype) -> Tensor",
    embedding,
    _embedding_fake,
)
