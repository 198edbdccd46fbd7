"""Products through torch's ops for XPU, from plain tensors to the contract's result; `linear` has the kernels.

Each is an op, ``torch.ops.qcore_xpu.*``: opaque to a graph, so that it may read the number of rows when it runs.
The remaining work (scales that did not fit, corrections, a bias) is done in float32, and rounded once more:
`aten.int4_mm` and `aten.int8_mm` return their sums in x's dtype only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qcore.plugin_api import GIVEN_NAMES, quantize_int8
from qcore_triton.codes import given_of
from qcore_triton.weights import bias_of, check_devices

from . import aten, biases, ops
from .device import exact
from .int32 import Form, own, power_of_two

# ruff: noqa: ARG001 - a fake has the signature of its op

_HALF = torch.finfo(torch.float16)


def linear_w4a16(
    x: Tensor, data: Tensor, factor: Tensor, zeros: Tensor, after: Tensor | None, levels: Tensor | None,
    rest: Tensor | None, tail: Tensor | None, bias: Tensor | None, form: list[int],
) -> Tensor:  # fmt: skip
    """``x @ W^T + bias``: x ``(M, K)`` bfloat16 or float16, of any strides, to ``(M, N)`` of its dtype.

    The weight is packed by `int32.pack` (``factor``: or ``scale``, if there is none); ``form``: the fields of
    its `Form`.
    """
    check_devices(x, data, {"bias": bias})
    if not x.shape[0]:
        return x.new_empty((0, data.shape[0]))
    where, bias = Form._make(form), bias_of(bias, data.shape[0])
    with ops.device_guard(x):
        rows, level = (x, None) if levels is None else _levelled(x)
        if where.biased:
            inside, bias = _split_bias(bias, after, factor) if levels is None else (None, bias)
            factor = torch.cat((factor, torch.zeros_like(factor[:1]) if inside is None else inside.unsqueeze(0)))
        y = aten.int4_mm(own(where.spread(rows, tail)), data, where.step, factor, zeros)
        if after is None and levels is None and rest is None and bias is None:
            return y
        more = None if rest is None else _rest(where.grouped(x), rest)
        if levels is not None and level is not None:
            return _finished(y * levels, level, more, bias, x.dtype)
        return _finished(y, after, more, bias, x.dtype)


def _rest(x: Tensor, rest: Tensor) -> Tensor:
    """The remaining term of a FLOAT zero point, float32 ``(M, N)``: sums of x ``(M, G, group)`` times ``rest``."""
    with exact(torch.float32):
        return x.sum(-1, dtype=torch.float32) @ rest


def _split_bias(bias: Tensor | None, after: Tensor | None, factor: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The bias as scales, ``(N,)`` of x's dtype, and the remainder, float32 ``(N,)``; None for 0."""
    if bias is None or after is None:
        return biases.split(bias, factor.dtype)
    most = biases.most(factor.dtype)
    inside = (bias / after).clamp(-most, most).to(factor.dtype)
    return inside, bias - inside * after


def _finished(y: Tensor, after: Tensor | None, more: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``y * after + more + bias``, rounded once: torch computes in float32 if one of the operands is."""
    added = bias if more is None else more if bias is None else more.add_(bias)
    out = torch.empty_like(y, dtype=dtype)
    if added is None:
        assert after is not None
        return torch.mul(y, after, out=out)
    return torch.add(y if after is None else y * after, added, out=out)


def _levelled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x times a power of two each, so that no number of a row exceeds 1, and the inverse factors."""
    values = x.float()
    # A row of zeros, Inf or NaN is unchanged by any finite factor.
    top = values.abs().amax(-1, keepdim=True).nan_to_num(1.0).clamp(_HALF.smallest_normal * _HALF.eps, _HALF.max)
    exponent = (top.view(torch.int32) >> 23) - 126
    return (values * power_of_two(-exponent)).to(x.dtype), power_of_two(exponent)


FEW_ROWS = 32
"""Up to this many rows, reading the weight takes longer than multiplying, so float32 products cost no more."""
_CHUNK = 1 << 24
"""Weights dequantized at a time, 32 MiB: a large weight is never dequantized as a whole."""


def linear_w8a16(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, wide: bool) -> Tensor:
    """``x @ W^T + bias``: x ``(M, K)`` bfloat16 or float16, of any strides, to ``(M, N)`` of its dtype.

    ``data``: int8 ``(N, K)``; ``scale``: float32 ``(N,)``. The op has no bias, and a bias added to a 16-bit result is
    rounded a second time: few rows use float32 sums, many rows a dequantized weight and a product with a bias.
    ``wide``: the weight does not fit x's dtype, so sums are float32 for any number of rows.
    """
    check_devices(x, data, {"bias": bias})
    if not x.shape[0]:
        return x.new_empty((0, data.shape[0]))
    bias = bias_of(bias, data.shape[0])
    with ops.device_guard(x):
        if bias is None:
            return aten.int8_mm(own(x), data, scale)
        if wide or x.shape[0] <= FEW_ROWS:
            return _finished(aten.int8_mm(own(x.float()), data, scale), None, None, bias, x.dtype)
        return _dequantized(x, data, scale, bias)


def _dequantized(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    inside, left = biases.split(bias, x.dtype)
    n, k = data.shape
    step, parts = max(1, _CHUNK // k), []
    for first in range(0, n, step):
        rows = slice(first, first + step)
        codes = data[rows]
        weight = torch.mul(codes, scale[rows].unsqueeze(1), out=torch.empty_like(codes, dtype=x.dtype))
        parts.append(F.linear(x, weight, None if inside is None else inside[rows]))
    y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return y if left is None else y.add_(left)


EXACT_K = 1 << 15
"""Columns whose products of differences between int8 codes and zero points, 255 * 255 each, add up within int32."""


def linear_w8a8(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, sums: Tensor, bias: Tensor | None,
    x_scale: Tensor | None, x_zero_point: Tensor | None, out_scale: Tensor | None, out_zero_point: Tensor | None,
    k: int, symmetric: bool, static_scale: float | None, static_zero_point: int,
    output_scale: float | None, output_zero_point: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``A(x) @ W^T + bias`` with int8 A(x): x ``(M, K)`` float or int8 codes, to ``(M, N)``.

    Weight: ``data`` int8 ``(KQ, N)``, as many rows as codes of x have columns, 0 beyond K; ``scale``: float32
    ``(N,)``; ``zero``: int8 ``(N,)`` is subtracted from codes, a float one added to ``q * scale``; ``sums``: int32
    ``(parts, N)``, sums of codes minus their int8 zero point over each `EXACT_K` columns. Activations: ``x_scale`` and
    ``x_zero_point`` ``(M,)`` if given, else ``static_scale`` and ``static_zero_point`` if given, else per token,
    ``symmetric`` or not. Results: int8 by ``out_scale`` and ``out_zero_point`` ``(M,)``, or by ``output_scale`` and
    ``output_zero_point``, else of ``out_dtype``.
    """
    from . import quantizing

    given = zip(GIVEN_NAMES, (x_scale, x_zero_point, out_scale, out_zero_point), strict=True)
    check_devices(x, data, {"bias": bias, **dict(given)})
    if not x.shape[0]:
        return x.new_empty((0, data.shape[1]), dtype=out_dtype)
    bias = bias_of(bias, data.shape[1])
    of_x = given_of(x_scale, x_zero_point, static_scale, static_zero_point)
    of_y = given_of(out_scale, out_zero_point, output_scale, output_zero_point)
    with ops.device_guard(x):
        codes = quantizing.rows(x, symmetric, of_x)
        x_zero = None if codes.zero is None else codes.zero.reshape(-1, 1).to(torch.int32)
        total, x_scale = _scaled_sums(codes.q, k, x_zero, data, scale, zero, sums), codes.scale.reshape(-1, 1)
        if of_y is None:
            return _finished(total, x_scale, None, bias, out_dtype)
        total *= x_scale
        if bias is not None:
            total += bias
        return quantize_int8(total, *map(_per_row, of_y))


def _per_row(parameter: Tensor | float) -> Tensor | float:
    return parameter.reshape(-1, 1).float() if isinstance(parameter, Tensor) else parameter


def _scaled_sums(
    q: Tensor, k: int, x_zero: Tensor | None, data: Tensor, scale: Tensor, zero: Tensor | None, sums: Tensor
) -> Tensor:
    """``sum over k of (q - x_zero) * w`` in float32 ``(M, N)``: exact in int32 except for scales, float zero points."""
    whole = zero is not None and zero.dtype == torch.int8
    total: Tensor | None = None
    for part, start in enumerate(range(0, k, EXACT_K)):
        cut = slice(start, start + EXACT_K)
        codes = own(q[:, cut])
        # sum (q - a)(w - b) = sum q w - b sum q - a sum (w - b), each of them within int32.
        found = aten.int_mm(codes, data[cut])
        if zero is not None and whole:
            found -= codes.sum(-1, keepdim=True, dtype=torch.int32) * zero
        if x_zero is not None:
            found.addcmul_(x_zero, sums[part], value=-1)
        total = found if total is None else total.float().add_(found)
    assert total is not None  # K is at least 1
    total = total * scale
    if zero is None or whole:
        return total
    centred = q.sum(-1, keepdim=True, dtype=torch.int64)
    centred = centred if x_zero is None else centred - x_zero * k
    return torch.addcmul(total, centred.float(), zero.float())


def _a16_fake(x: Tensor, data: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((x.shape[0], data.shape[0]))


def _w8a8_fake(x: Tensor, data: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((x.shape[0], data.shape[1]), dtype=rest[-1])


op_linear_w4a16 = ops.define(
    "linear_w4a16(Tensor x, Tensor data, Tensor factor, Tensor zeros, Tensor? after, Tensor? levels, Tensor? rest, "
    "Tensor? tail, Tensor? bias, int[] form) -> Tensor",
    linear_w4a16,
    _a16_fake,
)
op_linear_w8a16 = ops.define(
    "linear_w8a16(Tensor x, Tensor data, Tensor scale, Tensor? bias, bool wide) -> Tensor",
    linear_w8a16,
    _a16_fake,
)
op_linear_w8a8 = ops.define(
    "linear_w8a8(Tensor x, Tensor data, Tensor scale, Tensor? zero, Tensor sums, Tensor? bias, Tensor? x_scale, "
    "Tensor? x_zero_point, Tensor? out_scale, Tensor? out_zero_point, int k, bool symmetric, "
    "float? static_scale, int static_zero_point, float? output_scale, int output_zero_point, ScalarType out_dtype) "
    "-> Tensor",
    linear_w8a8,
    _w8a8_fake,
)
