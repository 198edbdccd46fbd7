"""Batch norms with given statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..builder import Builder, Ref, fold
from .operand import Operand, new_like
from .pointwise import convert
from .prepare import LANES
from .walks import STRIDED, walk


@dataclass(frozen=True)
class Norm:
    """What is done to each channel: ``(x - mean) / sqrt(variance + eps) * weight + bias``, all float32 ``(C,)``."""

    mean: Operand
    variance: Operand
    weight: Operand | None
    bias: Operand | None
    eps: float

    @property
    def number(self) -> int:
        """Which parameters there are, as the shaders number them."""
        return 1 | 2 * (self.weight is not None) | 4 * (self.bias is not None)

    def refs(self, b: Builder) -> list[Ref]:
        """The parameters' memory, at bindings 3 to 6 of the shaders."""
        given = [self.mean, self.variance, self.weight or self.mean, self.bias or self.mean]
        return [vector(b, one).ref for one in given]


def vector(b: Builder, x: Operand) -> Operand:
    """A vector at the beginning of its memory, copied if it is not."""
    return x if x.is_contiguous and x.offset == 0 else convert(b, x, x.dtype)


def batch_norm(b: Builder, x: Operand, norm: Norm) -> Operand:
    """The norm of x ``(N, C, ...)`` float32, in memory as x is if x is dense."""
    y = new_like(b, x, torch.float32)
    if y.numel == 0:
        return y
    along = tuple(int(at == 1) for at in range(len(x.shape)))
    plan = walk(y.shape, y.strides, x.strides, along)
    modes = [plan.mode(0, y.offset), plan.mode(1, x.offset), STRIDED, STRIDED]
    constants = (LANES, len(plan.sizes), plan.width, 0, 0, *modes, 0, norm.number)
    push = [*plan.push(), y.offset, x.offset, 0, norm.eps, 0]
    b.dispatch("batch_norm", constants, fold(-(-plan.lanes // LANES)), push, [x.ref, x.ref, None, *norm.refs(b), y.ref])
    return y
