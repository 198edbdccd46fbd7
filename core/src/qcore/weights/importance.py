"""Activation-aware scales: the search for a group's scale gives more weight to columns with large inputs.

AWQ (Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", MLSys 2024,
arXiv:2306.00978) multiplies input channel j by ``s_j = E|x_j|^alpha`` and divides the input by it. The division has to
be folded into the previous layer, which is unknown if only the weight is available. Here the powers of the input's
magnitude weight the errors of the search instead, so that the result is an ordinary weight; as in AWQ, alpha is
searched.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from .least_squares import alternating
from .ranges import search_clip
from .targets import Parameters, Target

_POWERS = (0.0, 0.5, 1.0)
"""Powers of the mean square of the inputs that are tried as weights of the squared errors."""

_FLOOR = 0.01
"""Minimum, as a fraction of the mean importance: inputs that were always 0 still get a sensible weight."""


def importance_of(moments: Tensor) -> Tensor:
    """The mean square of each input divided by the mean over all, ``(K,)``, positive, from moments ``(K, K)``."""
    diagonal = moments.diagonal().float().clamp_min(0)
    mean = diagonal.mean() if len(diagonal) else diagonal.sum()
    return torch.where(mean > 0, diagonal / mean, torch.ones_like(diagonal)) + _FLOOR


def activation_aware(groups: Tensor, target: Target, moments: Tensor) -> Parameters:
    """The parameters with the smallest error of the output, ``e H e^T``, over the inputs of each group.

    The parameters of ``mse`` are among the candidates, so that the result is never worse by this measure.

    ``groups``: float32 ``(rows, G, g)``; ``moments``: H of each group's inputs, ``(G, g, g)``.
    """
    importance = torch.stack([importance_of(own) for own in moments])
    best, scale, zero = None, None, None
    candidates = (alternating(groups, target, importance.pow(power) if power else None) for power in _POWERS)
    for found in chain([search_clip(groups, target)], candidates):
        off = target.restored(target.codes(groups, found), found).sub_(groups).transpose(0, 1)
        error = (torch.bmm(off, moments) * off).sum(-1, keepdim=True).transpose(0, 1)
        if best is None or scale is None or zero is None:
            best, scale, zero = error, found.scale, found.zero
        else:
            less = error < best
            best = torch.where(less, error, best)
            scale, zero = torch.where(less, found.scale, scale), torch.where(less, found.zero, zero)
    assert scale is not None
    assert zero is not None
    return Parameters(scale, zero)
