"""The order in which the nodes of a part are recorded."""

from __future__ import annotations

from torch import Tensor, fx

from qcore.plugin_api import GraphPart, base_name, is_whole

_SMALL = 1024
"""Elements."""
_WRITES = frozenset({
    "copy", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce", "slice_scatter",
})  # fmt: skip


def ordered(part: GraphPart) -> list[fx.Node]:
    """The nodes, those first that compute positions, angles and other small values of the inputs.

    Layers come to them one after the other; so they are known to whatever is recorded for an earlier node.
    """
    nodes = list(part.graph.graph.nodes)
    first = {node for node in nodes if node.op in {"placeholder", "get_attr"}}
    known = {node for node in first if _is_small(node)}
    for node in nodes:
        if _is_early(node, known):
            known.add(node)
    return [node for node in nodes if node in first | known] + [node for node in nodes if node not in first | known]


def _is_early(node: fx.Node, known: set[fx.Node]) -> bool:
    plain = node.op == "call_function" and not is_whole(node.target) and base_name(node.target) not in _WRITES
    return plain and _is_small(node) and all(one in known for one in node.all_input_nodes)


def _is_small(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.numel() <= _SMALL
