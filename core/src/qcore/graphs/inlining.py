"""Regions of a recorded graph that are graphs of their own: `torch.utils.checkpoint` and nested compiled regions.

They matter to derivatives and to the time that torch compiles. Inference takes what is in them as if it were outside.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

_FIRST_ARGUMENT: Mapping[Any, int] = {
    torch.ops.higher_order.tag_activation_checkpoint: 1,
    torch.ops.higher_order.invoke_subgraph: 2,  # behind an identifier
}
"""Where the arguments of a region begin among those of the op; its graph is the first."""


def inlined(module: fx.GraphModule) -> fx.GraphModule:
    """``module``, or a copy that has the nodes of regions in the places of these."""
    if not any(map(_is_region, module.graph.nodes)):
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    made = fx.GraphModule(module, graph)
    for node in list(graph.nodes):
        if _is_region(node):
            _inline(made, node)
    return made


def _is_region(node: fx.Node) -> bool:
    return node.target in _FIRST_ARGUMENT and all(user.target is operator.getitem for user in node.users)


def _inline(module: fx.GraphModule, node: fx.Node) -> None:
    source: Any = node.args[0]
    body = inlined(module.get_submodule(source.target))  # type: ignore[arg-type]
    places = body.graph.find_nodes(op="placeholder")
    known: Any = dict(zip(places, node.args[_FIRST_ARGUMENT[node.target] :], strict=True))
    with module.graph.inserting_before(node):
        for inner in body.graph.find_nodes(op="get_attr"):
            name = f"{node.name}_{inner.name}"
            setattr(module, name, getattr(body, str(inner.target)))
            known[inner] = module.graph.node_copy(inner)
            known[inner].target = name
        results: Any = module.graph.graph_copy(body.graph, known)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(node)
    if not source.users:
        module.graph.erase_node(source)
