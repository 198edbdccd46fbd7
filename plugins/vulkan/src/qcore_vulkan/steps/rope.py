"""Rotary embedding."""

from __future__ import annotations

import torch

from ..builder import Builder, fold
from .operand import Operand, merge, result
from .pointwise import convert
from .prepare import LANES
from .walks import STRIDED, walk

_MOST_DIMS, _MOST_INDEXED = 4, 3


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


def rope_rows(
    b: Builder, x: Operand, cos: Operand, sin: Operand, target: Operand, dim: int, index: Operand
) -> Operand | None:
    """In place: ``target`` at the one-dimensional ``index`` along ``dim`` becomes ``rope(x, cos, sin)``.

    Not along the last dimension, and ``index`` is int32 and in range. None, and no step, for strides that the shader
    does not take.
    """
    shape, last = (*target.shape[:dim], index.numel, *target.shape[dim + 1 :]), len(target.shape) - 1
    half = shape[last] // 2
    if x.numel == 0 or dim == last:
        return None
    strides = tuple(0 if d == dim else stride for d, stride in enumerate(target.strides))
    view = Operand(target.ref, shape, strides, target.dtype, target.offset)
    views = [view, *(operand.broadcast_to(shape) for operand in (x, cos, sin))]
    along = tuple(index.strides[0] if d == dim else 0 for d in range(len(shape)))
    walked = [*(one.strides for one in views), along]
    if len(merge((*shape[:-1], half), *walked)[0]) > _MOST_INDEXED:
        return None
    plan = walk((*shape[:-1], half), *walked, most=_MOST_INDEXED)
    if plan.strides[4][0]:  # halves of one column: lanes would take several rows
        return None
    steps = [half * one.strides[-1] for one in views]
    modes = [
        STRIDED if step % 4 else plan.mode(i, one.offset)
        for i, (one, step) in enumerate(zip(views, steps, strict=True))
    ]
    step = target.strides[dim]
    if step % 4:
        modes[0] = STRIDED
    push = [*plan.push(_MOST_INDEXED), *(one.offset for one in views), index.offset, step, 0, *steps]
    refs = [*(one.ref for one in views[1:]), index.ref, *[None] * 3, target.ref]
    b.dispatch(
        "rope_index", (LANES, len(plan.sizes), plan.width, 0, 0, *modes), fold(-(-plan.lanes // LANES)), push, refs
    )
    return target
