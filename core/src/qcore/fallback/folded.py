"""What a kernel makes of a bias, kept as long as a packed tensor lives and the bias stays the same."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_T = TypeVar("_T")
_kept: MutableMapping[Tensor, tuple[Tensor, Any]] = WeakIdKeyDictionary()


def folded(packed: Tensor, bias: Tensor, fold: Callable[[Tensor, Tensor], _T]) -> _T:
    """Return ``fold(packed, bias)``, or what it returned for an equal bias; it must not hold ``packed`` itself."""
    known = _kept.get(packed)
    # By its values: a bias may be written to, or replaced, at any time.
    if known is not None and known[0].dtype == bias.dtype and torch.equal(known[0], bias):
        made: _T = known[1]
        return made
    made = fold(packed, bias)
    _kept[packed] = (bias.detach().clone(), made)  # tied layers with other biases take turns
    return made
