"""The target of a quantizer: rounds values to the codes of an element, and scales to their stored dtype.

Scales and codes of ``absmax`` are those of compressed-tensors 0.20 (fp8 per channel, MXFP4, MXFP8, NVFP4), modelopt
0.47 (NVFP4) and bitsandbytes 0.50 (NF4, FP4), computed in float32, with these exceptions:

- A group of zeros gets the scale 1, rounded by `Target.round_scale`; the tools store 0 or other numbers. Its weights
  are 0 either way.
- An e4m3 scale that would round to 0 becomes 2**-9, as in modelopt; compressed-tensors stores 0.125, up to 64 times too
  large, and the group is lost.
- Values are divided by the scale in float32; compressed-tensors divides in the dtype of the weight, and in bfloat16 the
  quotient is rounded twice.
- A value half-way between two entries of `fp4_bnb`, to 1e-7, may round to the other one: its entries are thirds, and
  bitsandbytes rounds the borders between them to float32.
- An e8m0 exponent may be one larger if the largest value is one unit in the last place of float32 below the border.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import Element, Format, ScaleType, ZeroPoint
from ..formats.scales import effective_scale, exponents
from .activations import FP8_MAX

_E8M0_MAX = 254
_ROUNDS_UP = 1.75
"""From here on, a number rounded half up to one mantissa bit after the point becomes 2."""


@dataclass(frozen=True)
class Parameters:
    """Per-group scale and zero, both ``(rows, G, 1)`` float32; ``zero`` is 0 if the format has none."""

    scale: Tensor
    zero: Tensor


@dataclass(frozen=True)
class Target:
    """The format that groups are quantized to.

    **Fields:** ``format``; ``scale_dtype``: of a float scale; ``global_scale``: float32 ``()`` for two-level scales.
    """

    format: Format
    scale_dtype: torch.dtype
    global_scale: Tensor | None = None

    @property
    def element(self) -> Element:
        """The element of the codes."""
        return self.format.element

    @property
    def zero(self) -> ZeroPoint:
        """The kind of zero point."""
        return self.format.zero

    @property
    def low(self) -> float:
        """The smallest value of a code."""
        return self.element.value_range[0]

    @property
    def high(self) -> float:
        """The largest value of a code."""
        return self.element.value_range[1]

    def round_scale(self, scale: Tensor) -> Tensor:
        """The float32 scale nearest to ``scale`` that can be stored, above zero so that no code divides by zero."""
        kind = self.format.scale
        if kind is ScaleType.FLOAT:
            tiny = torch.finfo(self.scale_dtype).smallest_normal
            return scale.clamp_min(tiny).to(self.scale_dtype).float()
        if kind is ScaleType.E8M0:
            return exponents(self._exponent_bytes(scale))
        return effective_scale(kind, self._fp8_scale(scale), self.global_scale, torch.float32)

    def stored_scale(self, scale: Tensor) -> Tensor:
        """Scales from `round_scale` in their stored dtype; inexact for others."""
        kind = self.format.scale
        if kind is ScaleType.FLOAT:
            return scale.to(self.scale_dtype)
        if kind is ScaleType.E8M0:
            return (torch.frexp(scale).exponent + 126).clamp(0, _E8M0_MAX).to(torch.uint8)
        return self._fp8_scale(scale)

    def _exponent_bytes(self, scale: Tensor) -> Tensor:
        """The power of two whose range holds the largest value of the group, ``scale * high``.

        The exponent of the OCP microscaling formats 1.0, section 6.3, is that of the largest value, less that of the
        element's largest, so that values between the element's largest and the next power of two saturate. Like
        compressed-tensors 0.20 (`generate_mx_scales`), the next exponent is taken from 1.75 times the power of two on:
        7 for fp4, whose largest value is 6, and 448 for fp8.
        """
        exponent = math.floor(math.log2(self.high))
        rounded = _ROUNDS_UP * 2.0**exponent
        mantissa, power = torch.frexp(scale * self.high)  # mantissa in [0.5, 1)
        largest = mantissa * 2.0 ** (exponent + 1)
        up = largest >= rounded if self.high <= rounded else largest > self.high
        return (power - 1 - exponent + up.int() + 127).clamp(0, _E8M0_MAX).to(torch.uint8)

    def _fp8_scale(self, scale: Tensor) -> Tensor:
        assert self.global_scale is not None
        multiplied = self.format.scale is ScaleType.E4M3
        ratio = scale / self.global_scale if multiplied else scale * self.global_scale
        # 2**-9 is the smallest e4m3 number above zero: a scale that rounds to zero would lose its group.
        return ratio.clamp(2.0**-9, FP8_MAX).to(torch.float8_e4m3fn)

    def codes(self, groups: Tensor, p: Parameters, low: float | None = None) -> Tensor:
        """Codes of float32 groups ``(rows, G, g)``: integers in float32 for integer elements, uint8 for tables.

        ``low``: the smallest integer code to use, default the element's smallest.
        """
        if self.element.is_integer:
            if self.zero is ZeroPoint.FLOAT:
                scaled = (groups - p.zero).div_(p.scale).round_()
            else:
                scaled = (groups / p.scale).round_().add_(p.zero)
            return scaled.clamp_(self.low if low is None else low, self.high)
        values = groups - p.zero if self.zero is ZeroPoint.FLOAT else groups
        return self.element.nearest(values / p.scale)

    def restored(self, codes: Tensor, p: Parameters) -> Tensor:
        """The dequantized values of codes from `codes`, float32; integer codes are changed in place."""
        if self.element.is_integer:
            if self.zero is ZeroPoint.FLOAT:
                return codes.mul_(p.scale).add_(p.zero)
            return codes.sub_(p.zero).mul_(p.scale)
        values = self.element.decode(codes).mul(p.scale)
        return values.add_(p.zero) if self.zero is ZeroPoint.FLOAT else values

    def basis(self, codes: Tensor, p: Parameters) -> Tensor:
        """The factors of the scale that codes from `codes` represent, float32; integer codes are changed in place."""
        if not self.element.is_integer:
            return self.element.decode(codes)
        return codes.sub_(p.zero) if self.zero is ZeroPoint.INT else codes

    def squared_error(self, groups: Tensor, p: Parameters) -> Tensor:
        """The root of the sum of squared errors of each group, ``(rows, G, 1)``: good for comparisons, not squared."""
        error: Tensor = torch.linalg.vector_norm(
            self.restored(self.codes(groups, p), p).sub_(groups), dim=-1, keepdim=True
        )
        return error

    def empty(self, scale: Tensor) -> Parameters:
        """Parameters of groups that are all zero."""
        one = self.round_scale(torch.ones_like(scale))
        return Parameters(one, torch.zeros_like(one))


def global_scale_of(weight: Tensor, format: Format) -> Tensor | None:
    """The global scale of a dense weight ``(N, K)`` for two-level scales, float32 ``()``; None for other scale types.

    The largest group scale becomes 448, the largest e4m3 number: modelopt multiplies by ``max|w| / (6 * 448)``,
    compressed-tensors divides by ``6 * 448 / max|w|`` (6: the largest fp4 value).
    """
    if not format.scale.has_global:
        return None
    largest = weight.abs().amax().float() if weight.numel() else weight.new_zeros((), dtype=torch.float32)
    reach = max(map(abs, format.element.value_range)) * FP8_MAX
    largest = torch.where(largest > 0, largest, reach)
    share = largest / reach if format.scale is ScaleType.E4M3 else reach / largest
    tiny = torch.finfo(torch.float32).smallest_normal
    return share.clamp(tiny, torch.finfo(torch.float32).max)
