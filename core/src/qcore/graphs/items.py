"""Tensors without dimensions that a recorded graph has as integers: indices (``cache[:, place] = x``), starts of parts.

Torch asks such a tensor for its value, which is unknown when AOT autograd traces the graph. Dynamo knows it as a number
that may change, like a Python integer: `ask_items` records that the tensor is asked, and the node is an integer of the
graph from then on, see `integers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from .copying import memory_of, name_of, plain, value_of, written_by

_PLACES: Mapping[str, int] = {"getitem": 1, "setitem": 1, "select": 2, "narrow": 2}
"""By the name of a call, which argument has integers."""
_INTEGERS = frozenset((torch.int8, torch.int16, torch.int32, torch.int64))
"""Dtypes of tensors that are indices like a Python integer; those of bool and uint8 are masks."""


def ask_items(graph: fx.Graph) -> None:
    """Let ``graph`` call `Tensor.item` of its arguments without dimensions where they stand for an integer."""
    asking = _Asking(graph)
    for node in list(graph.nodes):
        at = _PLACES.get(plain(name_of(node)))
        if at is not None and at < len(node.args) and isinstance(value_of(node.args[0]), Tensor):
            node.update_arg(at, fx.node.map_arg(node.args[at], partial(asking.number, is_index=at == 1)))
        asking.written |= {memory_of(value_of(one)) for one in written_by(node)}


def is_item(node: Any) -> bool:
    """Whether a node asks an argument of the graph for its value."""
    called = isinstance(node, fx.Node) and node.op == "call_method" and node.target == "item"
    return called and isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder"


class _Asking:
    """**Attributes:** ``written``: the memories that the graph has written to before the node that is looked at."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._asked: dict[fx.Node, fx.Node] = {}
        self.written: set[int | None] = set()

    def number(self, one: fx.Node, *, is_index: bool) -> fx.Node:
        """What asks ``one`` for its value, if it has that from the beginning; otherwise ``one``."""
        value = value_of(one)
        is_given = one.op == "placeholder" and isinstance(value, Tensor) and memory_of(value) not in self.written
        if not is_given or value.dim() > 0 or value.dtype not in _INTEGERS:
            return one
        # Dynamo forgets the number of what the graph writes later, a count. Then a program is for one value, and so is
        # what Dynamo records if it is an index: there are as many as it allows. Others would be ever new programs.
        known = getattr(value, "item_memo", None)
        if known is None and not is_index:
            return one
        if one not in self._asked:
            with self._graph.inserting_after(self._graph.find_nodes(op="placeholder")[-1]):
                self._asked[one] = self._graph.call_method("item", (one,))
            self._asked[one].meta["example_value"] = known
        return self._asked[one]
