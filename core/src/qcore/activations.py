"""Activation and output quantization: how ``x`` becomes int8 codes, and how a result does.

A code ``q`` with scale ``s`` and zero point ``z`` means ``s * (q - z)``. Everything is computed in float32 and rounds
half to even; "per token" means one scale per row of the last dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from .errors import FormatError

INT8_MIN, INT8_MAX = -128, 127
_SMALLEST = torch.finfo(torch.float32).smallest_normal


@dataclass(frozen=True)
class DynamicInt8:
    """Activations are quantized per token at run time.

    ``symmetric``: ``s = max|x| / 127``, ``z = 0``. Otherwise ``s = (max(x, 0) - min(x, 0)) / 255`` and
    ``z = round(-128 - min/s)``. A row of zeros gets ``s = 1`` and code ``z``.
    """

    symmetric: bool = True


_G = TypeVar("_G", bound="_GivenInt8")


@dataclass(frozen=True)
class _GivenInt8:
    scale: float | None = None
    zero_point: int = 0
    per_token: bool = False

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if self.per_token and self.scale is not None:
            raise FormatError(f"{kind}: per-token scales are tensors, given with each call; leave scale out.")
        if self.scale is not None and not 0.0 < float(self.scale) < float("inf"):
            raise FormatError(f"{kind}: scale is {self.scale!r}; it must be positive and finite.")
        if not INT8_MIN <= int(self.zero_point) <= INT8_MAX:
            raise FormatError(f"{kind}: zero_point is {self.zero_point!r}; int8 codes allow {INT8_MIN}..{INT8_MAX}.")

    @property
    def is_given(self) -> bool:
        """Whether the numbers are known: a scale is set, or they come per token with each call."""
        return self.per_token or self.scale is not None

    def blank(self: _G) -> _G:
        """The same kind without its numbers."""
        return replace(self, scale=None, zero_point=0)


@dataclass(frozen=True)
class StaticInt8(_GivenInt8):
    """Activations are quantized with given parameters: ``q = clamp(round(x / scale) + zero_point, -128, 127)``.

    ``scale`` None means "to be calibrated". ``per_token``: one scale and zero point per token, passed with each call
    as tensors of shape ``(tokens,)``. An x of dtype int8 is taken as codes already.
    """


@dataclass(frozen=True)
class OutputInt8(_GivenInt8):
    """Results are requantized to int8: ``clamp(round(y / scale) + zero_point, -128, 127)``; see `StaticInt8`."""


Activation = DynamicInt8 | StaticInt8


def dynamic_parameters(x: Tensor, symmetric: bool = True) -> tuple[Tensor, Tensor | None]:
    """Per-token scale, float32 ``(..., 1)``, and zero point, float32 of whole numbers (None if ``symmetric``)."""
    if symmetric:
        scale = x.abs().amax(-1, keepdim=True).float() / INT8_MAX
        return _usable(scale), None
    low, high = x.aminmax(dim=-1, keepdim=True)
    low, high = low.float().clamp_max(0), high.float().clamp_min(0)
    scale = _usable((high - low) / (INT8_MAX - INT8_MIN))
    return scale, torch.round(INT8_MIN - low / scale)


def _usable(scale: Tensor) -> Tensor:
    # NaN passes through both: a token that holds NaN must give NaN, not a number.
    return torch.where(scale == 0, 1.0, scale.clamp_min(_SMALLEST))


def quantize_int8(x: Tensor, scale: Tensor | float, zero_point: Tensor | float | None) -> Tensor:
    """``clamp(round(x / scale) + zero_point, -128, 127)`` as int8; parameters broadcast against x."""
    codes = torch.round(x.float() / scale)
    if zero_point is not None:
        codes = codes + zero_point
    return codes.clamp(INT8_MIN, INT8_MAX).to(torch.int8)


def static_from_range(low: float, high: float) -> tuple[float, int]:
    """The (scale, zero point) that cover ``[min(low, 0), max(high, 0)]`` with int8 codes."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / (INT8_MAX - INT8_MIN) or 1.0
    return scale, max(INT8_MIN, min(INT8_MAX, round(INT8_MIN - low / scale)))
