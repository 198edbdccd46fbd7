"""Norms, gates and residuals that a product of one row computes itself: a step that waits for another takes longest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from qcore.plugin_api import scheme_of

from ...builder import Ref
from ...device import Buffer
from ...steps.operand import HALVES, Operand, over
from ...steps.row_kernel import Around, Heads, RowGemv
from ...steps.row_linear import row_kernel, row_linear
from ...steps.rows import Rows
from ..lowering import Lowering
from ..matrices import as_rows
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
    """A row for its readers to compute; None if one of them is no product that can."""
    given = [x] if other is None else [x, other]
    if x.shape != tuple(node.meta["val"].shape) or any(_row(c, one) is None for one in given):
        return None
    if not node.users or not all(_reads(c, user, node, name) for user in node.users):
        return None
    return Prologue(name, x, other, eps)


def _reads(c: Lowering, user: fx.Node, node: fx.Node, name: str) -> bool:
    """Whether a reader is a product that computes what it reads."""
    product = user.op == "call_function" and rule_name(user.target) == "qcore_graph.linear" and user.args[0] is node
    return product and _kernel(c, user, prologue=name) is not None


def _row(c: Lowering, x: Operand) -> Rows | None:
    """A row of float32 as kernels take it; None if x is more, or does not lie so."""
    k = x.shape[-1] if x.shape else 0
    return as_rows(c, c.reshaped(x, (1, k))) if x.numel == k and k else None


def _kernel(c: Lowering, node: fx.Node, **around: Any) -> RowGemv | None:
    """The kernel of a quantized layer of one row with what is around it."""
    args: Any = node.args
    weight, scheme = c.known(args[1]), scheme_of(args[3])
    if not isinstance(weight, Weight) or weight.order is not None or scheme.output is not None:
        return None
    coarse = args[0].meta["val"].dtype in HALVES
    activation: Any = scheme.activation
    return row_kernel(c.b.device, weight.weight, activation, coarse, **around)


def _only(node: fx.Node, *names: str) -> fx.Node | None:
    """The only reader of a node, if it calls one of these ops."""
    user = next(iter(node.users), None)
    if len(node.users) != 1 or user is None or user.op != "call_function" or rule_name(user.target) not in names:
        return None
    return user


def cached(node: fx.Node) -> fx.Node | None:
    """The copy into a cache that is the only reader of a node."""
    user = _only(node, "index_copy")
    return user if user is not None and [i for i, one in enumerate(user.args) if one is node] == [3] else None


class _After(NamedTuple):
    """What a product computes after it multiplies.

    ``later``: the values of later nodes that are there then; None stands for the product's result.
    """

    later: dict[fx.Node, Any]
    residual: Ref | None = None
    heads: Heads | None = None

    def kernel(self) -> dict[str, Any]:
        """What `row_kernel` must look for."""
        heads = self.heads
        rotated = None if heads is None else heads.size if heads.rotation else 0
        return {"residual": self.residual is not None, "rotated": rotated}


def _added(c: Lowering, node: fx.Node) -> _After | None:
    """The sum with a row that is known by now, if it is the only reader of a product."""
    user = _only(node, "add")
    if user is None:
        return None
    others = [c.known(one) for one in user.args if one is not node]
    shape, value = tuple(node.meta["val"].shape), user.meta["val"]
    if len(others) != 1 or not isinstance(others[0], Operand) or user.kwargs.get("alpha", 1) != 1:
        return None
    if others[0].shape != shape or tuple(value.shape) != shape or not value.is_floating_point():
        return None
    row = _row(c, others[0])
    return None if row is None else _After({user: None}, residual=row.ref)


def _headed(c: Lowering, node: fx.Node) -> _After | None:
    """The place of heads that are all that reads a product, and are rotated, or copied into a cache, or both."""
    chain = [node]
    while (view := _only(chain[-1], "view", "_unsafe_view", "permute")) is not None:
        chain.append(view)
    last, shape = chain[-1], tuple(chain[-1].meta["val"].shape)
    if len(shape) != 4 or shape[::2] != (1, 1) or not _keeps_order(chain):
        return None
    rope = _only(last, "qcore_graph.rope")
    rotation = None if rope is None else _rotation(c, rope, last)
    if (rope is None) != (rotation is None):
        return None
    heads, later, copy = Heads(shape[3], rotation), dict.fromkeys(chain[1:], ()), cached(rope or last)
    place = None if copy is None else _place(c, copy, shape)
    if place is None:
        return None if rope is None else _After(later | {rope: None}, heads=heads)
    assert copy is not None
    target, row = place
    _, pitch, stride, _ = target.strides
    heads = replace(heads, out=target.ref, row=row, stride=stride, pitch=pitch, offset=target.offset)
    return _After({**later, **({} if rope is None else {rope: ()}), copy: target}, heads=heads)


def _keeps_order(chain: list[fx.Node]) -> bool:
    """Whether views leave a row's elements in their order; at the end, a dimension of 1 may change places."""
    moved = [one for one in chain[1:] if rule_name(one.target) == "permute"]
    if not moved:
        return True
    exchanges = list(moved[0].args[1]) == [0, 2, 1, 3]  # type: ignore[arg-type]
    return moved == chain[-1:] and exchanges and tuple(chain[-2].meta["val"].shape[:2]) == (1, 1)


def _rotation(c: Lowering, rope: fx.Node, x: fx.Node) -> tuple[Ref, Ref] | None:
    """Cosines and sines that all heads share, if they are known by now and x is what is rotated."""
    shape, known = tuple(rope.meta["val"].shape), [c.known(one) for one in rope.args[1:]]
    if rope.args[0] is not x or shape != tuple(x.meta["val"].shape):
        return None
    rows = [_row(c, one) if isinstance(one, Operand) and one.shape[-1:] == shape[3:] else None for one in known]
    return None if rows[0] is None or rows[1] is None else (rows[0].ref, rows[1].ref)


def _place(c: Lowering, copy: fx.Node, shape: tuple[int, ...]) -> tuple[Operand, Ref] | None:
    """The cache that a copy of heads ``(1, H, 1, D)`` writes, and the row of it, if it can be written now."""
    args: Any = copy.args
    target, index = c.known(args[0]), c.known(args[2])
    if not isinstance(target, Operand) or not isinstance(index, Operand) or index.numel != 1 or args[1] % 4 != 2:
        return None
    if (*target.shape[:2], target.shape[3]) != (*shape[:2], shape[3]) or target.dtype != torch.float32:
        return None
    found = c.written_by(copy, args[0])
    row = None if found is None or found.strides[3] != 1 else c.index(args[2], target.shape[2])
    return None if found is None or row is None or row.offset else (found, row.ref)


def in_one_step(
    c: Lowering, node: fx.Node, x: Operand | Prologue, weight: Weight, bias: Buffer | None, *, ends: bool
) -> Any:
    """A quantized layer of one row with what is before and after it, which is left `ahead`; None if there is nothing.

    ``ends``: whether nothing else is added to it. Its value is empty if later nodes have what it computes.
    """
    name, source = (x.name, x.x) if isinstance(x, Prologue) else ("", x)
    row = _row(c, source)
    if row is None:
        return None
    after = (_added(c, node) or _headed(c, node)) if ends else None
    kernel = None if after is None else _kernel(c, node, prologue=name, **after.kernel())
    if kernel is None:
        after, kernel = None, _kernel(c, node, prologue=name) if name else None
    if kernel is None:
        return None
    around = Around() if after is None else Around(residual=after.residual, heads=after.heads)
    if isinstance(x, Prologue):
        other = None if x.other is None else _row(c, x.other)
        around = replace(around, prologue=name, other=None if other is None else other.ref, eps=x.eps)
    y = row_linear(c.b, row, kernel, weight.weight, bias, around)
    if after is None:
        return over(y.ref, node.meta["val"].shape, torch.float32)
    for later, value in after.later.items():
        c.ahead[later] = over(y.ref, later.meta["val"].shape, torch.float32) if value is None else value
    return ()
