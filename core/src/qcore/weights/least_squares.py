"""Alternating least squares: scale and zero point of a group from its codes, codes from scale and zero point.

For fixed codes q the best scale of ``w = v(q) s`` is ``sum(a w v) / sum(a v v)``, and with a float zero point scale and
zero point are the line through the points ``(v, w)``; for fixed parameters the best codes are the nearest. Repeating
the two steps never increases the error, but ends in the nearest minimum, so several starts are tried. llama.cpp's
``make_qkx2_quants`` and HQQ (Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023)
alternate in the same way. The error of every step is measured with the parameters as stored, and the best is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..formats import ScaleType, ZeroPoint
from .ranges import clipped, range_of
from .targets import Parameters, Target

_ROUNDS = 2
"""Least-squares steps after each start."""

_SHARES = ((1.0, 1.0), (0.9, 0.9), (0.8, 0.8), (0.7, 0.7))
"""Fractions of the two ends of the range that the starts keep."""

_DENSE = tuple((1.0 - 0.03 * i, 1.0 - 0.03 * i) for i in range(15))
"""The fractions for fp8, as many as ``mse`` tries: its error has many local minima."""

_UNEVEN = ((1.0, 0.85), (0.85, 1.0), (0.9, 0.7), (0.7, 0.9))
"""Additional starts if there is a zero point."""

_FEW_BITS = 4

_POWERS = ((1.0, 1.0), (2.0, 2.0), (0.5, 0.5))
"""The nearby candidates for scales that are powers of two; there is nothing to refine between them."""


def alternating(groups: Tensor, target: Target, importance: Tensor | None = None) -> Parameters:
    """Parameters with a small ``sum(a (w - restored)^2)`` in each group.

    ``groups``: float32 ``(rows, G, g)``; ``importance``: a, ``(G, g)`` or as ``groups``, default 1.
    """
    root = None if importance is None else importance.sqrt()
    best: _Best | None = None
    exact = target.format.scale is ScaleType.E8M0
    for start in _starts(groups, target):
        found = start
        for step in range(1 if exact else _ROUNDS + 1):
            basis = target.basis(target.codes(groups, found), found)
            best = _better(best, _error(groups, basis, found, target, root), found)
            if step < _ROUNDS and not exact:
                found = _solved(groups, basis, found, target, importance)
    assert best is not None
    return best[1]


def refined(groups: Tensor, target: Target) -> Parameters:
    """The parameters of ``als``: errors of large weights count more, ``a = sqrt(2 mean(w^2) + w^2)``.

    Measured without calibration, this costs less perplexity than plain squared errors, which hardly improve on ``mse``.
    llama.cpp's quantizers use the same weighting if they have no importance matrix.
    """
    square = groups.square()
    return alternating(groups, target, square.add_(square.mean(-1, keepdim=True), alpha=2).sqrt_())


_Best = tuple[Tensor, Parameters]


def _better(best: _Best | None, error: Tensor, found: Parameters) -> _Best:
    if best is None:
        return error, found
    less = error < best[0]
    scale, zero = (torch.where(less, getattr(found, n), getattr(best[1], n)) for n in ("scale", "zero"))
    return torch.where(less, error, best[0]), Parameters(scale, zero)


def _starts(groups: Tensor, target: Target) -> Iterator[Parameters]:
    span = range_of(groups, target.zero)
    if target.format.scale is ScaleType.E8M0:
        shares: tuple[tuple[float, float], ...] = _POWERS
    else:
        shares = _SHARES if target.element.is_integer or target.element.bits <= _FEW_BITS else _DENSE
        shares += () if target.zero is ZeroPoint.NONE else _UNEVEN
    for keep in shares:
        yield clipped(span, keep, target)
    if _gains_from_sign(target):
        mirrored = (-span[1], -span[0])
        for keep in shares:
            found = clipped(mirrored, keep, target)
            yield Parameters(-found.scale, found.zero)


def _gains_from_sign(target: Target) -> bool:
    """Whether a negative scale, which swaps the ends -8 and 7, gives different values."""
    floating = target.format.scale is ScaleType.FLOAT
    return floating and target.zero is ZeroPoint.NONE and -target.low != target.high


def _error(groups: Tensor, basis: Tensor, p: Parameters, target: Target, root: Tensor | None) -> Tensor:
    off = (basis * p.scale).sub_(groups)
    if target.zero is ZeroPoint.FLOAT:
        off.add_(p.zero)
    if root is not None:
        off.mul_(root)
    error: Tensor = torch.linalg.vector_norm(off, dim=-1, keepdim=True)
    return error


def _solved(groups: Tensor, basis: Tensor, p: Parameters, target: Target, importance: Tensor | None) -> Parameters:
    """The least-squares parameters for values ``basis`` of the codes; ``p`` if the codes do not determine them."""
    weighted = basis if importance is None else basis * importance
    if target.zero is not ZeroPoint.FLOAT:
        return _with_scale(_dot(weighted, groups), _dot(weighted, basis), p, target)
    total = float(groups.shape[-1]) if importance is None else importance.sum(-1, keepdim=True)
    heavy = groups if importance is None else groups * importance
    mean_v, mean_w = weighted.sum(-1, keepdim=True) / total, heavy.sum(-1, keepdim=True) / total
    centred = basis - mean_v
    weighted = centred if importance is None else centred * importance
    fitted = _with_scale(_dot(weighted, groups), _dot(weighted, centred), p, target)
    zero = (mean_w - fitted.scale * mean_v).to(target.scale_dtype).float()
    known = _dot(weighted, centred) > 0
    return Parameters(fitted.scale, torch.where(known, zero, p.zero))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _with_scale(product: Tensor, square: Tensor, p: Parameters, target: Target) -> Parameters:
    ratio = product / square
    rounded = torch.copysign(target.round_scale(ratio.abs()), p.scale)
    usable = (square > 0) & (ratio * p.scale > 0)
    return Parameters(torch.where(usable, rounded, p.scale), p.zero)
