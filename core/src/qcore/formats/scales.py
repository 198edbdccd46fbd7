"""Scale types: how the scale of a group is stored, and which float32 number it represents."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from ..errors import FormatError

FLOAT_SCALES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of a `ScaleType.FLOAT` scale."""

_E8M0_BIAS, _E8M0_NAN = 127, 255
_SMALLEST_EXPONENT = 0x00400000
"""The bits of 2**-127, a subnormal float32: byte 0 of e8m0."""


class ScaleType(enum.Enum):
    """How a group's scale is stored; `effective_scale` gives the float32 number ``s`` that it represents."""

    FLOAT = "float"
    """float32, bfloat16 or float16: ``s`` is the number itself."""
    E8M0 = "e8m0"
    """uint8 ``b``: ``s = 2**(b - 127)``; 255 is NaN and rejected (OCP microscaling formats 1.0)."""
    E4M3 = "e4m3"
    """float8_e4m3fn times one float32 per weight, the global scale: ``s = scale * global`` (modelopt's NVFP4)."""
    E4M3D = "e4m3d"
    """float8_e4m3fn divided by the global scale: ``s = scale / global`` (compressed-tensors' NVFP4)."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that the stored scale may have."""
        if self is ScaleType.FLOAT:
            return FLOAT_SCALES
        return (torch.uint8,) if self is ScaleType.E8M0 else (torch.float8_e4m3fn,)

    @property
    def has_global(self) -> bool:
        """Whether a weight has a global scale in addition to the scales of its groups."""
        return self in (ScaleType.E4M3, ScaleType.E4M3D)

    def normalized(self, scale: Tensor) -> Tensor:
        """``scale`` in the stored dtype, if it holds the same bytes under another name (uint8, float8_e8m0fnu)."""
        if self is ScaleType.E8M0 and scale.dtype == torch.float8_e8m0fnu:
            return scale.view(torch.uint8)
        if self.has_global and scale.dtype == torch.uint8:
            return scale.view(torch.float8_e4m3fn)
        return scale


def effective_scale(kind: ScaleType, scale: Tensor, global_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The numbers that stored scales represent, in ``dtype`` (float32 or float64).

    **Arguments:** ``scale``: ``(..., G, N)`` of one of ``kind.dtypes``; ``global_scale``: float32, ``()`` or ``(E,)``,
    None if ``kind`` has none. Products and quotients are rounded to float32 once, even for float64, as the formats
    specify.
    """
    if kind is ScaleType.FLOAT:
        return scale.to(dtype)
    if kind is ScaleType.E8M0:
        return exponents(scale).to(dtype)
    if global_scale is None:
        raise FormatError(f"scales of type {kind.value} need a global_scale, float32.")
    wide = scale.to(torch.float32)
    factor = global_scale.reshape(*global_scale.shape, *(1,) * (scale.dim() - global_scale.dim()))
    return (wide * factor if kind is ScaleType.E4M3 else wide / factor).to(dtype)


def exponents(scale: Tensor) -> Tensor:
    """``2**(b - 127)`` of uint8 ``b``, float32, exact; 255 gives Inf."""
    bits = scale.to(torch.int32)
    return torch.where(bits == 0, _SMALLEST_EXPONENT, bits << 23).view(torch.float32)


def check_scale_values(kind: ScaleType, scale: Tensor, global_scale: Tensor | None) -> None:
    """Raise `FormatError` if a scale is NaN or Inf."""
    if kind is ScaleType.E8M0:
        if bool((scale == _E8M0_NAN).any()):
            raise FormatError("scale holds the e8m0 code 255, which is NaN; a quantized weight needs finite scales.")
        return
    values = scale if kind is ScaleType.FLOAT else scale.to(torch.float32)
    if not bool(torch.isfinite(values).all()):
        raise FormatError("scale holds NaN or Inf; a quantized weight needs finite scales.")
    if global_scale is None:
        return
    usable = torch.isfinite(global_scale) & ((global_scale != 0) | (kind is ScaleType.E4M3))
    if not bool(usable.all()) or not bool(
        torch.isfinite(effective_scale(kind, scale, global_scale, torch.float32)).all()
    ):
        raise FormatError("global_scale must be finite, and give finite scales when combined with those of the groups.")
