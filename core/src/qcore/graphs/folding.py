"""Nodes that depend on no input of a graph, such as ``arange`` and parts of masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from .ops import base_name

_LIKE = frozenset({"full_like", "zeros_like", "ones_like"})
"""Ops that read only shape and dtype of their tensor."""
_EMPTY = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided"})
"""Ops that leave their memory as it was, which may hold integers that a device does not have: they give zeros."""
_MOST = 1 << 26
"""Elements of a constant, beyond which it is not worth its memory."""


def is_constant(node: Any, known: dict[fx.Node, bool] | None = None, *, alone: bool = False) -> bool:
    """Whether a node's value is the same in every call, whatever the inputs of the graph.

    ``known``: answers about other nodes, to be asked with several of one graph; ``alone``: whether it also reads no
    other constant, which may be in another part.
    """
    known = {} if known is None else known
    if alone and isinstance(node, fx.Node) and _read(node):
        return False
    if not isinstance(node, fx.Node):
        return True
    if node not in known:
        known[node] = _is_constant(node, known)
    return known[node]


def _is_constant(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    if node.op == "get_attr":
        return True
    value = node.meta.get("val")
    if node.op != "call_function" or (isinstance(value, Tensor) and value.numel() > _MOST):
        return False
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    return all(is_constant(one, known) for one in _read(node))


def _read(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values a node reads."""
    return [] if base_name(node.target) in _LIKE else node.all_input_nodes


def fold(module: fx.GraphModule, reasons: Mapping[fx.Node, str]) -> set[fx.Node]:
    """Compute the constants that a device does not run, and those made of them, once, in place.

    ``reasons``: of the nodes that stay on the host. Returns the nodes that are gone. What the graph returns stays: a
    result has memory of its own.
    """
    known: dict[fx.Node, bool] = {}
    found: dict[fx.Node, None] = {}
    for node in module.graph.nodes:
        if (node in reasons or any(one in found for one in _read(node))) and is_constant(node, known):
            found[node] = None
    kept, values, before = module.graph.output_node(), dict[fx.Node, Any](), set(module.graph.nodes)
    with _disable_current_modes(), torch.no_grad():  # torch calls this while it traces with tensors without values
        for node in found:
            needed = kept not in node.users and any(user not in found for user in node.users)
            if needed and isinstance(node.meta.get("val"), Tensor):
                _replace(module, node, constant_value(module, node, values))
    module.graph.eliminate_dead_code()
    return before - set(module.graph.nodes)


def constant_value(module: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The value of a constant node of ``module``, computed by torch; ``values``: of those computed so far."""
    if node not in values:
        values[node] = _computed(module, node, values)
    return values[node]


def _computed(module: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return getattr(module, str(node.target))
    name, like = base_name(node.target), node.meta["val"]
    if name in _LIKE:
        fill: Any = {"zeros_like": 0, "ones_like": 1}.get(name, node.args[-1])
        return torch.full(like.shape, fill, dtype=like.dtype, device=like.device)
    args: Any = fx.node.map_arg(node.args, lambda one: constant_value(module, one, values))
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda one: constant_value(module, one, values))
    value = node.target(*args, **kwargs)  # type: ignore[operator]
    return value.zero_() if name in _EMPTY else value


def _replace(module: fx.GraphModule, node: fx.Node, value: Tensor) -> None:
    name = f"folded_{node.name}"
    module.register_buffer(name, value, persistent=False)
    with module.graph.inserting_before(node):
        made = module.graph.get_attr(name)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
