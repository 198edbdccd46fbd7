"""Norms, gates and residuals that a product of one row computes itself: a step that waits for another takes longest."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx

from qcore.plugin_api import scheme_of

from ...device import Buffer
from ...steps.operand import HALVES, Operand
from ...steps.row_kernel import Around, RowGemv
from ...steps.row_linear import row_kernel, row_linear
from ...steps.rows import Rows
from ..lowering import Lowering
from ..matrices import as_rows, operand_of
from ..residents import Weight
from .registry import rule_name


class Prologue(NamedTuple):
    """The value of a node that only products of one row read, which compute it: see `Around`."""

    name: str
    x: Operand
    other: Operand | None
    eps: float


def deferred(
    c: Lowering, node: fx.Node, name: str, x: Operand, other: Operand | None, eps: float = 0.0
) -> Prologue | None:
    """A row for its readers to compute; None if one of them is no product that can, or does not wait for it."""
    given = [x] if other is None else [x, other]
    if x.shape != tuple(node.meta["val"].shape) or any(_row(c, one) is None for one in given):
        return None
    if not node.users or not all(_reads(c, user, node, name) for user in node.users):
        return None
    return Prologue(name, x, other, eps)


def _reads(c: Lowering, user: fx.Node, node: fx.Node, name: str) -> bool:
    """Whether a reader is a product that computes what it reads."""
    product = user.op == "call_function" and rule_name(user.target) == "qcore_graph.linear" and user.args[0] is node
    return product and _kernel(c, user, name, residual=False) is not None


def _row(c: Lowering, x: Operand) -> Rows | None:
    """A row of float32 as kernels take it; None if x is more, or does not lie so."""
    k = x.shape[-1] if x.shape else 0
    return as_rows(c, c.reshaped(x, (1, k))) if x.numel == k and k else None


def _kernel(c: Lowering, node: fx.Node, prologue: str, *, residual: bool) -> RowGemv | None:
    """The kernel of a quantized layer of one row with what is around it."""
    args: Any = node.args
    weight, scheme = c.known(args[1]), scheme_of(args[3])
    if not isinstance(weight, Weight) or weight.order is not None or scheme.output is not None:
        return None
    coarse = args[0].meta["val"].dtype in HALVES
    activation: Any = scheme.activation
    return row_kernel(c.b.device, weight.weight, activation, coarse, prologue, residual)


def _added(c: Lowering, node: fx.Node) -> tuple[fx.Node, Rows] | None:
    """The sum that is the only reader of a product, and the row that it adds; None if there is none by now."""
    user = next(iter(node.users), None)
    if len(node.users) != 1 or user is None or user.op != "call_function" or rule_name(user.target) != "add":
        return None
    others = [c.known(one) for one in user.args if one is not node]
    shape, value = tuple(node.meta["val"].shape), user.meta["val"]
    if len(others) != 1 or not isinstance(others[0], Operand) or user.kwargs.get("alpha", 1) != 1:
        return None
    if others[0].shape != shape or tuple(value.shape) != shape or not value.is_floating_point():
        return None
    row = _row(c, others[0])
    return None if row is None else (user, row)


def in_one_step(
    c: Lowering, node: fx.Node, x: Operand | Prologue, weight: Weight, bias: Buffer | None, *, adds: bool
) -> Operand | None:
    """A quantized layer of one row with the prologue and the residual, which is left `ahead`; None if it has neither.

    ``adds``: whether a residual may be added: whether nothing else is, later.
    """
    name, source = (x.name, x.x) if isinstance(x, Prologue) else ("", x)
    row = _row(c, source)
    if row is None:
        return None
    found = _added(c, node) if adds else None
    kernel = _kernel(c, node, name, residual=True) if found is not None else None
    if kernel is None:
        found, kernel = None, _kernel(c, node, name, residual=False) if name else None
    if kernel is None:
        return None
    other = _row(c, x.other) if isinstance(x, Prologue) and x.other is not None else None
    refs = (None if one is None else one.ref for one in (other, found and found[1]))
    around = Around(name, next(refs), x.eps if isinstance(x, Prologue) else 0.0, next(refs))
    y = operand_of(row_linear(c.b, row, kernel, weight.weight, bias, around), node.meta["val"].shape)
    if found is not None:
        c.ahead[found[0]] = y
    return y
