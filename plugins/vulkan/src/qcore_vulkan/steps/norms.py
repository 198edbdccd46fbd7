"""Normalizations and softmax along the last dimension, whatever the strides of the others; float32."""

from __future__ import annotations

import math

from ..builder import Builder, Ref, fold
from ..device import Device
from .operand import Operand, merge, new, result

_MOST_DIMS = 5
_RMS_NORM, _LAYER_NORM, _SOFTMAX, _LOG_SOFTMAX = range(4)


def rms_norm(b: Builder, x: Operand, weight: Operand | None, eps: float, out: Operand | None = None) -> Operand:
    """``x * rsqrt(mean(x^2) + eps) * weight``; ``weight``: contiguous, of the last dimension."""
    return _launch(b, _RMS_NORM, x, weight, None, eps, None, out)[0]


def layer_norm(
    b: Builder, x: Operand, weight: Operand | None, bias: Operand | None, eps: float, out: Operand | None = None
) -> Operand:
    """``(x - mean) * rsqrt(var + eps) * weight + bias``; ``weight``, ``bias``: contiguous, of the last dimension."""
    return _launch(b, _LAYER_NORM, x, weight, bias, eps, None, out)[0]


def add_rms_norm(
    b: Builder, x: Operand, residual: Operand, weight: Operand | None, eps: float
) -> tuple[Operand, Operand]:
    """``rms_norm(x + residual)``, and the sum, both new. The shapes are equal."""
    return _launch(b, _RMS_NORM, x, weight, None, eps, residual, None)


def add_layer_norm(
    b: Builder, x: Operand, residual: Operand, weight: Operand | None, bias: Operand | None, eps: float
) -> tuple[Operand, Operand]:
    """``layer_norm(x + residual)``, and the sum, both new. The shapes are equal."""
    return _launch(b, _LAYER_NORM, x, weight, bias, eps, residual, None)


def softmax(b: Builder, x: Operand, log: bool = False, out: Operand | None = None) -> Operand:
    """Softmax along the last dimension, or its logarithm."""
    return _launch(b, _LOG_SOFTMAX if log else _SOFTMAX, x, None, None, 0.0, None, out)[0]


def _launch(
    b: Builder,
    function: int,
    x: Operand,
    weight: Operand | None,
    bias: Operand | None,
    eps: float,
    residual: Operand | None,
    out: Operand | None,
) -> tuple[Operand, Operand]:
    """The result, and the sum with the residual (without one: x)."""
    y = result(b, x.shape, x.dtype, out)
    total = x if residual is None else new(b, x.shape, x.dtype)
    if x.numel == 0:
        return y, total
    operands = [x, y, x if residual is None else residual]
    sizes, strides = merge(x.shape[:-1], *(operand.strides[:-1] for operand in operands))
    if len(sizes) > _MOST_DIMS:
        raise ValueError(f"rows over {len(sizes)} dimensions that cannot be merged: copy them to contiguous memory")
    columns, rows = x.shape[-1], math.prod(x.shape[:-1])
    steps = [operand.strides[-1] for operand in operands]
    vectors = columns % 4 == 0 and all(map(_aligned, operands, strides))
    push: list[int | float] = [rows, columns, *_padded(sizes)]
    for own in strides:
        push += _padded(own)
    given = (weight is not None) + 2 * (bias is not None)
    push += [*steps, *(operand.offset for operand in operands), given, eps]
    constants = (lanes_of_row(b.device, columns), len(sizes), function, int(vectors), int(residual is not None))
    written = y if residual is None else total  # a binding that is not used, but must be set
    refs = [x.ref, _vector(weight, x), _vector(bias, x), operands[2].ref, None, None, written.ref, y.ref]
    b.dispatch("rows", constants, fold(rows), push, refs)
    return y, total


def lanes_of_row(device: Device, columns: int) -> int:
    """Lanes of the workgroup that takes a row, a power of two: each takes about four columns."""
    if device.profile == "cpu":
        return 8
    most = 1 << min(512, device.description.limits.max_invocations).bit_length() - 1
    return min(most, max(32, 1 << max(columns // 4 - 1, 0).bit_length()))


def _vector(values: Operand | None, instead: Operand) -> Ref:
    """The memory of a weight or bias; any memory if there is none."""
    if values is None:
        return instead.ref
    if not values.is_contiguous or values.offset % 64:
        raise ValueError("the weight and bias of a normalization must be contiguous, at the beginning of their memory")
    return values.ref.part(4 * values.offset, 4 * values.numel)


def _aligned(x: Operand, outer: list[int]) -> bool:
    return x.strides[-1] == 1 and x.offset % 4 == 0 and all(stride % 4 == 0 for stride in outer)


def _padded(values: list[int]) -> list[int]:
    return [*values, *[0] * (_MOST_DIMS - len(values))]
