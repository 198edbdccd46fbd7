"""Rules of reductions, scans and norms over dimensions."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...builder import Ref
from ...steps.norms import layer_norm, softmax
from ...steps.operand import Operand
from ...steps.pointwise import binary, unary
from ...steps.reductions import argreduce, cumsum, reduce, topk
from ..lowering import Lowering, Rule
from ..numbers import SMALL
from .elementwise import same
from .gathers import along
from .registry import rule, rule_name


def why_not_small(node: fx.Node) -> str:
    """Why a node over integers of 8 and 16 bits stays on the host; empty for others."""
    dtypes = [one.meta["val"].dtype for one in node.all_input_nodes]
    bad = next((dtype for dtype in dtypes if dtype in SMALL), None)
    return "" if bad is None else f"reductions of {bad} have no kernel in qcore_vulkan"


def _dims(dim: Any, ndim: int) -> tuple[int, ...]:
    """The dimensions that torch means: all for None and an empty list."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return tuple(range(ndim))
    return tuple(sorted(one % max(ndim, 1) for one in ([dim] if isinstance(dim, int) else dim)))


def reduced(c: Lowering, name: str, x: Operand, dims: Sequence[int], keepdim: bool, bad: Ref | None = None) -> Operand:
    """A reduction; x itself if it has no dimensions."""
    return reduce(c.b, name, x, tuple(dims), keepdim, bad=bad) if x.shape else x


def _overflow(c: Lowering, node: fx.Node) -> Ref | None:
    """Where a sum of integers says that it does not fit 32 bits, if torch computes it in 64."""
    source: Any = node.args[0]
    wide = node.meta["val"].dtype == torch.int64 and source.meta["val"].dtype != torch.bool
    return c.flags if wide else None


def _reduction(name: str) -> Rule:
    def apply(c: Lowering, node: fx.Node, x: Operand, dim: Any = None, keepdim: bool = False, **_: Any) -> Operand:
        wide = c.cast(x, torch.bool) if name == "any" else same(c, x, node)
        return reduced(c, name, wide, _dims(dim, len(x.shape)), keepdim, _overflow(c, node) if name == "sum" else None)

    return apply


def _why_not_wide(node: fx.Node) -> str:
    """Products of integers may leave 32 bits unnoticed; those of floats are floats."""
    source, result = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    if not result.is_floating_point and source != torch.bool:
        return f"{rule_name(node.target)} of {source} may exceed the 32 bits in which qcore_vulkan computes integers"
    return why_not_small(node)


for _name in ("mean", "amax", "amin", "any", "sum"):
    rule(_name, why_not=why_not_small)(_reduction(_name))
rule("prod", why_not=_why_not_wide)(_reduction("prod"))


_MOST_COMPARED = 1 << 24
"""Elements times bins of a histogram."""


def _range(node: fx.Node) -> tuple[int, float, float]:
    """Bins of a histogram, and the ends of the first and the last."""
    given = dict(zip(("bins", "min", "max"), node.args[1:], strict=False)) | node.kwargs
    return given.get("bins", 100), given.get("min", 0), given.get("max", 0)  # type: ignore[return-value]


def _why_not_histogram(node: fx.Node) -> str:
    bins, low, high = _range(node)
    if low >= high:
        return "a histogram between its smallest and largest element has no kernel in qcore_vulkan: pass min and max"
    if bins * node.args[0].meta["val"].numel() > _MOST_COMPARED:  # type: ignore[union-attr]
        return f"a histogram compares each element with each bin, here more than {_MOST_COMPARED} times"
    return ""


@rule("histc", why_not=_why_not_histogram)
def _histogram(c: Lowering, node: fx.Node, x: Operand, *_: Any, **__: Any) -> Operand:
    bins, low, high = _range(node)
    flat = c.cast(c.reshaped(x, (x.numel,)), torch.float32)
    # As torch: the product before the quotient, and the last bin has its upper end.
    place = binary(c.b, "div", binary(c.b, "mul", binary(c.b, "sub", flat, low), float(bins)), float(high - low))
    place = binary(c.b, "minimum", unary(c.b, "floor", place), float(bins - 1))
    inside = binary(c.b, "logical_and", binary(c.b, "ge", flat, low), binary(c.b, "le", flat, high))
    every = binary(c.b, "sub", cumsum(c.b, c.filled(1.0, torch.float32, (bins,)), 0), 1.0)
    found = binary(c.b, "eq", place.unsqueeze(0), every.unsqueeze(1))
    counted = binary(c.b, "logical_and", found, inside.unsqueeze(0))
    return same(c, reduce(c.b, "sum", c.cast(counted, torch.float32), (1,)), node)


def lasting(x: Operand, dim: int) -> tuple[Operand, list[int]]:
    """The operand with a dimension moved to the end, and the order that moves it back."""
    at, ndim = dim % len(x.shape), len(x.shape)
    order = [i for i in range(ndim) if i != at] + [at]
    return x.permute(order), [order.index(i) for i in range(ndim)]


def _softmax_rule(log: bool) -> Rule:
    def apply(c: Lowering, node: fx.Node, x: Operand, dim: int, *_: Any) -> Operand:
        wide = same(c, x, node)
        if not wide.shape:
            wide = wide.unsqueeze(0)
            return softmax(c.b, wide, log=log).select(0, 0)
        moved, back = lasting(wide, dim)
        return softmax(c.b, moved, log=log).permute(back)

    return apply


rule("_softmax")(_softmax_rule(False))
rule("_log_softmax")(_softmax_rule(True))


@rule("argmax", "argmin", why_not=why_not_small)
def _arg(c: Lowering, node: fx.Node, x: Operand, dim: int | None = None, keepdim: bool = False) -> Operand:
    name, shape = rule_name(node.target), node.meta["val"].shape
    wide = c.cast(x, torch.int32) if x.dtype == torch.bool else x
    if dim is None or not x.shape:
        found = argreduce(c.b, name, c.reshaped(wide, (x.numel,)), 0, False)
    else:
        found = argreduce(c.b, name, wide, dim % len(x.shape), keepdim)
    return c.reshaped(found, shape)


def _extreme(name: str) -> Rule:
    def apply(c: Lowering, node: fx.Node, x: Operand, dim: int | None = None, keepdim: bool = False) -> Any:
        wide = c.cast(x, torch.int32) if x.dtype == torch.bool else x
        if dim is None or not x.shape:
            return same(c, reduced(c, f"a{name}", wide, _dims(None, len(x.shape)), False), node)
        at = dim % len(x.shape)
        index = argreduce(c.b, f"arg{name}", wide, at, True)
        value = along(c, x, at, index)
        return (value, index) if keepdim else (value.select(at, 0), index.select(at, 0))

    return apply


def _why_not_extreme(node: fx.Node) -> str:
    return "" if isinstance(node.meta["val"], (tuple, list)) or len(node.args) == 1 else "it reduces in an unknown way"


rule("max", why_not=_why_not_extreme)(_extreme("max"))
rule("min", why_not=_why_not_extreme)(_extreme("min"))


@rule("cumsum", why_not=why_not_small)
def _cumsum(c: Lowering, node: fx.Node, x: Operand, dim: int, **_: Any) -> Operand:
    wide = same(c, x, node)
    return cumsum(c.b, wide, dim % len(x.shape), bad=_overflow(c, node)) if x.shape else wide


@rule("topk", why_not=why_not_small)
def _topk(
    c: Lowering, node: fx.Node, x: Operand, k: int, dim: int = -1, largest: bool = True, *_: Any
) -> tuple[Operand, Operand]:
    moved, back = lasting(x, dim)
    values, indices = topk(c.b, moved, k, largest)
    return values.permute(back), indices.permute(back)


def _why_not_var(node: fx.Node) -> str:
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    dims = _dims(node.args[1] if len(node.args) > 1 else None, x.dim())
    correction: Any = node.kwargs.get("correction", 1)
    count = math.prod(x.shape[i] for i in dims)
    return "" if count > (1 if correction is None else correction) else "it divides by a count of 0"


@rule("var", why_not=_why_not_var)
def _var(
    c: Lowering, node: fx.Node, x: Operand, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> Operand:
    dims = _dims(dim, len(x.shape))
    count = math.prod(x.shape[i] for i in dims)
    free = count - (1 if correction is None else correction)
    centered = binary(c.b, "sub", x, reduced(c, "mean", x, dims, True))
    squares = reduced(c, "mean", binary(c.b, "mul", centered, centered), dims, keepdim)
    return squares if free == count else binary(c.b, "mul", squares, count / free)


def _why_not_order(node: fx.Node) -> str:
    order = node.args[1] if len(node.args) > 1 else 2
    return "" if order in {1, 2, math.inf} else f"a vector norm of order {order} has no kernel in qcore_vulkan"


@rule("linalg_vector_norm", why_not=_why_not_order)
def _vector_norm(
    c: Lowering, node: fx.Node, x: Operand, order: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any
) -> Operand:
    dims = _dims(dim, len(x.shape))
    if order == 2:
        return unary(c.b, "sqrt", reduced(c, "sum", binary(c.b, "mul", x, x), dims, keepdim))
    return reduced(c, "sum" if order == 1 else "amax", unary(c.b, "abs", x), dims, keepdim)


def why_not_statistics(node: fx.Node) -> str:
    """Why a norm stays on the host whose mean and variance are read; empty if nothing reads them."""
    read = [user.args[1] for user in node.users if user.target is operator.getitem and user.users]
    return "mean and variance of a norm have no kernel in qcore_vulkan" if any(at != 0 for at in read) else ""


def _why_not_layer_norm(node: fx.Node) -> str:
    many = len(node.args[1]) != 1  # type: ignore[arg-type]
    return "a layer norm over several dimensions has no kernel in qcore_vulkan" if many else why_not_statistics(node)


@rule("native_layer_norm", why_not=_why_not_layer_norm)
def _native_layer_norm(
    c: Lowering, node: fx.Node, x: Operand, shape: Any, weight: Any, bias: Any, eps: float
) -> tuple[Operand, None, None]:
    return layer_norm(c.b, x, weight, bias, eps), None, None
