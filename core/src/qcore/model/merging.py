"""Under `torch.compile`: identical calls in a graph are merged, so that fused siblings compute their product once.

Each sibling's forward asks for the whole product; Inductor itself merges no calls of custom ops. A pass that Inductor
runs on each graph merges nodes with one target and the same arguments. Graphs are functional at this point: a call
without randomness returns what an identical one returned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

_FIELD = "joint_custom_pre_pass"


def merge_identical_calls(graph: Graph) -> int:
    """Replace calls by identical earlier ones, in place; returns how many were replaced."""
    first: dict[Any, Node] = {}
    merged = 0
    for node in list(graph.nodes):
        key = _key(node)
        if key is None:
            continue
        earlier = first.setdefault(key, node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)
            merged += 1
    return merged


def _key(node: Node) -> Any:
    """What two calls have to have in common to be identical; None for a call that is not to be merged."""
    target: Any = node.target
    if node.op != "call_function":
        return None
    if isinstance(target, OpOverload):
        random = torch.Tag.nondeterministic_seeded in target.tags or "empty" in target._schema.name  # noqa: SLF001
        if random or target._schema.is_mutable:  # noqa: SLF001
            return None
    elif getattr(target, "__name__", "") != "getitem":
        return None
    return target, repr(node.args), repr(node.kwargs)  # nodes are printed by their names, which are unique in a graph


def install() -> None:
    """Have Inductor merge identical calls from now on, before a pass that is already installed there."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    known = getattr(config, _FIELD, None)
    if getattr(known, "merges_identical_calls", False):
        return

    class Merge(CustomGraphPass):
        """See `merge_identical_calls`; ``uuid`` is part of the keys of Inductor's cache."""

        merges_identical_calls = True

        def __call__(self, graph: Graph) -> None:
            merge_identical_calls(graph)
            if known is not None:
                known(graph)

        def uuid(self) -> Any:
            if known is None:
                return "qcore.merge_identical_calls.1"
            name = getattr(known, "uuid", lambda: None)()
            return None if name is None else ("qcore.merge_identical_calls.1", name)

    setattr(config, _FIELD, Merge())
