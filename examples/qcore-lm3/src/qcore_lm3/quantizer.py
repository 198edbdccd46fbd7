"""The quantizer ``lloyd``: scales of least squared error for the table, by alternating projections."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qcore.plugin_api import Format, Quantizer, ZeroPoint

from .format import LM3

_ROUNDS = 2
_STARTS = (1.0, 0.92, 0.84, 0.76, 0.68, 0.6)
"""Fractions of the largest magnitude of a group at which the search for its scale starts."""


def quantize(
    weight: Tensor, format: Format, scale_dtype: torch.dtype, _moments: Tensor | None
) -> tuple[Tensor, Tensor, None]:
    """Codes and scales of a float32 weight ``(N, K)``: of several searches per group, the best one."""
    n, k = weight.shape
    group, groups = format.group(k), format.groups(k)
    w = F.pad(weight, (0, groups * group - k)).reshape(n, groups, group)  # a filling of zeros has no influence
    largest = w.abs().amax(-1, keepdim=True)
    best, kept = torch.full_like(largest, torch.inf), torch.ones_like(largest)
    for start in _STARTS:
        scale = _rounded(_lloyd(w, largest * start), scale_dtype)
        error = (w - _values(w, scale) * scale).square().sum(-1, keepdim=True)
        kept, best = torch.where(error < best, scale, kept), torch.minimum(error, best)
    codes = LM3.nearest(w / kept).reshape(n, groups * group)[:, :k]
    return codes.contiguous(), kept.squeeze(-1).t().to(scale_dtype).contiguous(), None


def _lloyd(w: Tensor, scale: Tensor) -> Tensor:
    """Alternate the nearest values v of ``w / scale`` with the scale ``<w, v> / <v, v>`` of least squared error."""
    for _ in range(_ROUNDS):
        v = _values(w, scale)
        norm = v.square().sum(-1, keepdim=True)
        fitted = (w * v).sum(-1, keepdim=True) / norm
        scale = torch.where((norm > 0) & (fitted > 0), fitted, scale)
    return scale


def _values(w: Tensor, scale: Tensor) -> Tensor:
    tiny = torch.finfo(torch.float32).smallest_normal
    return LM3.decode(LM3.nearest(w / scale.clamp_min(tiny)))


def _rounded(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as it is stored, above zero."""
    return scale.clamp_min(torch.finfo(dtype).smallest_normal).to(dtype).float()


LLOYD = Quantizer("lloyd", quantize, zeros=(ZeroPoint.NONE,), elements=("lm3",))
