"""Replaces patterns of simple ops by the float ops that a backend has kernels for, and removes ops that do nothing.

The patterns are those that models in the form of transformers' decompose to:

* ``rms_norm``: ``weight * (x.float() * rsqrt(mean(x.float()^2) + eps)).to(x.dtype)``, with or without the weight;
* ``rope``: ``x * cos + cat(-x2, x1) * sin`` with x1 and x2 the halves of the last dimension;
* ``attention``: keys and values that were repeated for groups of heads are taken as they were before.

Writes by a mask (``x[mask] = value``) become a choice between value and x, whatever the backend.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .copying import memory_of
from .ops import base_name

_aten = torch.ops.aten
_qcore: Any = torch.ops.qcore_graph


def clean(module: fx.GraphModule) -> None:
    """Remove slices, expansions, views and casts that change nothing, and empty parts of what is joined, in place."""
    _drop_empty(module.graph)
    returned = {memory_of(one.meta.get("val")) for one in module.graph.output_node().all_input_nodes}
    for node in list(module.graph.nodes):
        if node.op != "call_function" or base_name(node.target) not in _NOTHING:
            continue
        if module.graph.output_node() in node.users:  # a result has memory of its own
            continue
        source, value = node.args[0], node.meta.get("val")
        before = source.meta.get("val") if isinstance(source, fx.Node) else None
        memory = memory_of(value)
        if memory in returned and memory != memory_of(before):  # a copy, of which a view is a result
            continue
        if isinstance(value, Tensor) and isinstance(before, Tensor) and _same(value, before):
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
    module.recompile()


def _drop_empty(graph: fx.Graph) -> None:
    """Join only tensors that have elements: a cache that grows begins as an empty one."""
    changed = False
    for node in graph.nodes:
        if node.op != "call_function" or base_name(node.target) != "cat":
            continue
        kept = [one for one in node.args[0] if one.meta["val"].numel() != 0]
        if len(kept) < len(node.args[0]) and any(one.meta["val"].dtype == node.meta["val"].dtype for one in kept):
            node.args = (kept, *node.args[1:])
            changed = True
    if changed:
        graph.eliminate_dead_code()


_NOTHING = frozenset({"slice", "expand", "view", "reshape", "permute", "alias", "detach", "_to_copy", "clone"})


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.stride() == b.stride()


_VIEWS = frozenset({
    "view", "_unsafe_view", "expand", "permute", "transpose", "t", "squeeze", "unsqueeze", "slice", "select", "alias",
    "detach", "split_with_sizes", "split", "unbind", "diagonal", "unfold",
})  # fmt: skip


def choose(module: fx.GraphModule) -> None:
    """Replace ``index_put`` by a mask of bool by ``where``, in place, if the values are the same for all chosen."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or base_name(node.target) != "index_put":
            continue
        x, indices, values, *accumulate = node.args
        at = [i for i, one in enumerate(indices) if one is not None]
        if any(accumulate) or len(at) != 1 or indices[at[0]].meta["val"].dtype != torch.bool:
            continue
        mask = indices[at[0]]
        if mask.meta["val"].device != x.meta["val"].device:
            continue
        covered = mask.meta["val"].dim()
        after = x.meta["val"].dim() - at[0] - covered
        shape = _around(values.meta["val"].shape, covered, after)
        if shape is None:
            continue
        with module.graph.inserting_before(node):
            wide = _reshaped(module.graph, mask, (*mask.meta["val"].shape, *[1] * after))
            values = _reshaped(module.graph, values, shape)
        replace_node(module.graph, node, _aten.where.self, (wide, values, x))
    module.recompile()


def _around(shape: Sequence[int], covered: int, after: int) -> tuple[int, ...] | None:
    """The shape in which values for the chosen elements broadcast to all; None if each has values of its own.

    ``shape``: broadcasts to ``(..., chosen, *after)``; ``covered``: how many dimensions the chosen are one of.
    """
    if len(shape) <= after:
        return tuple(shape)
    if math.prod(shape) == 1:
        return ()
    at = len(shape) - after - 1
    return (*shape[:at], *[1] * covered, *shape[at + 1 :]) if shape[at] == 1 else None


def _reshaped(graph: fx.Graph, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    value = node.meta["val"]
    if tuple(value.shape) == shape:
        return node
    made = graph.call_function(_aten.view.default, (node, shape))
    made.meta = {**node.meta, "val": value.view(shape)}
    return made


def take_whole_memory(module: fx.GraphModule) -> None:
    """Let ``as_strided`` take the tensor that owns the memory instead of a view of it, in place.

    It reads the memory of its tensor. What a device returns has memory of its own, in order: views do not survive.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_function" or base_name(node.target) != "as_strided":
            continue
        view, size, stride, *offset = node.args
        start = offset[0] if offset and offset[0] is not None else view.meta["val"].storage_offset()
        owner = _owner(view)
        whole = owner.meta["val"]
        order = order_in_memory(whole)
        if whole.storage_offset() == 0 and not whole.is_contiguous() and order is not None:
            with module.graph.inserting_before(node):
                turned = module.graph.call_function(_aten.permute.default, (owner, order))
            turned.meta = {**owner.meta, "val": whole.permute(order)}
            owner = turned
        node.args = (owner, size, stride, start)
    module.graph.eliminate_dead_code()
    module.recompile()


def _owner(node: fx.Node) -> fx.Node:
    """The tensor of whose memory ``node`` is a view."""
    while node.op == "call_function":
        source = node.args[0]
        if node.target is operator.getitem and isinstance(source, fx.Node) and base_name(source.target) in _VIEWS:
            source = source.args[0]
        elif base_name(node.target) not in _VIEWS:
            break
        assert isinstance(source, fx.Node)
        if source.meta["val"].dtype != node.meta["val"].dtype:  # a view of the same bytes as other numbers
            break
        node = source
    return node


def order_in_memory(x: Tensor) -> list[int] | None:
    """The dimensions from the outermost in memory on; None if the elements are not next to each other there."""
    size = 1
    for step, count in sorted((x.stride(dim), x.shape[dim]) for dim in range(x.dim()) if x.shape[dim] != 1):
        if step != size:
            return None
        size *= count
    return sorted(range(x.dim()), key=lambda dim: (-x.stride()[dim], x.shape[dim] == 1))


def recognize(module: fx.GraphModule, names: frozenset[str]) -> None:
    """Replace the patterns of the ops ``names``, in place."""
    for name, rule in _RULES.items():
        if name in names:
            for node in list(module.graph.nodes):
                if node.op == "call_function":
                    rule(module.graph, node)
            module.graph.eliminate_dead_code()
    module.recompile()


def replace_node(graph: fx.Graph, node: fx.Node, op: Any, args: tuple[Any, ...]) -> None:
    """Put a call of ``op`` with the same value in the place of ``node``."""
    with graph.inserting_before(node):
        made = graph.call_function(op, args)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _is(node: Any, *names: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and base_name(node.target) in names


def _pairs(node: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """The two arguments of a commutative op, in both orders; nothing for other nodes."""
    if _is(node, name) and len(node.args) == 2 and not node.kwargs:
        yield node.args[0], node.args[1]
        yield node.args[1], node.args[0]


def _without_cast(node: Any) -> Any:
    """What ``node`` widens to float32, or the node."""
    source = node.args[0] if _is(node, "_to_copy") else node
    floats = isinstance(source, fx.Node) and source.meta["val"].is_floating_point()
    return source if floats and node.meta["val"].dtype == torch.float32 else node


# rms_norm


def _rms_norm(graph: fx.Graph, node: fx.Node) -> None:
    found = _normalized(node)
    if found is None or node.meta["val"].dtype == torch.float64:  # the op computes in float32
        return
    wide, eps = found
    x, last = _without_cast(wide), node
    if x is not wide:
        casts = [user for user in node.users if _is(user, "_to_copy")]
        narrow = len(node.users) == 1 and bool(casts) and casts[0].meta["val"].dtype == x.meta["val"].dtype
        x, last = (x, casts[0]) if narrow else (wide, node)
    scaled = _scaled(last, x)
    if scaled is not None:
        product, weight = scaled
        replace_node(graph, product, _qcore.rms_norm.default, (x, weight, eps))
    else:
        replace_node(graph, last, _qcore.rms_norm.default, (x, None, eps))


def _normalized(node: fx.Node) -> tuple[Any, float] | None:
    """``x`` and ``eps`` of ``x * rsqrt(mean(x^2) + eps)``."""
    for x, root in _pairs(node, "mul"):
        if not _is(root, "rsqrt") or not isinstance(x, fx.Node):
            continue
        for mean, eps in _pairs(root.args[0], "add"):
            if isinstance(eps, float) and _is_mean_of_squares(mean, x):
                return x, eps
    return None


def _is_mean_of_squares(node: Any, x: fx.Node) -> bool:
    last = (-1, x.meta["val"].dim() - 1)
    if not _is(node, "mean") or len(node.args) < 3 or len(node.args[1]) != 1 or node.args[1][0] not in last:
        return False
    square = node.args[0]
    squared = _is(square, "pow") and square.args[0] is x and square.args[1] == 2
    return bool(node.args[2]) and (squared or (_is(square, "mul") and tuple(square.args) == (x, x)))


def _scaled(node: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The only user of ``node`` if it multiplies by a weight of the last dimension, and the weight."""
    user = next(iter(node.users), None)
    if len(node.users) != 1 or user is None:
        return None
    for normed, weight in _pairs(user, "mul"):
        if normed is node and isinstance(weight, fx.Node):
            value = weight.meta["val"]
            if tuple(value.shape) == (x.meta["val"].shape[-1],):
                return user, weight
    return None


# rope


def _rope(graph: fx.Graph, node: fx.Node) -> None:
    for plain, turned in _pairs(node, "add"):
        for x, cos in _pairs(plain, "mul"):
            for rotated, sin in _pairs(turned, "mul"):
                if _is_rotated(rotated, x) and isinstance(cos, fx.Node) and isinstance(sin, fx.Node):
                    replace_node(graph, node, _qcore.rope.default, (x, cos, sin))
                    return


def _is_rotated(node: Any, x: Any) -> bool:
    """Whether ``node`` is ``cat((-x2, x1), -1)``."""
    if not (_is(node, "cat") and isinstance(x, fx.Node) and len(node.args[0]) == 2):
        return False
    dims, size = x.meta["val"].dim(), x.meta["val"].shape[-1]
    along = node.args[1] if len(node.args) > 1 else 0
    negated, first = node.args[0]
    if along not in (-1, dims - 1) or not _is(negated, "neg"):
        return False
    second = negated.args[0]
    half = size // 2
    return size % 2 == 0 and _cut(first, x) == (0, half) and _cut(second, x) == (half, size)


def _cut(node: Any, x: fx.Node) -> tuple[int, int] | None:
    """Start and end of a slice of x along its last dimension."""
    if not _is(node, "slice") or node.args[0] is not x or node.kwargs:
        return None
    dim, start, end, step = (*node.args[1:], 0, None, None, 1)[:4] if len(node.args) == 1 else _filled(node.args[1:])
    size, last = x.meta["val"].shape[-1], x.meta["val"].dim() - 1
    if dim not in (-1, last) or step != 1:
        return None
    start, end = start or 0, size if end is None else end
    return (start + size if start < 0 else start), min(end + size if end < 0 else end, size)


def _filled(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*given, *(0, None, None, 1)[len(given) :])


# attention


def _attention(graph: fx.Graph, node: fx.Node) -> None:
    if node.target is not _qcore.attention.default:
        return
    del graph
    keys, values = _unrepeated(node.args[1]), _unrepeated(node.args[2])
    if keys is not None and values is not None and keys[1] == values[1]:
        node.args = (node.args[0], keys[0], values[0], *node.args[3:])


def _unrepeated(node: Any) -> tuple[fx.Node, int] | None:
    """Heads ``(B, Hk, S, E)`` before each was repeated to ``(B, Hk * each, S, E)``, and ``each``."""
    whole = node
    for _ in range(2):  # view(clone(expand(...)))
        if _is(node, "view", "reshape", "clone"):
            node = node.args[0]
    if not _is(node, "expand") or not _is(node.args[0], "unsqueeze") or node.args[0].args[1] not in (2, -3):
        return None
    source = node.args[0].args[0]
    before, spread, after = (one.meta["val"].shape for one in (source, node, whole))
    batch, heads, *rest = before
    each = spread[2] if len(spread) == 5 else 0
    fits = tuple(spread) == (batch, heads, each, *rest) and tuple(after) == (batch, heads * each, *rest)
    return (source, each) if fits else None


_RULES: dict[str, Callable[[fx.Graph, fx.Node], None]] = {
    "rms_norm": _rms_norm,
    "rope": _rope,
    "attention": _attention,
}
