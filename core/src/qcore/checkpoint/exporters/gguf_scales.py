"""The two factors of the scales in a block of GGUF's K-quants: a float16 number per block and an integer per group."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def factors(base: Tensor, wanted: Tensor, low: int, high: int) -> tuple[Tensor, Tensor] | None:
    """Find ``d`` and ``c`` with ``base - d * c == wanted`` in float32, ``low <= c <= high``.

    ``base``, ``wanted``: float32 ``(blocks, groups)``. Returns ``d`` float16 ``(blocks, 1)`` and ``c`` int16 ``(blocks,
    groups)``, or None if a block has none. Quantizers give the largest product the last code: that is tried first.
    """
    products = base - wanted
    top = products.gather(1, products.abs().argmax(1, keepdim=True))
    d = torch.zeros_like(top, dtype=torch.float16)
    c = torch.zeros_like(products, dtype=torch.int16)
    left = (wanted != base).any(1).nonzero().squeeze(1)
    tried = sorted((code for code in range(low, high + 1) if code), key=lambda code: (-abs(code), code))
    # If the base is much larger than the products, rounding moves them by more than the last bit of float16.
    nearby = (0, 1, -1) if bool(base.any()) else (0,)
    for code, step in itertools.product(tried, nearby):
        if not len(left):
            break
        factor = ((top[left] / code).half().view(torch.int16) + step).view(torch.float16)
        found, codes = _fitted(base[left], wanted[left], products[left], factor, low, high)
        done = left[found]
        d[done], c[done] = factor[found], codes[found]
        left = left[~found]
    return None if len(left) else (d, c)


def _fitted(base: Tensor, wanted: Tensor, products: Tensor, d: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Whether the float16 factor ``d`` is exact for each block, bool ``(blocks,)``, and the codes of all blocks."""
    codes = (products / d.float()).round().nan_to_num(0, 0, 0).clamp(low, high)
    fits = torch.isfinite(d.float()).all(1) & (base - d.float() * codes == wanted).all(1)
    return fits, codes.to(torch.int16)
