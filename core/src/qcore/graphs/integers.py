"""Python integers that change from call to call: passed to a program as tensors if they are not sizes.

Dynamo passes such an integer (a position, the tokens that a cache has counted) to the graph as a number. A program is
compiled for one number, so that a decoder would be compiled anew for each token. In the place of a number that only
enters the elements of tensors (``positions + count``, ``torch.arange(count, count + 1)``, ``table[count : count + 1]``)
the program takes a tensor without dimensions, which each call makes of it. What is left are sizes, and what torch has
other results for: parts of what is written or returned (a copy is no view), or whose memory is turned, numbers beside
tensors of narrow dtypes, and indices of more than one item beside full slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .copying import value_of
from .integer_rules import ANY, Limits, has_symbols, pass_as_tensors, symbols_of
from .items import is_item


class Integers(NamedTuple):
    """The integers of a recorded graph that its program does without.

    **Fields:** ``module``: takes all arguments of the recorded graph, returns its results that are integers (None in
    the place of the others; empty if there are none), and the integers to pass as tensors; ``devices`` of these, and
    between which values each has to be, ``limits``.
    """

    module: fx.GraphModule
    devices: Sequence[torch.device]
    limits: Sequence[Limits]

    @property
    def takes_copies(self) -> bool:
        """Whether the program may copy parts of arguments where the recorded graph has views of them."""
        return any(one != ANY for one in self.limits)

    def of(self, values: Sequence[Any]) -> tuple[Sequence[int | None], list[Tensor]] | None:
        """The results that are integers, and int64 tensors without dimensions: further arguments of the program.

        None if a number is an index that is out of range, or counts from the other end than that of the first call.
        """
        results, numbers = self.module.forward(*values)
        if not all(low <= number <= high for number, (low, high) in zip(numbers, self.limits, strict=True)):
            return None
        pairs = zip(numbers, self.devices, strict=True)
        return results, [torch.full((), number, dtype=torch.int64, device=device) for number, device in pairs]


def take_integers(module: fx.GraphModule) -> tuple[fx.GraphModule, Integers | None]:
    """The recorded graph with tensors as further arguments for integers, and what makes these at each call.

    Its results that count in Python integers, of a graph ``(count, ...) -> (count + 1, ...)``, are None. Without any
    such integer: the graph itself, and None.
    """
    counted = _counted(module)
    if not counted:
        return module, None
    results: list[Any] = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
    counts = [one if one in counted else None for one in results]
    copies: dict[fx.Node, Any] = {}
    rest = fx.Graph()
    rest.output(rest.graph_copy(module.graph, copies))
    rest.output_node().args = ([None if one in counted else copies.get(one, one) for one in results],)
    inner = {copies[one]: one for one in counted}
    sizes = _sizes(module)  # for which there are programs anyway
    changing = [one for one in inner if has_symbols(one) and not symbols_of(value_of(one)) <= sizes]
    passed = pass_as_tensors(rest, changing)
    if not passed and not any(count is not None for count in counts):
        return module, None
    for node in reversed(rest.nodes):
        if (node.op == "call_function" or is_item(node)) and not node.users and _is_integer(node):
            rest.erase_node(node)
    apart = _apart(module, counted, counts, [inner[one.number] for one in passed])
    return fx.GraphModule(module, rest), Integers(apart, [one.device for one in passed], [*passed.values()])


def _counted(module: fx.GraphModule) -> dict[fx.Node, None]:
    """The nodes that are integers computed from arguments that are, or that stand for one."""
    counted: dict[fx.Node, None] = {}
    for node in module.graph.nodes:
        inner = node.op == "call_function" and all(one in counted for one in node.all_input_nodes)
        if (inner or node.op == "placeholder" or is_item(node)) and _is_integer(node):
            counted[node] = None
    return counted


def _is_integer(node: fx.Node) -> bool:
    """Whether a node is an integer that Dynamo knows, unlike those of tensors with ``capture_scalar_outputs``."""
    value = value_of(node)
    return value.node.has_hint() if isinstance(value, torch.SymInt) else isinstance(value, int)


def _apart(
    module: fx.GraphModule, counted: dict[fx.Node, None], counts: Sequence[Any], numbers: Sequence[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder" or node in counted:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    known = [None if one is None else copies[one] for one in counts]
    graph.output((known if any(one is not None for one in known) else [], [copies[one] for one in numbers]))
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)


def _sizes(module: fx.GraphModule) -> set[Any]:
    """The symbols of the sizes of arguments."""
    values = [value_of(place) for place in module.graph.find_nodes(op="placeholder")]
    return {symbol for value in values if isinstance(value, Tensor) for symbol in symbols_of(value)}


def constants(module: fx.GraphModule) -> list[int]:
    """Positions of the numbers that a program is compiled for: those that the graph or a tensor's shape depends on."""
    places, sizes = module.graph.find_nodes(op="placeholder"), _sizes(module)
    numbers = [(i, place) for i, place in enumerate(places) if not isinstance(value_of(place), Tensor)]
    return [i for i, place in numbers if place.users or not sizes.isdisjoint(symbols_of(value_of(place)))]
