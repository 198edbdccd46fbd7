"""Products through torch's ops for XPU, from plain tensors to the contract's result; `linear` has the kernels.

Each is an op, ``torch.ops.qcore_xpu.*``: opaque to a graph, so that it may look at the number of rows when it runs.
What the device's op leaves to do (scales that did not fit, corrections, a bias) happens in float32, and is rounded once
more: `aten.int4_mm` and `aten.int8_mm` give their sums in x's dtype only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qcore.activations import quantize_int8

from . import aten, ops
from .int32 import Form, own, power_of_two

# ruff: noqa: ARG001 - a fake has the signature of its op

_HALF = torch.finfo(torch.float16)


def linear_w4a16(
    x: Tensor, data: Tensor, factor: Tensor, zeros: Tensor, after: Tensor | None, rest: Tensor | None,
    tail: Tensor | None, bias: Tensor | None, n: int, form: list[int],
) -> Tensor:  # fmt: skip
    """``x @ W^T + bias``: x ``(M, K)`` bfloat16 or float16, of any strides, to ``(M, N)`` of its dtype.

    The weight is packed as `int32.pack` says (``factor``: or ``scale``, where there is none); ``form``: the fields of
    its `Form`.
    """
    if not x.shape[0]:
        return x.new_empty((0, n))
    where = Form._make(form)
    with ops.settled(x):
        rows, level = _levelled(x) if after is not None and x.dtype == torch.float16 else (x, None)
        added = None if bias is None else bias.float()
        if where.biased:
            inside, added = _split_bias(bias, after, factor) if level is None else (None, added)
            factor = torch.cat((factor, torch.zeros_like(factor[:1]) if inside is None else inside))
        y = aten.int4_mm(own(where.spread(rows, tail)), data, where.step, factor, zeros)
        if after is None and rest is None and added is None:
            return y
        total = y.float() if after is None else y * after  # float32
        if level is not None:
            total *= level
        if rest is not None:
            total = torch.addmm(total, where.grouped(x).sum(-1, dtype=torch.float32), rest)
        if added is not None:
            total += added
        return total.to(x.dtype)


def _split_bias(bias: Tensor | None, after: Tensor | None, factor: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The bias as a row of scales, ``(1, N)`` of x's dtype, and what is left of it, float32 ``(N,)``; None for 0."""
    if bias is None or (after is None and bias.dtype == factor.dtype):
        return None if bias is None else bias.unsqueeze(0), None
    wanted = bias.float() if after is None else bias.float() / after
    most = torch.finfo(factor.dtype).max / 2
    inside = wanted.nan_to_num(0.0, 0.0, 0.0).clamp(-most, most).to(factor.dtype)
    return inside.unsqueeze(0), bias - (inside.float() if after is None else inside.float() * after)


def _levelled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x times a power of two each, such that the largest number of a row is 1 or less, and what undoes it."""
    values = x.float()
    # A row of zeros, Inf or NaN keeps what it is for any finite factor.
    top = values.abs().amax(-1, keepdim=True).nan_to_num(1.0).clamp(_HALF.smallest_normal * _HALF.eps, _HALF.max)
    exponent = (top.view(torch.int32) >> 23) - 126
    return (values * power_of_two(-exponent)).to(x.dtype), power_of_two(exponent)


def linear_w8a16(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, n: int) -> Tensor:
    """``x @ W^T + bias``: x ``(M, K)`` bfloat16 or float16, of any strides, to ``(M, N)`` of its dtype.

    ``data``: int8 ``(N, K)``; ``scale``: float32 ``(N,)``.
    """
    if not x.shape[0]:
        return x.new_empty((0, n))
    with ops.settled(x):
        y = aten.int8_mm(own(x), data, scale)
        return y if bias is None else (y + bias).to(x.dtype)  # torch adds in float32, whatever the dtypes


EXACT_K = 1 << 15
"""Columns whose products of differences between int8 codes and zero points, 255 * 255 each, add up within int32."""


def linear_w8a8(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, sums: Tensor, bias: Tensor | None,
    x_scale: Tensor | None, x_zero_point: Tensor | None, out_scale: Tensor | None, out_zero_point: Tensor | None,
    n: int, k: int, symmetric: bool, static_scale: float | None, static_zero_point: int,
    output_scale: float | None, output_zero_point: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``A(x) @ W^T + bias`` with int8 A(x): x ``(M, K)`` float or int8 codes, to ``(M, N)``.

    Weight: ``data`` int8 ``(K, N)``; ``scale``: ``(N,)``; ``zero``: int8 ``(N,)`` is subtracted from codes, a float one
    added to ``q * scale``; ``sums``: int32 ``(parts, N)``, sums of codes less their int8 zero point over each `EXACT_K`
    columns. Activations: ``x_scale`` and ``x_zero_point`` ``(M,)`` where given, else ``static_scale`` and
    ``static_zero_point`` where given, else per token, ``symmetric`` or not. Results: int8 by ``out_scale`` and
    ``out_zero_point`` ``(M,)``, or by ``output_scale`` and ``output_zero_point``, else of ``out_dtype``.
    """
    from . import quantizing

    if not x.shape[0]:
        return x.new_empty((0, n), dtype=out_dtype)
    given = (x_scale, x_zero_point) if x_scale is not None else (static_scale, static_zero_point)
    with ops.settled(x):
        codes = quantizing.rows(x, symmetric, *given)
        x_zero = None if codes.zero is None else codes.zero.reshape(-1, 1).to(torch.int32)
        total = _scaled_sums(codes.q[:, :k], x_zero, data, scale, zero, sums)
        total *= codes.scale.reshape(-1, 1)
        if bias is not None:
            total += bias
        if out_scale is not None and out_zero_point is not None:
            return quantize_int8(total, out_scale.reshape(-1, 1).float(), out_zero_point.reshape(-1, 1))
        if output_scale is not None:
            return quantize_int8(total, output_scale, output_zero_point)
        return total.to(out_dtype)


def _scaled_sums(
    q: Tensor, x_zero: Tensor | None, data: Tensor, scale: Tensor, zero: Tensor | None, sums: Tensor
) -> Tensor:
    """``sum over k of (q - x_zero) * w`` in float32 ``(M, N)``: exact in int32 but for scales and float zero points."""
    whole = zero is not None and zero.dtype == torch.int8
    total: Tensor | None = None
    for part, start in enumerate(range(0, q.shape[1], EXACT_K)):
        cut = slice(start, start + EXACT_K)
        codes = own(q[:, cut])
        # sum (q - a)(w - b) = sum q w - b sum q - a sum (w - b), each of them within int32.
        found = aten.int_mm(codes, data[cut])
        if zero is not None and whole:
            found -= codes.sum(-1, keepdim=True, dtype=torch.int32) * zero.to(torch.int32)
        if x_zero is not None:
            found -= x_zero * sums[part]
        total = found.float() if total is None else total.add_(found)
    assert total is not None  # K is at least 1
    total *= scale
    if zero is None or whole:
        return total
    centred = q.sum(-1, keepdim=True, dtype=torch.int64)
    centred = centred if x_zero is None else centred - x_zero * q.shape[1]
    return torch.addcmul(total, centred.float(), zero.float())


def _w4a16_fake(x: Tensor, data: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((x.shape[0], data.shape[0]))


def _w8a16_fake(x: Tensor, data: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((x.shape[0], data.shape[0]))


def _w8a8_fake(x: Tensor, data: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((x.shape[0], data.shape[1]), dtype=rest[-1])


op_linear_w4a16 = ops.define(
    "linear_w4a16(Tensor x, Tensor data, Tensor factor, Tensor zeros, Tensor? after, Tensor? rest, Tensor? tail, "
    "Tensor? bias, int n, int[] form) -> Tensor",
    linear_w4a16,
    _w4a16_fake,
)
op_linear_w8a16 = ops.define(
    "linear_w8a16(Tensor x, Tensor data, Tensor scale, Tensor? bias, int n) -> Tensor", linear_w8a16, _w8a16_fake
)
op_linear_w8a8 = ops.define(
    "linear_w8a8(Tensor x, Tensor data, Tensor scale, Tensor? zero, Tensor sums, Tensor? bias, Tensor? x_scale, "
    "Tensor? x_zero_point, Tensor? out_scale, Tensor? out_zero_point, int n, int k, bool symmetric, "
    "float? static_scale, int static_zero_point, float? output_scale, int output_zero_point, ScalarType out_dtype) "
    "-> Tensor",
    linear_w8a8,
    _w8a8_fake,
)
