"""Results that share memory: a graph returns the tensor that owns it, and the host takes their views of it.

In inference AOT autograd leaves that to the backend, whose parts return each tensor in memory of its own. But a write
to one result, by code behind a graph break or by the caller, has to show in the others.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from .copying import memory_of
from .overlaps import meet, span


class View(NamedTuple):
    """**Fields:** ``place``: of the result; ``calls``: that make it of what the graph returns there, first to last."""

    place: int
    calls: Sequence[fx.Node]


def take_views(module: fx.GraphModule, writes: int) -> list[View]:
    """Let a graph return owners in the places of results that overlap others, in place.

    ``writes``: how many of the last results are not returned, but copied into arguments.
    """
    output = module.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    found = [View(place, _views(results[place])) for place in _overlapping(results[: len(results) - writes])]
    found = [view for view in found if view.calls and _source(view.calls[0]).op == "call_function"]
    for place, calls in found:
        results[place] = _source(calls[0])
    output.args = (tuple(results),)
    return found


def give_views(module: fx.GraphModule, views: Sequence[View]) -> None:
    """Return views again, of what is returned in their places now."""
    output = module.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    with module.graph.inserting_before(output):
        for place, calls in views:
            made = {_source(calls[0]): results[place]}
            for call in calls:
                made[call] = module.graph.node_copy(call, made.__getitem__)
            results[place] = made[calls[-1]]
    output.args = (tuple(results),)


def _overlapping(results: Sequence[Any]) -> list[int]:
    """Positions of results of which another node's has elements."""
    groups: dict[int, list[tuple[int, fx.Node, tuple[int, int]]]] = {}
    for place, node in enumerate(results):
        value: Any = node.meta.get("val") if isinstance(node, fx.Node) else None
        memory = memory_of(value)
        if memory is not None:
            groups.setdefault(memory, []).append((place, node, span(value)))
    return [
        place
        for group in groups.values()
        for place, node, own in group
        if any(other is not node and meet(own, where) for _, other, where in group)
    ]


def _views(node: fx.Node) -> list[fx.Node]:
    """The calls that take ``node`` from the tensor that owns its memory."""
    memory, calls = memory_of(node.meta["val"]), list[fx.Node]()
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        source = node.args[0]
        taken = [node]
        if node.target is operator.getitem:
            if not isinstance(source.args[0], fx.Node):
                break
            taken, source = [source, node], source.args[0]
        if not isinstance(source.meta.get("val"), Tensor) or memory_of(source.meta["val"]) != memory:
            break
        calls, node = taken + calls, source
    return calls


def _source(call: fx.Node) -> fx.Node:
    """What a view is taken of."""
    return call.args[0]  # type: ignore[return-value]
