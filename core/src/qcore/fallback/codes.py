"""Quantize activations to uint8 for oneDNN's int8 product, with as few ops and passes over x as torch allows.

After a product has streamed its weight through the caches, every op costs five to ten microseconds, as much as a pass
over a few rows of x. Hence the trick used throughout: a float32 near ``1.5 * 2**23`` has no fraction bits, so adding
that number rounds half to even and leaves the rounded integer in the low bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..weights.activations import INT8_MAX, INT8_MIN, DynamicInt8, Int8Activation, dynamic_parameters, smallest_scale
from .integer import Parameter, RuntimeParams, parameters
from .onednn import OFFSET

_LARGE = 2.0**96
"""If no value of a row exceeds this, the row's sum stays finite in float32."""
_ROUND_BYTE = 3 * 2**22 + OFFSET  # an integer: see `smallest_scale`


def quantized(
    activation: Int8Activation, x: Tensor, runtime_params: RuntimeParams
) -> tuple[Tensor, Parameter, Parameter | None]:
    """Codes of x ``(..., K)`` as float32, their scale and zero point (None if there is none)."""
    values = x.float()
    scale: Parameter
    zero: Parameter | None
    if isinstance(activation, DynamicInt8):
        scale, zero = dynamic_parameters(values, activation.symmetric)
    else:
        scale, zero = parameters(activation, runtime_params, "x")
    if x.dtype == torch.int8:
        return values, scale, zero
    values = (values / scale if values is x else values.div_(scale)).round_()
    if zero is None:
        return values, scale, zero  # at most 127 by construction
    if isinstance(activation, DynamicInt8):
        # A zero row must give exact zeros: a nonzero zero point would leave a float32 rounding error.
        zero = zero * values.any(-1, keepdim=True)
    return values.add_(zero).clamp_(INT8_MIN, INT8_MAX), scale, zero


def unsigned(values: Tensor, zero: int = 0) -> Tensor:
    """Return ``round(values) + zero + 128`` as uint8.

    ``values``: float32, overwritten. If ``zero`` is odd, they must be integers: rounding half to even would be off.
    """
    return values.add_(_ROUND_BYTE + zero).view(torch.int32).to(torch.uint8)


def symmetric_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x with a symmetric scale per token: uint8 codes (offset 128) ``(M, K)`` and the scale ``(M, 1)``."""
    values = x.float()
    # A row of zeros gives zeros for any scale; NaN propagates, and an infinity becomes NaN, as its sign would be lost.
    scale = values.abs().amax(-1, keepdim=True).div_(INT8_MAX).clamp_min_(smallest_scale())
    scale = scale + (scale - scale)
    inverse = scale.reciprocal()
    return unsigned(values * inverse if values is x else values.mul_(inverse)), scale


def symmetric_token(x: Tensor) -> tuple[Tensor, float]:
    """`symmetric_tokens` for a single row; a Python float as the scale saves several small ops."""
    values = x.float()
    scale = max(float(values.abs().amax()) / INT8_MAX, smallest_scale())  # max() returns its first argument for NaN
    scale += scale - scale  # NaN for an infinity
    return unsigned(values / scale), scale


def static_codes(x: Tensor, scale: float, zero: int) -> Tensor:
    """Quantize float x with one scale and zero point; returns uint8 codes (offset 128)."""
    values = x.float()
    values = values * (1.0 / scale) if values is x else values.mul_(1.0 / scale)
    return unsigned(values.clamp_(INT8_MIN - zero, INT8_MAX - zero).round_(), zero)


def to_fixed_point(x: Tensor, bits: int, limit: float = 0.0) -> tuple[Tensor, Tensor | float, Tensor | None]:
    """Convert each row to fixed point, ``x = values * scale``.

    ``values`` are integers up to ``2**bits`` stored in float32; ``scale`` is a power of two. bfloat16 elements above
    ``2**(8 - bits)`` of the row's maximum are exact; smaller ones are off by at most ``2**-bits`` of the maximum. A
    row with NaN or Inf gets the scale NaN.

    The third result holds the indices of the rows for which this is too coarse, or None: rows whose absolute values
    sum to less than ``limit`` times their maximum, and rows whose maximum is close to the limits of float32.
    """
    values = x.float()
    magnitude = values.abs()
    top, total = magnitude.amax(-1, keepdim=True), magnitude.sum(-1, keepdim=True)
    inverse: Tensor | float
    scale: Tensor | float
    if x.shape[0] == 1:
        largest = float(top)
        scale = math.ldexp(1.0, max(math.frexp(largest)[1], bits - 126) - bits) if math.isfinite(largest) else math.nan
        inverse = 1.0 / scale
        inside = 2.0 ** (bits - 127) <= largest <= _LARGE and float(total) >= limit * largest
        coarse = None if inside or not 0.0 < largest < math.inf else torch.zeros(1, dtype=torch.int64)
    else:
        # Keeping only the exponent bits rounds a number down to a power of two.
        power = (top.view(torch.int32) & 0x7F800000).view(torch.float32)
        coarse = _coarse_rows(top, total, 2.0 ** (bits - 127), limit) if limit else None
        power = power.clamp_min_(2.0 ** (bits - 127))
        # top - top is NaN for NaN and Inf, and 0 otherwise.
        inverse, scale = power.reciprocal().mul_(2.0 ** (bits - 1)), power * 2.0 ** (1 - bits) + (top - top)
    values = values * inverse if values is x else values.mul_(inverse)
    return values.round_(), scale, coarse


def _coarse_rows(top: Tensor, total: Tensor, least: float, limit: float) -> Tensor | None:
    # Python floats: an op on a few rows costs as much as a pass over all of x.
    pairs = enumerate(zip(top.view(-1).tolist(), total.view(-1).tolist(), strict=True))
    rows = [i for i, (t, s) in pairs if not (s >= limit * t and least <= t <= _LARGE) and 0.0 < t < math.inf]
    return torch.tensor(rows) if rows else None


def digit_rows(values: Tensor, digits: int) -> Tensor:
    """Split integers ``(M, K)`` into signed base-256 digits, lowest first: uint8 ``(digits * M, K)``, offset 128.

    Adding 128 at every digit position turns the signed digits into the bytes of an unsigned integer.
    """
    # One column with the strides of a transposed x counts as contiguous, but its bytes could not be viewed.
    number = values.to(torch.int32, memory_format=torch.contiguous_format).add_(_ALL_OFFSETS[digits])
    planes = number.view(torch.uint8).view(*values.shape, 4)[..., :digits].permute(2, 0, 1)
    return planes.reshape(-1, values.shape[1])


_ALL_OFFSETS = {2: 0x8080, 3: 0x808080, 4: 0x80808080 - (1 << 32)}


def group_sums(values: Tensor, group: int) -> Tensor:
    """Sum ``(M, K)`` over groups of ``group`` columns to ``(M, G)``; the last group may be ragged."""
    rows, k = values.shape
    if group >= k:
        return values.sum(-1, keepdim=True)
    ragged = -k % group
    values = torch.nn.functional.pad(values, (0, ragged)) if ragged else values
    return values.reshape(rows, -1, group).sum(-1)
