"""Rows and elements at places that an index names. Indices are int32 and in range: see `pointwise.checked`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..builder import Builder, Ref, fold
from .operand import HALVES, Operand, result
from .prepare import LANES
from .walks import STRIDED, walk

_GATHER, _SCATTER = 0, 1
_ALL = 0xFFFFFFFF


def gather(b: Builder, x: Operand, dim: int, index: Operand, out: Operand | None = None) -> Operand:
    """Elements at ``index`` along ``dim``: shape ``x.shape[:dim] + index.shape + x.shape[dim + 1:]``.

    A table of float16 or bfloat16 gives float32. A table too large for a binding must be contiguous, and ``dim`` 0.
    """
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    y = result(b, (*before, *index.shape, *after), torch.float32 if x.dtype in HALVES else x.dtype, out)
    of_x = (*x.strides[:dim], *[0] * len(index.shape), *x.strides[dim + 1 :])
    of_index = (*[0] * dim, *index.strides, *[0] * len(after))
    _launch(b, _GATHER, y, y.strides, x, of_x, index, of_index, dim)
    return y


def take_along(b: Builder, x: Operand, dim: int, index: Operand, out: Operand | None = None) -> Operand:
    """As torch.gather: x at each element of ``index`` along ``dim``, at the element's own place along the others."""
    y = result(b, index.shape, x.dtype, out)
    of_x = tuple(0 if d == dim else stride for d, stride in enumerate(x.strides))
    _launch(b, _GATHER, y, y.strides, x, of_x, index, index.strides, dim)
    return y


def scatter_rows(b: Builder, target: Operand, dim: int, index: Operand, source: Operand) -> Operand:
    """In place: ``target`` at the one-dimensional ``index`` along ``dim`` becomes ``source``, as index_copy does.

    ``source`` is broadcast. If an index occurs twice, either of its rows is kept.
    """
    shape = (*target.shape[:dim], index.numel, *target.shape[dim + 1 :])
    source = source.broadcast_to(shape)
    of_target = tuple(0 if d == dim else stride for d, stride in enumerate(target.strides))
    of_index = tuple(index.strides[0] if d == dim else 0 for d in range(len(shape)))
    view = Operand(target.ref, shape, of_target, target.dtype, target.offset)
    _launch(b, _SCATTER, view, of_target, source, source.strides, index, of_index, dim, target.strides[dim])
    return target


def _launch(
    b: Builder,
    function: int,
    out: Operand,
    of_out: tuple[int, ...],
    x: Operand,
    of_x: tuple[int, ...],
    index: Operand,
    of_index: tuple[int, ...],
    dim: int,
    stride: int | None = None,
) -> None:
    """``of_...``: strides over the shape that is walked; ``stride`` of the indexed dimension, by default x's."""
    if out.numel == 0:
        return
    plan = walk(out.shape, of_out, of_x, of_index)
    if plan.strides[2][0]:  # each element has an index of its own
        plan = walk(out.shape, of_out, of_x, of_index, single=True)
    step = x.strides[dim] if stride is None else stride
    modes = [plan.mode(0, out.offset), plan.mode(1, x.offset), STRIDED]
    if step % 4:  # then fours of the indexed operand are not aligned
        modes[0 if function == _SCATTER else 1] = STRIDED
    constants = (LANES, len(plan.sizes), plan.width, function, 0, *modes, STRIDED, HALVES.get(x.dtype, 0))
    groups = fold(-(-plan.lanes // LANES))
    for ref, first, rows in _parts(b, x, step, function):
        push = [*plan.push(), out.offset, x.offset, index.offset, step, first, rows]
        b.dispatch("indexed", constants, groups, push, [ref, index.ref, *[None] * 5, out.ref])


def _parts(b: Builder, x: Operand, step: int, function: int) -> Iterator[tuple[Ref, int, int]]:
    """Bindings of x, each with its first row and its number of rows."""
    most = b.device.description.limits.max_storage_range
    if x.ref.bytes <= most or function == _SCATTER:
        yield x.ref, 0, _ALL
        return
    if not x.is_contiguous or x.offset:
        raise ValueError(f"a table of {x.ref.bytes} bytes, and bindings hold {most}: it must be contiguous")
    row = step * x.itemsize
    rows = most // row // 128 * 128  # so that parts begin at aligned addresses
    for first in range(0, x.shape[0], rows):
        count = min(rows, x.shape[0] - first)
        yield x.ref.part(first * row, (count * row + 3) // 4 * 4), first, count
