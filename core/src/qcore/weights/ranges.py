"""Scales and zero points from the range of a group's values."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import ScaleType, ZeroPoint
from .targets import Parameters, Target

_CLIPS = tuple(1.0 - 0.03 * i for i in range(15))
"""Fractions of the full range that ``mse`` tries: 1.00, 0.97, ... 0.58."""
_POWERS = (1.0, 2.0, 0.5)
"""The same for scales that are powers of two."""

Range = tuple[Tensor, Tensor]
"""The smallest and the largest value of each group, ``(rows, G, 1)`` each."""


def range_of(groups: Tensor, zero: ZeroPoint) -> Range:
    """The range of groups ``(rows, G, g)``; it contains 0 unless the zero point is a float."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    if zero is ZeroPoint.FLOAT:
        return low, high
    return low.clamp_max(0), high.clamp_min(0)


def symmetric(scale: Tensor, target: Target) -> Parameters:
    """Parameters without a zero point; a scale of 0, of a group without values, becomes 1."""
    unused = target.empty(scale)
    rounded = torch.where(scale == 0, unused.scale, target.round_scale(scale))
    return Parameters(rounded, torch.zeros_like(rounded))


def affine(low: Tensor, high: Tensor, target: Target) -> Parameters:
    """Parameters with a zero point, such that the smallest code is ``low`` and the largest ``high``."""
    span = high - low
    scale = torch.where(span == 0, target.empty(span).scale, target.round_scale(span / (target.high - target.low)))
    if target.zero is ZeroPoint.INT:
        zero = torch.round(target.low - low / scale).clamp_(target.low, target.high)
        return Parameters(scale, zero)
    # A constant group stores its value in the zero point, exactly: a code of value 0 then means z.
    zero = torch.where(span == 0, low, low - target.low * scale)
    return Parameters(scale, zero.to(target.scale_dtype).float())


def absmax(span: Range, target: Target) -> Parameters:
    """The scale that maps the largest magnitude to the largest code."""
    low, high = span
    return symmetric(torch.maximum(-low, high) / target.high, target)


def absmax_full(span: Range, target: Target) -> Parameters:
    """The smallest scale that clips nothing: the smallest code is used, too."""
    low, high = span
    return symmetric(torch.maximum(high / target.high, low / target.low), target)


def clipped(span: Range, keep: tuple[float, float], target: Target) -> Parameters:
    """Parameters of a range of which only a fraction is kept.

    ``keep``: fractions of the two ends; with a float zero point, of the distances of the two ends from the middle.
    """
    low, high = span
    if target.zero is ZeroPoint.NONE:
        return absmax_full((low * keep[0], high * keep[1]), target)
    if target.zero is ZeroPoint.INT:
        return affine(low * keep[0], high * keep[1], target)
    half = (high - low) / 2
    return affine(low + half * (1 - keep[0]), high - half * (1 - keep[1]), target)


def search_clip(groups: Tensor, target: Target) -> Parameters:
    """The parameters of ``mse``: the clipped range of each group ``(rows, G, g)`` with the smallest squared error."""
    span = range_of(groups, target.zero)
    best: Tensor | None = None
    for clip in _POWERS if target.format.scale is ScaleType.E8M0 else _CLIPS:
        shrunk = clipped(span, (clip, clip), target)
        error = target.squared_error(groups, shrunk)
        if best is None:
            best, scale, zero = error, shrunk.scale, shrunk.zero
        else:
            better = error < best
            best = torch.where(better, error, best)
            scale, zero = torch.where(better, shrunk.scale, scale), torch.where(better, shrunk.zero, zero)
    return Parameters(scale, zero)
