"""Cutting and joining quantized weights without requantizing them: `narrow`, `cat`, `regroup`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import FormatError
from ..formats import PLAIN, PLAIN_INT32, Format
from ..formats.bits import has_values, raw

if TYPE_CHECKING:
    from .qtensor import QTensor

_EXPERTS, _ROWS, _COLUMNS = "experts", "rows", "columns"


def dimension(dim: int, dims: int) -> str:
    """The meaning of dimension ``dim`` of a weight with ``dims`` dimensions: experts, rows (N) or columns (K)."""
    names = (_EXPERTS, _ROWS, _COLUMNS)[-dims:]
    if not -dims <= dim < dims:
        listed = "0 (output features) and 1 (input features)" if dims == 2 else "0 (experts), 1 (N) and 2 (K)"
        raise FormatError(f"dim is {dim}; a QTensor has dimensions {listed}.")
    return names[dim]


def narrow(weight: QTensor, dim: int, start: int, length: int) -> QTensor:
    """See `QTensor.narrow`."""
    kind, stop = dimension(dim, weight.dim()), start + length
    size = weight.shape[dim]
    if start < 0 or length < 0 or stop > size:
        raise FormatError(f"narrow(dim={dim}, {start}, {length}) exceeds the weight of shape {tuple(weight.shape)}.")
    if kind == _EXPERTS:
        return weight.experts(slice(start, stop))
    if kind == _ROWS:
        rows = slice(start, stop)
        return weight.derived(
            data=weight.data[..., rows, :] if weight.dim() == 2 else weight.data[:, rows],
            scale=weight.scale[..., rows],
            zero=None if weight.zero is None else weight.zero[..., rows],
            shape=(*weight.shape[:-2], length, weight.shape[-1]),
        )
    return _narrow_columns(weight, start, stop)


def _narrow_columns(weight: QTensor, start: int, stop: int) -> QTensor:
    k, fmt = weight.shape[-1], weight.format
    if (start, stop) == (0, k):
        return weight
    if weight.order is not None:
        raise FormatError(
            "cannot cut K of a weight with an order: its stored columns are not in the order of x.\n"
            "Cut the dequantized weight, or gather x before the layer."
        )
    groups = slice(None)
    if fmt.group_size is not None:
        for cut in (start, stop):
            _check_cut(cut, fmt.group_size, k)
        # An empty cut at the ragged end has no group.
        groups = slice(-(-start // fmt.group_size), -(-stop // fmt.group_size))
    scale = weight.scale[..., groups, :]
    zero = None if weight.zero is None else weight.zero[..., groups, :]
    shape = (*weight.shape[:-1], stop - start)
    unit = _codes_per_unit(fmt)
    if unit and start % unit == 0 and (stop % unit == 0 or stop == k):
        data = weight.data[..., start // unit : -(-stop // unit)]
        return weight.derived(data=data, scale=scale, zero=zero, shape=shape)
    data = weight.encode(weight.codes()[..., start:stop])
    return weight.derived(data=data, scale=scale, zero=zero, shape=shape)


def _check_cut(cut: int, g: int, k: int) -> None:
    if cut % g and cut != k:
        below, above = cut // g * g, min(cut // g * g + g, k)
        raise FormatError(
            f"cannot cut K at {cut}: groups of {g} codes share a scale.\n"
            f"The nearest legal cuts are {below} and {above}."
        )


def _codes_per_unit(fmt: Format) -> int:
    """Codes in one element of the data, if columns of the data are columns of the weight; else 0."""
    if fmt.layout == PLAIN:
        return 8 // fmt.element.container_bits
    return 8 if fmt.layout == PLAIN_INT32 else 0


def regroup(weight: QTensor, group_size: int) -> QTensor:
    """See `QTensor.regroup`."""
    fmt, k = weight.format, weight.shape[-1]
    if type(group_size) is not int or group_size < 1:
        raise FormatError(f"regroup: group_size is {group_size!r}; it must be a positive integer.")
    old = fmt.group_size
    if old == group_size:
        return weight
    if old is not None and old % group_size and old < k:
        raise FormatError(f"cannot regroup {fmt} to groups of {group_size}: it must divide {old}.")
    finer = replace(fmt, group_size=group_size)
    first = torch.arange(finer.groups(k), device=weight.device) * group_size
    origin = first // (old or max(k, 1))
    zero = None if weight.zero is None else weight.zero.index_select(-2, origin)
    scale = raw(weight.scale).index_select(-2, origin).view(weight.scale.dtype)
    return weight.derived(scale=scale, zero=zero, format=finer)


def cat(tensors: Sequence[QTensor], dim: int = 0) -> QTensor:
    """See `QTensor.cat`."""
    if not tensors:
        raise FormatError("cat needs at least one QTensor.")
    first = tensors[0]
    kind = dimension(dim, first.dim())
    at = dim % first.dim()
    for other in tensors[1:]:
        same = other.dim() == first.dim() and all(
            a == b for place, (a, b) in enumerate(zip(other.shape, first.shape, strict=True)) if place != at
        )
        if other.format != first.format or not same:
            raise FormatError(
                f"cannot join {first.format} {tuple(first.shape)} and {other.format} {tuple(other.shape)}\n"
                f"along dim {dim}: formats and the other dimension must be equal."
            )
    if len(tensors) == 1:
        return first
    joined = {_EXPERTS: _cat_experts, _ROWS: _cat_rows, _COLUMNS: _cat_columns}[kind](tensors)
    names = {t.quantizer for t in tensors}
    return joined.derived(quantizer=names.pop() if len(names) == 1 else None)


def _cat_experts(tensors: Sequence[QTensor]) -> QTensor:
    first = tensors[0]
    if len({frozenset(t.tensors()) for t in tensors}) > 1:
        raise FormatError("cannot join experts: only some of them have an order. Set one for all of them.")
    parts = {name: _joined([t.tensors()[name] for t in tensors], 0) for name in first.tensors()}
    return first.derived(**parts, shape=(sum(t.shape[0] for t in tensors), *first.shape[1:]))


def _cat_rows(tensors: Sequence[QTensor]) -> QTensor:
    first = tensors[0]
    _check_alike(tensors, "order", "Join weights that read x in one order, or dequantize.")
    _check_alike(tensors, "global_scale", "Requantize the joined weight, or keep the parts apart.")
    shape = (*first.shape[:-2], sum(t.shape[-2] for t in tensors), first.shape[-1])
    return first.derived(
        data=_joined([t.data for t in tensors], first.dim() - 2),
        scale=_joined([t.scale for t in tensors], -1),
        zero=_joined_or_none([t.zero for t in tensors], -1),
        shape=shape,
    )


def _check_alike(tensors: Sequence[QTensor], name: str, remedy: str) -> None:
    first = getattr(tensors[0], name)
    if not all(_equal(getattr(t, name), first) for t in tensors[1:]):
        raise FormatError(f"cannot join weights of different {name}.\n{remedy}")


def _cat_columns(tensors: Sequence[QTensor]) -> QTensor:
    first, g = tensors[0], tensors[0].format.group_size
    _check_alike(tensors, "global_scale", "Requantize the joined weight, or keep the parts apart.")
    codes = first.encode(torch.cat([t.codes() for t in tensors], dim=-1))
    shape = (*first.shape[:-1], sum(t.shape[-1] for t in tensors))
    order = _joined_order(tensors)
    if g is None:
        if not all(_equal(t.scale, first.scale) and _equal(t.zero, first.zero) for t in tensors):
            raise FormatError(
                "cannot join per-channel weights along K: their scales differ.\n"
                "Requantize the joined weight, or regroup(g) the parts with a g that divides each K."
            )
        return first.derived(data=codes, shape=shape, order=order)
    # Parts without columns, such as `narrow` returns at the end of K, may follow a ragged group.
    filled = [part for part in tensors if part.shape[-1]]
    for part in filled[:-1]:
        if part.shape[-1] % g:
            raise FormatError(
                f"cannot join along K: a part has K={part.shape[-1]}, which does not end at a group of {g}.\n"
                f"Only the last part may; narrow the others, or requantize the joined weight."
            )
    scale = _joined([t.scale for t in tensors], -2)
    return first.derived(
        data=codes, scale=scale, zero=_joined_or_none([t.zero for t in tensors], -2), shape=shape, order=order
    )


def _joined_order(tensors: Sequence[QTensor]) -> Tensor | None:
    """The order of the joined columns: features of a part follow those of the parts before it."""
    if all(t.order is None for t in tensors):
        return None
    parts, start = [], 0
    for t in tensors:
        k = t.shape[-1]
        plain = torch.arange(k, dtype=torch.int32, device=t.device).expand(*t.shape[:-2], k)
        parts.append((plain if t.order is None else t.order) + start)
        start += k
    return torch.cat(parts, dim=-1)


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat([raw(t) for t in tensors], dim=dim).view(tensors[0].dtype)


def _joined_or_none(tensors: Sequence[Tensor | None], dim: int) -> Tensor | None:
    found = [t for t in tensors if t is not None]
    return _joined(found, dim) if found else None


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two parameters are equal; those without values (meta) are assumed to be."""
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return a is b
    return not has_values(a) or torch.equal(raw(a), raw(b))
