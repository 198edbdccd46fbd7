"""Reductions of strided operands, running sums, and the largest elements of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..builder import Builder, Ref, fold
from ..device import Device
from .norms import lanes_of_row
from .operand import WORDS, Operand, merge, new, result
from .pointwise import convert
from .prepare import LANES

REDUCTIONS = {"sum": 0, "mean": 1, "prod": 2, "any": 3, "amax": 4, "amin": 5, "argmax": 6, "argmin": 7}
"""Functions of many elements, and their numbers in the shader."""

_MOST_OUTER, _MOST_INNER = 4, 3
_SHORT = 32
"""Up to this many elements, one lane reduces them."""


def reduce(
    b: Builder,
    name: str,
    x: Operand,
    dims: Sequence[int],
    keepdim: bool = False,
    out: Operand | None = None,
    bad: Ref | None = None,
) -> Operand:
    """A function of the elements along ``dims``: sum, mean (float32), prod, amax, amin, or any, which gives bools.

    NaN is the largest and the smallest, as torch has it. There must be elements. Sums of int32 wrap around.
    ``bad``: a word of memory whose bit 1 is set if a sum of int32 does not fit.
    """
    if name == "mean" and x.dtype != torch.float32:
        raise ValueError(f"mean is a function of float32, not of {x.dtype}: convert the operand first")
    return _reduce(b, name, x, dims, keepdim, torch.bool if name == "any" else x.dtype, out, bad)


def argreduce(
    b: Builder, name: str, x: Operand, dim: int, keepdim: bool = False, out: Operand | None = None
) -> Operand:
    """``argmax`` or ``argmin`` along ``dim``, int32; the first place if there are several."""
    return _reduce(b, name, x, [dim], keepdim, torch.int32, out)


def _reduce(
    b: Builder,
    name: str,
    x: Operand,
    dims: Sequence[int],
    keepdim: bool,
    dtype: torch.dtype,
    out: Operand | None,
    bad: Ref | None = None,
) -> Operand:
    rank = len(x.shape)
    inner = sorted({dim % rank for dim in dims})
    outer = [dim for dim in range(rank) if dim not in inner]
    kept = tuple(1 if dim in inner else size for dim, size in enumerate(x.shape))
    y = result(b, kept if keepdim else tuple(x.shape[dim] for dim in outer), dtype, out)
    if y.numel == 0:
        return y
    if math.prod(x.shape[dim] for dim in inner) == 0:
        raise ValueError(f"{name} over no elements has no step")
    of_y = y.permute(outer) if keepdim else y
    rows, columns = x.permute(outer), x.permute(inner)
    sizes, (x_outer, y_outer) = merge(rows.shape, rows.strides, of_y.strides)
    inner_sizes, (x_inner,) = merge(columns.shape, columns.strides)
    if len(sizes) > _MOST_OUTER or len(inner_sizes) > _MOST_INNER:
        if x.is_contiguous:
            raise ValueError(f"{name} over {len(inner_sizes)} and {len(sizes)} dimensions: reduce them in turn")
        return _reduce(b, name, convert(b, x, x.dtype), dims, keepdim, dtype, out or y, bad)
    results, count = math.prod(sizes), math.prod(inner_sizes)
    lanes, team = _team(b.device, results, count, x_outer[0], x_inner[0])
    push = [results, count, *_padded(sizes, 4), *_padded(x_outer, 4), *_padded(y_outer, 4)]
    push += [*_padded(inner_sizes, 3), *_padded(x_inner, 3), x.offset, y.offset]
    constants = (lanes, team, len(sizes), len(inner_sizes), REDUCTIONS[name], WORDS[x.dtype], int(bad is not None))
    groups = fold(results if team > 1 else -(-results // lanes))
    b.dispatch("reduce", constants, groups, push, [x.ref, *[None] * 5, bad or y.ref, y.ref])
    return y


def cumsum(b: Builder, x: Operand, dim: int, out: Operand | None = None, bad: Ref | None = None) -> Operand:
    """Running sums along ``dim``, of float32 or int32. ``bad``: a word whose bit 1 is set if one does not fit int32."""
    y = result(b, x.shape, x.dtype, out)
    if y.numel == 0:
        return y
    dim %= len(x.shape)
    outer = [d for d in range(len(x.shape)) if d != dim]
    sizes, strides = merge(x.permute(outer).shape, x.permute(outer).strides, y.permute(outer).strides)
    if len(sizes) > _MOST_OUTER:
        raise ValueError(f"rows over {len(sizes)} dimensions that cannot be merged: copy them to contiguous memory")
    rows, count = math.prod(sizes), x.shape[dim]
    push = [rows, count, *_padded(sizes, 4), *_padded(strides[0], 4), *_padded(strides[1], 4)]
    push += [x.strides[dim], y.strides[dim], x.offset, y.offset]
    constants = (lanes_of_row(b.device, count), len(sizes), WORDS[x.dtype], int(bad is not None))
    b.dispatch("cumsum", constants, fold(rows), push, [x.ref, *[None] * 5, bad or y.ref, y.ref])
    return y


def topk(b: Builder, x: Operand, k: int, largest: bool = True) -> tuple[Operand, Operand]:
    """The k largest or smallest elements along the last dimension, in order, and their int32 places; both are new.

    Of equal elements the first comes first; NaN is the largest.
    """
    *outer, count = x.shape
    values, indices = new(b, (*outer, k), x.dtype), new(b, (*outer, k), torch.int32)
    if values.numel == 0:
        return values, indices
    if k > count:
        raise ValueError(f"the {k} largest of {count} elements: k must not be larger")
    sizes, (strides,) = merge(outer, x.strides[:-1])
    if len(sizes) > _MOST_OUTER:
        return topk(b, convert(b, x, x.dtype), k, largest)
    rows = math.prod(sizes)
    push = [rows, count, k, *_padded(sizes, 4), *_padded(strides, 4), x.strides[-1], x.offset]
    constants = (lanes_of_row(b.device, count), len(sizes), WORDS[x.dtype], int(largest))
    b.dispatch("topk", constants, fold(rows), push, [x.ref, *[None] * 5, indices.ref, values.ref])
    return values, indices


def _team(device: Device, results: int, count: int, outer_step: int, inner_step: int) -> tuple[int, int]:
    """Lanes of a workgroup, and of a result: one if there are many results, or if neighbours lie side by side."""
    columns = outer_step == 1 and inner_step != 1
    many = results >= 8 if device.profile == "cpu" else results >= 4096 or (columns and results >= 256)
    if count <= _SHORT or many:
        return LANES, 1
    lanes = lanes_of_row(device, count)
    return lanes, lanes


def _padded(values: Sequence[int], count: int) -> list[int]:
    return [*values, *[0] * (count - len(values))]
