"""A bias for a product that adds it before its one rounding, and only in its own dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def split(bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """``bias`` as a part of ``dtype``, for the product, and the rest in float32, to be added to its result.

    The rest is None if the first part is exact. Otherwise it is at most half a unit in the last place of the
    first part, so that the second rounding, after it was added, is an error of that size only. Values that ``dtype``
    cannot hold are in the rest, including Inf, and NaN is in both.
    """
    if bias is None or bias.dtype == dtype:
        return bias, None
    if dtype == torch.float32:
        return bias.float(), None
    wanted, largest = bias.float(), most(dtype)
    inside = wanted.clamp(-largest, largest).to(dtype)
    return inside, wanted - inside


def most(dtype: torch.dtype) -> float:
    """The largest first part: half of the maximum of ``dtype``, because the product may have the same sign."""
    return torch.finfo(dtype).max / 2
