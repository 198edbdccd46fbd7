"""Tensors without dimensions that a recorded graph has as integers: indices (``cache[:, place] = x``), starts of parts.

Torch asks such a tensor for its value, which is unknown when AOT autograd traces the graph. Dynamo knows it as a number
that may change, like a Python integer: `ask_items` records that the tensor is asked, and the node is an integer of the
graph from then on, see `integers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from .copying import name_of, plain, value_of

_PLACES: Mapping[str, int] = {"getitem": 1, "setitem": 1, "select": 2, "narrow": 2}
"""By the name of a call, which argument has integers."""
_INTEGERS = frozenset((torch.int8, torch.int16, torch.int32, torch.int64))
"""Dtypes of tensors that are indices like a Python integer; those of bool and uint8 are masks."""


def ask_items(graph: fx.Graph) -> None:
    """Let ``graph`` call `Tensor.item` of its arguments without dimensions where they stand for an integer."""
    asked: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        at = _PLACES.get(plain(name_of(node)))
        if at is None or at >= len(node.args) or not isinstance(value_of(node.args[0]), Tensor):
            continue
        known = fx.node.map_arg(node.args[at], lambda one: _asked(graph, one, asked))
        node.update_arg(at, known)


def is_item(node: Any) -> bool:
    """Whether a node asks an argument of the graph for its value."""
    called = isinstance(node, fx.Node) and node.op == "call_method" and node.target == "item"
    return called and isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder"


def _asked(graph: fx.Graph, one: fx.Node, asked: dict[fx.Node, fx.Node]) -> fx.Node:
    value = value_of(one)
    number = getattr(value, "item_memo", None)  # as Dynamo knows it
    if one.op != "placeholder" or number is None or value.dim() > 0 or value.dtype not in _INTEGERS:
        return one
    if one not in asked:
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            asked[one] = graph.call_method("item", (one,))
        asked[one].meta["example_value"] = number
    return asked[one]
