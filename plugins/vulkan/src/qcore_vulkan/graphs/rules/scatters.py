"""Rules of scatters of single elements; the last element is kept where several are set at one place."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...steps.operand import Operand
from ...steps.pointwise import binary, unary
from ...steps.scattering import scatter
from ..lowering import Lowering
from ..numbers import SMALL
from .elementwise import same
from .gathers import apart
from .registry import rule, rule_name

_REDUCTIONS = {
    "sum": "add", "add": "add", "mean": "add", "prod": "multiply", "multiply": "multiply", "amax": "amax",
    "amin": "amin",
}  # fmt: skip
_START = {"add": 0.0, "multiply": 1.0, "amax": -math.inf, "amin": math.inf}


def _reduction(node: fx.Node) -> str:
    """The reduction that a node names; empty if it sets."""
    if rule_name(node.target) == "scatter_add":
        return "sum"
    given = node.args[4] if len(node.args) > 4 else node.kwargs.get("reduce", "")
    return str(given or "")


def _why_not(node: fx.Node) -> str:
    dtype, name = node.meta["val"].dtype, _reduction(node)
    if dtype in SMALL:
        return f"scatters of {dtype} have no kernel in qcore_vulkan"
    if name and not dtype.is_floating_point:
        return f"scatters of {dtype} that reduce have no kernel in qcore_vulkan"
    return ""


def _given(c: Lowering, node: fx.Node, x: Operand, dim: int, source: Any) -> tuple[Operand, int, Operand, Any]:
    """The target, the dimension, the indices and the source, with at least one dimension each."""
    target, index = c.writable(node.args[0]), c.index(node.args[2], x.shape[dim] if x.shape else 1)
    source = apart(c, same(c, source, node), target) if isinstance(source, Operand) else source
    if not x.shape:
        target, index = target.unsqueeze(0), c.reshaped(index, (1,))
        source = c.reshaped(source, (1,)) if isinstance(source, Operand) else source
    return target, dim % len(target.shape), index, source


@rule("scatter", "scatter_add", why_not=_why_not)
def _scatter(c: Lowering, node: fx.Node, x: Operand, dim: int, _index: Operand, source: Any, **_: Any) -> Operand:
    target, at, index, source = _given(c, node, x, dim, source)
    scatter(c.b, _REDUCTIONS.get(_reduction(node), "set"), target, at, index, source)
    return target if x.shape else target.select(0, 0)


@rule("scatter_reduce", why_not=_why_not)
def _scatter_reduce(
    c: Lowering, node: fx.Node, x: Operand, dim: int, _index: Operand, source: Operand, reduce: str, *,
    include_self: bool = True,
) -> Operand:  # fmt: skip
    target, at, index, source = _given(c, node, x, dim, source)
    name = _REDUCTIONS[reduce]
    if not include_self:
        scatter(c.b, "set", target, at, index, _START[name])
    scatter(c.b, name, target, at, index, source)
    if reduce == "mean":
        counts = c.filled(float(include_self), torch.float32, target.shape)
        scatter(c.b, "add", counts, at, index, 1.0)
        counts = unary(c.b, "clamp", counts, p=1.0, q=math.inf)
        target = binary(c.b, "div", target, counts)
    return target if x.shape else target.select(0, 0)
