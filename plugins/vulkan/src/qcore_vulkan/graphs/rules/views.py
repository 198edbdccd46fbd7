"""Rules of views: other strides of the same memory, copied only if no strides would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...steps.operand import Operand
from ...steps.pointwise import convert
from ..lowering import Lowering
from ..views import bounds, expanded, squeezed
from .registry import rule


def _why_not_bits(node: fx.Node) -> str:
    bits = any(isinstance(arg, torch.dtype) for arg in node.args)
    return "the bits of numbers seen as another dtype have no kernel here" if bits else ""


@rule("view", "_unsafe_view", why_not=_why_not_bits)
def _view(c: Lowering, node: fx.Node, x: Operand, *_size: Any) -> Operand:
    return c.reshaped(x, node.meta["val"].shape)


@rule("clone", "alias", "detach", "lift_fresh_copy")
def _same(c: Lowering, node: fx.Node, x: Operand, **_: Any) -> Operand:
    return x


@rule("expand")
def _expand(c: Lowering, node: fx.Node, x: Operand, size: Sequence[int], **_: Any) -> Operand:
    return expanded(x, size)


@rule("permute")
def _permute(c: Lowering, node: fx.Node, x: Operand, dims: Sequence[int]) -> Operand:
    return x.permute([dim % len(x.shape) for dim in dims])


@rule("unsqueeze")
def _unsqueeze(c: Lowering, node: fx.Node, x: Operand, dim: int) -> Operand:
    return x.unsqueeze(dim % (len(x.shape) + 1))


@rule("squeeze")
def _squeeze(c: Lowering, node: fx.Node, x: Operand, dim: Any = None) -> Operand:
    dims = range(len(x.shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    return squeezed(x, dims)


@rule("slice")
def _slice(
    c: Lowering, node: fx.Node, x: Operand, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Operand:
    at = dim % len(x.shape)
    return x.slice(at, bounds(x.shape[at], start, None)[0], node.meta["val"].shape[at], step)


@rule("select")
def _select(c: Lowering, node: fx.Node, x: Operand, dim: int, index: int) -> Operand:
    at = dim % len(x.shape)
    return x.select(at, index % x.shape[at])


@rule("split_with_sizes")
def _split(c: Lowering, node: fx.Node, x: Operand, sizes: Sequence[int], dim: int = 0) -> tuple[Operand, ...]:
    at = dim % len(x.shape)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(x.slice(at, start, size) for start, size in zip(starts, sizes, strict=True))


def _why_not_strided(node: fx.Node) -> str:
    args: Any = node.args
    x = args[0].meta["val"]
    offset = args[3] if len(args) > 3 and args[3] is not None else 0
    last = offset + sum((count - 1) * step for count, step in zip(args[1], args[2], strict=True))
    within = x.is_contiguous() and x.storage_offset() == 0 and last < x.numel()
    return "" if within else "as_strided of a view has no kernel in qcore_vulkan"


@rule("as_strided", why_not=_why_not_strided)
def _as_strided(
    c: Lowering, node: fx.Node, x: Operand, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Operand:
    whole = c.contiguous(x)
    y = replace(whole, shape=tuple(size), strides=tuple(stride), offset=whole.offset + (offset or 0))
    return y if y.is_contiguous else convert(c.b, y, y.dtype)  # elements of other views may overlap
