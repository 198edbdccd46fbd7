"""Rotary embedding."""

from __future__ import annotations

import torch

from ..builder import Builder, fold
from .operand import Operand, merge, result
from .pointwise import convert
from .prepare import LANES
from .walks import STRIDED, walk

_MOST_DIMS = 4


def rope(b: Builder, x: Operand, cos: Operand, sin: Operand, out: Operand | None = None) -> Operand:
    """``x * cos + cat(-x2, x1) * sin``, with x1 and x2 the halves of the last dimension; all three are broadcast."""
    shape = tuple(torch.broadcast_shapes(x.shape, cos.shape, sin.shape))  # type: ignore[no-untyped-call]
    y = result(b, shape, x.dtype, out)
    views = [operand.broadcast_to(shape) for operand in (y, x, cos, sin)]
    half = shape[-1] // 2
    if y.numel == 0:
        return y
    if len(merge((*shape[:-1], half), *(view.strides for view in views))[0]) > _MOST_DIMS:
        views = [y, *(convert(b, view, x.dtype) for view in views[1:])]
    plan = walk((*shape[:-1], half), *(view.strides for view in views), most=_MOST_DIMS)
    steps = [half * view.strides[-1] for view in views]
    modes = [
        STRIDED if step % 4 else plan.mode(i, view.offset)
        for i, (view, step) in enumerate(zip(views, steps, strict=True))
    ]
    push = [*plan.push(_MOST_DIMS), *(view.offset for view in views), 0, 0, *steps]
    refs = [*(view.ref for view in views[1:]), *[None] * 4, y.ref]
    constants = (LANES, len(plan.sizes), plan.width, 0, 0, *modes)
    b.dispatch("rope", constants, fold(-(-plan.lanes // LANES)), push, refs)
    return y
