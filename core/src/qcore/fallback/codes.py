"""Activations as uint8 for oneDNN's int8 product, in as few ops and passes over x as torch allows.

After a product has streamed its weight through the caches every op costs five to ten microseconds, as much as a pass
over a few rows of x. Hence the trick used throughout: a float32 near ``1.5 * 2**23`` has no fraction bits, so adding
that number rounds half to even and leaves the whole number in the low bits, to be read as an integer.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..activations import INT8_MAX, INT8_MIN, Activation, DynamicInt8, dynamic_parameters
from .integer import Given, Parameter, parameters
from .onednn import OFFSET
from .ops import on_cpu

_SMALLEST = torch.finfo(torch.float32).smallest_normal
_ROUND = 1.5 * 2.0**23
_ROUND_BITS = 0x4B400000
_ROUND_BYTE = _ROUND + OFFSET


def quantized(activation: Activation, x: Tensor, given: Given) -> tuple[Tensor, Parameter, Parameter | None]:
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
    return values.add_(zero).clamp_(INT8_MIN, INT8_MAX), scale, zero


def unsigned(values: Tensor, zero: int = 0) -> Tensor:
    """``round(values) + zero + 128`` as uint8. ``values``: float32, overwritten; whole where ``zero`` is odd."""
    return values.add_(_ROUND_BYTE + zero).view(torch.int32).to(torch.uint8)


def symmetric_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantized` and `unsigned` for symmetric per-token codes: uint8 ``(M, K)`` and the scale ``(M, 1)``."""
    # A row of zeros gives zeros for any scale; NaN passes through.
    scale = (_largest(x) / INT8_MAX).clamp_min_(_SMALLEST)
    values, up = x.float(), scale.reciprocal()
    return unsigned(values * up if values is x else values.mul_(up)), scale


def symmetric_token(x: Tensor) -> tuple[Tensor, float]:
    """`symmetric_tokens` for a single row, whose scale as a number saves the small ops."""
    scale = max(float(x.abs().amax()) / INT8_MAX, _SMALLEST)  # NaN stays, being first
    return torch.add(_constant(_ROUND_BYTE), x, alpha=1.0 / scale).view(torch.int32).to(torch.uint8), scale


def static_codes(x: Tensor, scale: float, zero: int) -> Tensor:
    """Float x quantized with one scale and zero point, as uint8."""
    values = x.float()
    values = values * (1.0 / scale) if values is x else values.mul_(1.0 / scale)
    return unsigned(values.clamp_(INT8_MIN - zero, INT8_MAX - zero).round_(), zero)


def whole_numbers(x: Tensor, digits: int) -> tuple[Tensor, Tensor | float]:
    """``x = (numbers - OFFSETS[digits]) * scale``: int32 numbers of ``digits`` bytes, and a power of two per row.

    With ``bits = 8 * digits - 2``, bfloat16 values are exact as long as they are above ``2**(8 - bits)`` of the row's
    largest; smaller ones err by at most ``2**-bits`` of it. A row that holds NaN or Inf gets the scale NaN.
    """
    bits, scale = 8 * digits - 2, math.nan
    if x.shape[0] == 1 and not torch.compiler.is_compiling() and type(x) is Tensor:
        largest = float(x.abs().amax())
        if math.isfinite(largest):
            scale = math.ldexp(1.0, max(math.frexp(largest)[1], bits - 126) - bits)
        return _rounded(x, 1.0 / scale, digits), scale
    values, top = x.float(), _largest(x)
    # The exponent bits alone are the power of two at or below a number.
    power = (top.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_min_(2.0 ** (bits - 127))
    up = power.reciprocal().mul_(2.0 ** (bits - 1))
    values = values * up if values is x else values.mul_(up)
    return values.round_().to(torch.int32).add_(OFFSETS[digits]), power * 2.0 ** (1 - bits) + (top - top)


def _rounded(x: Tensor, up: float, digits: int) -> Tensor:
    """``round(x * up) + OFFSETS[digits]`` as int32."""
    if digits > 3:
        return torch.mul(x.float(), up).round_().to(torch.int32).add_(OFFSETS[digits])
    return torch.add(_constant(_ROUND), x, alpha=up).view(torch.int32).add_(OFFSETS[digits] - _ROUND_BITS)


def digit_rows(numbers: Tensor, digits: int) -> Tensor:
    """The bytes of int32 numbers ``(M, K)``, lowest first: uint8 ``(digits * M, K)``.

    Less 128 each they are signed base-256 digits of ``numbers - OFFSETS[digits]``.
    """
    if torch.compiler.is_compiling():
        return torch.cat([(numbers >> 8 * i).to(torch.uint8) for i in range(digits)])
    planes = numbers.view(torch.uint8).view(*numbers.shape, 4)[..., :digits].permute(2, 0, 1)
    return planes.reshape(-1, numbers.shape[1])


def _largest(x: Tensor) -> Tensor:
    """The largest size in each row, float32 ``(M, 1)``; NaN where there is one.

    Sizes of two bytes are compared as integers, which orders them alike, NaN last, seven times as fast.
    """
    sizes = x.abs()
    if x.element_size() != 2:
        return sizes.amax(-1, keepdim=True).float()
    return sizes.view(torch.int16).amax(-1, keepdim=True).view(x.dtype).float()


OFFSETS = {3: 0x808080, 4: 0x80808080 - (1 << 32)}
"""128 in every digit, as int32."""


@lru_cache(maxsize=4)
def _constant(value: float) -> Tensor:
    """A float32 that counts as a tensor of its own dtype where it meets bfloat16."""
    with on_cpu():
        return torch.full((1, 1), value)
