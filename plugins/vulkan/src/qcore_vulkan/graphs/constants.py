"""Nodes that depend on no input of a part, such as ``arange`` and parts of masks: computed by torch, once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from qcore.plugin_api import GraphPart, base_name

_LIKE = frozenset({"full_like", "zeros_like", "ones_like"})
"""Ops that read only shape and dtype of their tensor."""
_EMPTY = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided"})
"""Ops that leave their memory as it was, which may hold integers that the device does not have: they give zeros."""
_MOST = 1 << 26
"""Elements of a constant, beyond which it is not worth its memory."""


def is_constant(node: Any, known: dict[fx.Node, bool] | None = None) -> bool:
    """Whether a node's value is the same in every call, whatever the inputs of the graph."""
    known = {} if known is None else known
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
    name = base_name(node.target)
    inputs = [] if name in _LIKE else node.all_input_nodes
    return all(is_constant(one, known) for one in inputs)


def folded(part: GraphPart) -> dict[fx.Node, Tensor | None]:
    """The constants of a part: values of those that other nodes or the caller need, None for the rest."""
    known: dict[fx.Node, bool] = {}
    nodes = [node for node in part.graph.graph.nodes if node.op in {"get_attr", "call_function"}]
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        if is_constant(node, known):
            values[node] = _value(part, node, values)
    return {node: None if all(user in values for user in node.users) else value for node, value in values.items()}


def _value(part: GraphPart, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return getattr(part.graph, str(node.target))
    if base_name(node.target) in _LIKE:
        like = node.meta["val"]
        fill = {"zeros_like": 0, "ones_like": 1}.get(base_name(node.target))
        return torch.full(like.shape, node.args[1] if fill is None else fill, dtype=like.dtype)  # type: ignore[arg-type]
    args: Any = fx.node.map_arg(node.args, values.__getitem__)
    kwargs: Any = fx.node.map_arg(node.kwargs, values.__getitem__)
    value = node.target(*args, **kwargs)  # type: ignore[operator]
    return value.zero_() if base_name(node.target) in _EMPTY else value
