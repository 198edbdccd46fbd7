"""Activations as codes for oneDNN's int8 product, in as few passes over x as torch's ops allow.

A pass over ``(M, K)`` costs one to two hundredths of the product itself, an op on ``(M, 1)`` a few microseconds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..activations import INT8_MAX, INT8_MIN, Activation, DynamicInt8, dynamic_parameters
from .integer import Given, Parameter, parameters
from .onednn import OFFSET

_SMALLEST = torch.finfo(torch.float32).smallest_normal


def quantized(activation: Activation, x: Tensor, given: Given) -> tuple[Tensor, Parameter, Parameter | None]:
    """Codes of x ``(M, K)`` as float32, their scale and zero point (None where there is none)."""
    values = x.float()
    scale: Parameter
    zero: Parameter | None = None
    if not isinstance(activation, DynamicInt8):
        scale, zero = parameters(activation, given, "x")
    elif activation.symmetric:
        # A row of zeros gives zeros for any scale; NaN passes through.
        scale = _largest(values).div_(INT8_MAX).clamp_min_(_SMALLEST)
    else:
        scale, zero = dynamic_parameters(values, False)
    if x.dtype == torch.int8:
        return values, scale, zero
    values = (values / scale if values is x else values.div_(scale)).round_()
    if zero is None:
        return values, scale, zero  # at most 127 by construction
    return values.add_(zero).clamp_(INT8_MIN, INT8_MAX), scale, zero


def one_token(x: Tensor) -> tuple[Tensor, float, float]:
    """`quantized` for a single row, symmetric: its scale as a number saves the small ops."""
    values = x.float()
    scale = max(float(values.abs().amax()) / INT8_MAX, _SMALLEST)  # NaN stays, being first
    return (values / scale).round_(), scale, 0.0


def unsigned(codes: Tensor) -> Tensor:
    """Codes as float32 to uint8, plus 128: flipping the top bit adds it. Through int8, which is the fast conversion."""
    return codes.to(torch.int8).view(torch.uint8).bitwise_xor_(OFFSET)


def whole_numbers(x: Tensor, bits: int) -> tuple[Tensor, Tensor | float]:
    """``x = values * scale`` per row: values are whole numbers up to ``2**bits`` in float32, the scale a power of two.

    bfloat16 values are exact as long as they are above ``2**(8 - bits)`` of the row's largest; smaller ones err by at
    most ``2**-bits`` of it. A row that holds NaN or Inf gets the scale NaN.
    """
    values = x.float()
    scale: Tensor | float
    if x.shape[0] == 1 and not torch.compiler.is_compiling() and type(x) is Tensor:
        largest = float(values.abs().amax())
        scale = math.ldexp(1.0, max(math.frexp(largest)[1], -90) - bits) if math.isfinite(largest) else math.nan
        return torch.mul(values, 1.0 / scale).round_(), scale
    top = _largest(values)
    # The exponent bits alone are the power of two at or below a number.
    power = (top.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_min_(2.0**-90)
    scale = power * 2.0 ** (1 - bits)
    values = values / scale if values is x else values.div_(scale)
    return values.round_(), scale + (top - top)


def digit_rows(values: Tensor, digits: int) -> Tensor:
    """Whole numbers ``(M, K)`` to rows of signed base-256 digits, lowest first: uint8 ``(digits * M, K)``, each + 128.

    Adding 128 to every digit at once turns signed digits into the bytes of an unsigned number.
    """
    shifted = values.to(torch.int32).add_(_SHIFTS[digits])
    rows = torch.empty((digits, *values.shape), dtype=torch.uint8, device=values.device)
    for i in range(digits):
        rows[i].copy_(shifted if i == 0 else shifted.bitwise_right_shift_(8))
    return rows.flatten(0, 1)


_SHIFTS = {3: 0x808080, 4: 0x80808080 - (1 << 32)}


def _largest(values: Tensor) -> Tensor:
    """The largest size in each row, ``(M, 1)``; two reductions are faster than one of the absolute values."""
    return torch.maximum(values.amax(-1, keepdim=True), values.amin(-1, keepdim=True).neg_())
