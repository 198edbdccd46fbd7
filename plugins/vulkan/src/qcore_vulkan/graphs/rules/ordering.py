"""Rules of ops that bring elements into another order: by their values, or from the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...steps.operand import Operand
from ...steps.pointwise import convert
from ...steps.sorting import sort
from ..lowering import Lowering
from .reductions import lasting, why_not_small
from .registry import rule


@rule("sort", why_not=why_not_small)
def _sort(
    c: Lowering, node: fx.Node, x: Operand, *args: Any, dim: int = -1, descending: bool = False, **_: Any
) -> tuple[Operand, Operand]:
    dim, descending = args[0] if args else dim, args[1] if len(args) > 1 else descending
    if not x.shape:
        return x, c.filled(0, torch.int32)
    moved, back = lasting(x, dim)
    values, indices = sort(c.b, moved, descending)
    return values.permute(back), indices.permute(back)


@rule("flip")
def _flip(c: Lowering, node: fx.Node, x: Operand, dims: Sequence[int]) -> Operand:
    return flipped(c, x, [dim % len(x.shape) for dim in dims if x.shape])


def flipped(c: Lowering, x: Operand, dims: Sequence[int]) -> Operand:
    """A copy that has the last element along ``dims`` first."""
    strides, offset = list(x.strides), x.offset
    for at in set(dims):
        offset += (x.shape[at] - 1) * strides[at]
        strides[at] = -strides[at]
    # Only this copy sees negative strides: shaders add them modulo 2^32.
    return convert(c.b, replace(x, strides=tuple(strides), offset=offset), x.dtype)
