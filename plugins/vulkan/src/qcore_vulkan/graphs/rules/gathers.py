"""Rules of indexing by tensors: gathers, and scatters into caches, in place where nothing else needs the old values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...steps.gather import gather, scatter_rows, take_along
from ...steps.operand import Operand
from ...steps.pointwise import binary, convert
from ...steps.rope import rope, rope_rows
from ...steps.scattering import scatter
from ..lowering import Lowering
from ..views import expanded
from .elementwise import same
from .registry import rule


def apart(c: Lowering, source: Operand, target: Operand) -> Operand:
    """The source of a step that writes ``target`` in place: copied if it is in the same memory."""
    same_memory = (source.ref.buffer, source.ref.offset) == (target.ref.buffer, target.ref.offset)
    return convert(c.b, source, source.dtype) if same_memory else source


def along(c: Lowering, x: Operand, dim: int, index: Operand) -> Operand:
    """As `torch.gather`, for indices in range."""
    return take_along(c.b, x, dim, index)


@rule("embedding")
def _embedding(c: Lowering, node: fx.Node, weight: Operand, _indices: Operand, *_: Any) -> Operand:
    return gather(c.b, weight, 0, c.index(node.args[1], weight.shape[0]))


@rule("index_select")
def _index_select(c: Lowering, node: fx.Node, x: Operand, dim: int, _index: Operand) -> Operand:
    at = dim % len(x.shape)
    index = c.index(node.args[2], x.shape[at])
    return gather(c.b, x, at, c.reshaped(index, (index.numel,)))


@rule("gather")
def _gather(c: Lowering, node: fx.Node, x: Operand, dim: int, index: Operand, **_: Any) -> Operand:
    at = dim % len(x.shape)
    for i, size in enumerate(index.shape):
        x = x if i == at else x.slice(i, 0, size)
    return along(c, x, at, c.index(node.args[2], x.shape[at]))


# Several indices.


def _why_not_index(node: fx.Node) -> str:
    indices = [one for one in node.args[1] if one is not None]  # type: ignore[union-attr]
    if any(one.meta["val"].dtype in (torch.bool, torch.uint8) for one in indices):  # type: ignore[union-attr]
        return "indexing by a mask gives a size that depends on values"
    at = [i for i, one in enumerate(node.args[1]) if one is not None]  # type: ignore[arg-type]
    if at != list(range(at[0], at[-1] + 1)):
        return "indexing by tensors of dimensions that are not adjacent has no kernel in qcore_vulkan"
    return ""


def _flat(c: Lowering, node: fx.Node, x: Operand, nodes: Sequence[Any]) -> tuple[int, int, Operand]:
    """The first indexed dimension, how many there are, and the positions in them as if they were one."""
    at = [i for i, one in enumerate(nodes) if one is not None]
    index: Operand | None = None
    for i in at:
        own = c.index(nodes[i], x.shape[i], wrap=True)
        if index is not None:
            own = binary(c.b, "add", binary(c.b, "mul", index, x.shape[i]), own)
        index = own
    assert index is not None
    return at[0], len(at), index


def _merged(c: Lowering, x: Operand, dim: int, count: int) -> Operand:
    """The operand with ``count`` dimensions from ``dim`` on as one."""
    size = 1
    for one in x.shape[dim : dim + count]:
        size *= one
    return c.reshaped(x, (*x.shape[:dim], size, *x.shape[dim + count :])) if count > 1 else x


@rule("index", why_not=_why_not_index)
def _index(c: Lowering, node: fx.Node, x: Operand, _indices: Sequence[Any]) -> Operand:
    dim, count, index = _flat(c, node, x, node.args[1])  # type: ignore[arg-type]
    return gather(c.b, _merged(c, x, dim, count), dim, index)


def _accumulates(node: fx.Node) -> bool:
    return bool(len(node.args) > 3 and node.args[3])


def _why_not_index_put(node: fx.Node) -> str:
    dtype = node.meta["val"].dtype
    if _accumulates(node) and not dtype.is_floating_point:
        return f"index_put of {dtype} that accumulates has no kernel in qcore_vulkan"
    return _why_not_index(node)


@rule("index_put", why_not=_why_not_index_put)
def _index_put(c: Lowering, node: fx.Node, x: Operand, indices: Sequence[Any], values: Operand, *_: Any) -> Operand:
    target = c.writable(node.args[0])
    dim, count, index = _flat(c, node, x, node.args[1])  # type: ignore[arg-type]
    if count > 1:
        target = c.contiguous(target)
    merged = _merged(c, target, dim, count)
    before, after = merged.shape[:dim], merged.shape[dim + 1 :]
    source = expanded(apart(c, same(c, values, node), target), (*before, *index.shape, *after))
    source, index = c.reshaped(source, (*before, index.numel, *after)), c.reshaped(index, (index.numel,))
    if _accumulates(node):
        spread = c.reshaped(index, tuple(index.numel if at == dim else 1 for at in range(len(merged.shape))))
        scatter(c.b, "add", merged, dim, spread.broadcast_to(source.shape), source)
    else:
        scatter_rows(c.b, merged, dim, index, source)
    return target


@rule("index_copy")
def _index_copy(c: Lowering, node: fx.Node, x: Operand, dim: int, _index: Operand, source: Any) -> Operand:
    target, at = c.writable(node.args[0]), dim % len(x.shape)
    index = c.index(node.args[2], x.shape[at])
    index = c.reshaped(index, (index.numel,))
    if isinstance(source, tuple):  # x, cos and sin of a rotary embedding
        rotated, cos, sin = (apart(c, one, target) for one in source)
        if rope_rows(c.b, rotated, cos, sin, target, at, index) is not None:
            return target
        source = rope(c.b, rotated, cos, sin)
    scatter_rows(c.b, target, at, index, apart(c, same(c, source, node), target))
    return target
