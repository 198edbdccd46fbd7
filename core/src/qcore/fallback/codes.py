"""Activations as uint8 for oneDNN's int8 product, in as few ops and passes over x as torch allows.

After a product has streamed its weight through the caches every op costs five to ten microseconds, as much as a pass
over a few rows of x. Hence the trick used throughout: a float32 near ``1.5 * 2**23`` has no fraction bits, so adding
that number rounds half to even and leaves the whole number in the low bits, to be read as an integer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..weights.activations import INT8_MAX, INT8_MIN, DynamicInt8, Int8Activation, dynamic_parameters
from .integer import Given, Parameter, parameters
from .onednn import OFFSET

_SMALLEST = torch.finfo(torch.float32).smallest_normal
_LARGE = 2.0**96
"""The sum of a row's values stays finite below it."""
_ROUND_BYTE = 1.5 * 2.0**23 + OFFSET


def quantized(activation: Int8Activation, x: Tensor, given: Given) -> tuple[Tensor, Parameter, Parameter | None]:
    """Codes of x ``(..., K)`` as float32, their scale and zero point (None where there is none)."""
    values = x.float()
    scale: Parameter
    zero: Parameter | None
    if isinstance(activation, DynamicInt8):
        scale, zero = dynamic_parameters(values, activation.symmetric)
    else:
        scale, zero = parameters(activation, given, "x")
    if x.dtype == torch.int8:
        return values, scale, zero
    values = (values / scale if values is x else values.div_(scale)).round_()
    if zero is None:
        return values, scale, zero  # at most 127 by construction
    if isinstance(activation, DynamicInt8):
        # Zeros mean zeros: a zero point beside codes of its own would leave what float32 rounds off.
        zero = zero * values.any(-1, keepdim=True)
    return values.add_(zero).clamp_(INT8_MIN, INT8_MAX), scale, zero


def unsigned(values: Tensor, zero: int = 0) -> Tensor:
    """``round(values) + zero + 128`` as uint8. ``values``: float32, overwritten; whole where ``zero`` is odd."""
    return values.add_(_ROUND_BYTE + zero).view(torch.int32).to(torch.uint8)


def symmetric_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantized` and `unsigned` for symmetric per-token codes: uint8 ``(M, K)`` and the scale ``(M, 1)``."""
    values = x.float()
    # A row of zeros gives zeros for any scale; NaN passes through.
    scale = values.abs().amax(-1, keepdim=True).div_(INT8_MAX).clamp_min_(_SMALLEST)
    up = scale.reciprocal()
    return unsigned(values * up if values is x else values.mul_(up)), scale


def symmetric_token(x: Tensor) -> tuple[Tensor, float]:
    """`symmetric_tokens` for a single row, whose scale as a number saves the small ops."""
    values = x.float()
    scale = max(float(values.abs().amax()) / INT8_MAX, _SMALLEST)  # NaN stays, being first
    return unsigned(values / scale), scale


def static_codes(x: Tensor, scale: float, zero: int) -> Tensor:
    """Float x quantized with one scale and zero point, as uint8."""
    values = x.float()
    values = values * (1.0 / scale) if values is x else values.mul_(1.0 / scale)
    return unsigned(values.clamp_(INT8_MIN - zero, INT8_MAX - zero).round_(), zero)


def whole_numbers(x: Tensor, bits: int, limit: float = 0.0) -> tuple[Tensor, Tensor | float, Tensor | None]:
    """``x = values * scale`` per row: values are whole numbers up to ``2**bits`` in float32, the scale a power of two.

    bfloat16 values are exact as long as they are above ``2**(8 - bits)`` of the row's largest; smaller ones err by at
    most ``2**-bits`` of it. A row that holds NaN or Inf gets the scale NaN. The third result are the indices of rows
    for which that is too coarse, None if there are none: their absolute values sum up to less than ``limit`` times the
    largest, or that is too near either end of float32.
    """
    values = x.float()
    size = values.abs()
    top, total = size.amax(-1, keepdim=True), size.sum(-1, keepdim=True)
    up: Tensor | float
    scale: Tensor | float
    if x.shape[0] == 1:
        largest = float(top)
        scale = math.ldexp(1.0, max(math.frexp(largest)[1], bits - 126) - bits) if math.isfinite(largest) else math.nan
        up = 1.0 / scale
        inside = 2.0 ** (bits - 127) <= largest <= _LARGE and float(total) >= limit * largest
        coarse = None if inside or not 0.0 < largest < math.inf else torch.zeros(1, dtype=torch.int64)
    else:
        # The exponent bits alone are the power of two at or below a number.
        power = (top.view(torch.int32) & 0x7F800000).view(torch.float32)
        coarse = _coarse_rows(top, total, 2.0 ** (bits - 127), limit) if limit else None
        power = power.clamp_min_(2.0 ** (bits - 127))
        up, scale = power.reciprocal().mul_(2.0 ** (bits - 1)), power * 2.0 ** (1 - bits) + (top - top)
    values = values * up if values is x else values.mul_(up)
    return values.round_(), scale, coarse


def _coarse_rows(top: Tensor, total: Tensor, least: float, limit: float) -> Tensor | None:
    # As numbers: each op on a few rows costs as much as a pass over all of x.
    pairs = enumerate(zip(top.view(-1).tolist(), total.view(-1).tolist(), strict=True))
    rows = [i for i, (t, s) in pairs if not (s >= limit * t and least <= t <= _LARGE) and 0.0 < t < math.inf]
    return torch.tensor(rows) if rows else None


def digit_rows(values: Tensor, digits: int) -> Tensor:
    """Whole numbers ``(M, K)`` to rows of signed base-256 digits, lowest first: uint8 ``(digits * M, K)``, each + 128.

    Adding 128 to every digit at once turns signed digits into the bytes of an unsigned number.
    """
    number = values.to(torch.int32).add_(_ALL_OFFSETS[digits])
    planes = number.view(torch.uint8).view(*values.shape, 4)[..., :digits].permute(2, 0, 1)
    return planes.reshape(-1, values.shape[1])


_ALL_OFFSETS = {2: 0x8080, 3: 0x808080, 4: 0x80808080 - (1 << 32)}


def group_sums(values: Tensor, group: int) -> Tensor:
    """Sums of ``(M, K)`` per group of ``group`` columns, the last of which may be short: ``(M, G)``."""
    rows, k = values.shape
    if group >= k:
        return values.sum(-1, keepdim=True)
    ragged = -k % group
    values = torch.nn.functional.pad(values, (0, ragged)) if ragged else values
    return values.reshape(rows, -1, group).sum(-1)
