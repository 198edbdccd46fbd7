"""Rules of ops that move elements: joins, scatters of slices, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ...steps.operand import Operand, new
from ...steps.pointwise import convert
from ..lowering import Lowering
from ..numbers import on_device
from ..views import bounds
from .gathers import apart
from .registry import rule


@rule("cat")
def _cat(c: Lowering, node: fx.Node, xs: Sequence[Operand], dim: int = 0) -> Operand:
    result = node.meta["val"]
    y, at, start = new(c.b, result.shape, on_device(result.dtype)), dim % len(result.shape), 0
    for x in xs:
        size = x.shape[at]
        convert(c.b, x, y.dtype, out=y.slice(at, start, size))
        start += size
    return y


@rule("stack")
def _stack(c: Lowering, node: fx.Node, xs: Sequence[Operand], dim: int = 0) -> Operand:
    at = dim % len(node.meta["val"].shape)
    return _cat(c, node, [x.unsqueeze(at) for x in xs], at)  # type: ignore[no-any-return]


@rule("slice_scatter")
def _slice_scatter(
    c: Lowering, node: fx.Node, x: Operand, source: Operand, dim: int = 0, start: Any = None, end: Any = None,
    step: int = 1,
) -> Operand:  # fmt: skip
    y, at = c.writable(node.args[0]), dim % len(x.shape)
    first, last = bounds(x.shape[at], start, end)
    part = y.slice(at, first, -(-(last - first) // step), step)
    if part.numel:
        convert(c.b, apart(c, source, y).broadcast_to(part.shape), y.dtype, out=part)
    return y


@rule("repeat")
def _repeat(c: Lowering, node: fx.Node, x: Operand, repeats: Sequence[int]) -> Operand:
    missing = len(repeats) - len(x.shape)
    for _ in range(missing):
        x = x.unsqueeze(0)
    spread: list[int] = []
    for at, (each, size) in enumerate(zip(repeats, x.shape, strict=True)):
        spread += [each, size]
        x = x.unsqueeze(2 * at)
    return c.reshaped(x.broadcast_to(spread), node.meta["val"].shape)


@rule("constant_pad_nd")
def _constant_pad(c: Lowering, node: fx.Node, x: Operand, pad: Sequence[int], value: Any = 0) -> Operand:
    result = node.meta["val"]
    y = c.filled(value, on_device(result.dtype), result.shape)
    inside = y
    for number in range(len(pad) // 2):
        at, (before, after) = len(x.shape) - 1 - number, pad[2 * number : 2 * number + 2]
        first, last = max(0, -before), x.shape[at] - max(0, -after)
        x = x.slice(at, first, last - first)
        inside = inside.slice(at, max(0, before), last - first)
    if x.numel:
        convert(c.b, x, y.dtype, out=inside)
    return y
