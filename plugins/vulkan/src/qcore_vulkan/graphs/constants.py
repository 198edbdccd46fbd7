"""Nodes that depend on no input of a part, such as ``arange`` and parts of masks: computed by torch, once."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from qcore.plugin_api import GraphPart, constant_value, is_constant


def folded(part: GraphPart) -> dict[fx.Node, Tensor | None]:
    """The constants of a part: values of those that other nodes or the caller need, None for the rest."""
    known: dict[fx.Node, bool] = {}
    nodes = [node for node in part.graph.graph.nodes if node.op in {"get_attr", "call_function"}]
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        if is_constant(node, known):
            constant_value(part.graph, node, values)
    return {node: None if all(user in values for user in node.users) else value for node, value in values.items()}
