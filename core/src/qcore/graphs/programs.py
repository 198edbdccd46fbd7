"""A captured graph for one set of sizes: its parts compiled, what is left to the host, and how both run."""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.compile_utils import fx_graph_cse

from ..errors import QcoreWarning, first_line
from . import aliases, cutting, recognizing, states, windows
from .backends import Compiled, GraphBackend, Input, Part, PartRefused, Role
from .explaining import HostNode, PartReport, Report

_COPY, _PERMUTE = torch.ops.aten.copy_.default, torch.ops.aten.permute.default


@dataclass
class Program:
    """A functional graph cut into parts.

    **Fields:** ``run``: takes the graph's arguments, returns its results; ``report``: see `explain`; ``written``:
    positions of the arguments that it mutates.
    """

    run: Callable[..., Any]
    report: Report
    written: Sequence[int] = ()


@dataclass(frozen=True)
class Given:
    """An argument of a graph: its role, and the tensor of this call, held weakly."""

    role: Role
    ref: Callable[[], Tensor | None] | None = None


def build(module: fx.GraphModule, given: Sequence[Given], backend: GraphBackend, report: Report) -> Program:
    """Cut ``module`` (of AOT autograd, mutations of inputs as final ``copy_``) and compile its parts.

    ``given``: one per placeholder; a static one that is written to becomes a state.
    """
    written = _take_writes(module)
    views = aliases.take_views(module, len(written))
    _simplify(module, backend)
    report.writes = len(written)
    device = _device_of(module)
    lines = {node.name: node for node in module.graph.nodes}
    left = cutting.cut(module, backend, device)
    places = module.graph.find_nodes(op="placeholder")  # cutting makes new nodes, in the same order
    values = _returned(module)[len(_returned(module)) - len(written) :]
    writes = dict(zip((places[i] for i in written), values, strict=True))
    known = dict(zip(places, given, strict=True))
    program = Program(module.forward, report, written)
    in_place: set[fx.Node] = set()
    for node in list(module.graph.nodes):
        if _is_part(node):
            _return_in_order(module, node, set(values), backend)
            part, done = _part_of(module, node, known, writes, device)
            setattr(module, str(node.target), _Run(part, backend.compile(part), report))
            in_place |= done
    read = [i for i, place in enumerate(places) if any(user.op == "call_function" for user in place.users)]
    _finish_writes(module, {place: value for place, value in writes.items() if place not in in_place}, report)
    aliases.give_views(module, views)
    report.host += [HostNode.of(lines[name], why) for name, why in left.items()]
    module.graph.eliminate_dead_code()
    module.recompile()
    program.run = states.synchronized(module.forward, read) if read and backend.defers_writes else module.forward
    return program


def _simplify(module: fx.GraphModule, backend: GraphBackend) -> None:
    """Bring a graph into the form in which backends are asked for its nodes."""
    module.graph = fx_graph_cse(module.graph)  # siblings ask for one product each
    recognizing.clean(module)
    recognizing.choose(module)
    windows.replace_joined(module)
    recognizing.take_whole_memory(module)
    recognizing.recognize(module, backend.recognizes())


def _is_part(node: fx.Node) -> bool:
    return node.op == "call_module" and str(node.target).startswith(cutting.PART)


def _return_in_order(
    module: fx.GraphModule, node: fx.Node, written: Collection[fx.Node], backend: GraphBackend
) -> None:
    """Let a part return dense results in the order of their memory, and the host turn them: torch's strides, no copy.

    Not what other parts alone take, or ``written`` to an argument.
    """
    inner: fx.GraphModule = module.get_submodule(str(node.target))  # type: ignore[assignment]
    output, outputs = inner.graph.output_node(), _returned(inner)
    for result in [one for one in node.users if one not in written]:
        value, at = result.meta["val"], int(result.args[1])  # type: ignore[arg-type]
        order = recognizing.order_in_memory(value)
        if value.is_contiguous() or order is None or all(map(_is_part, result.users)):
            continue
        with inner.graph.inserting_before(output):
            turned = inner.graph.call_function(_PERMUTE, (outputs[at], order))
        turned.meta = {**outputs[at].meta, "val": value.permute(order)}
        if backend.why_not(turned):
            inner.graph.erase_node(turned)
            continue
        outputs[at] = turned
        with module.graph.inserting_after(result):
            back = module.graph.call_function(_PERMUTE, (result, [order.index(dim) for dim in range(len(order))]))
        back.meta = dict(result.meta)
        result.replace_all_uses_with(back, delete_user_cb=partial(operator.is_not, back))
        result.meta = dict(turned.meta)
    output.args = (tuple(outputs),)


def _take_writes(module: fx.GraphModule) -> list[int]:
    """Remove the final copies into inputs and return the positions of these; the values become further results."""
    writes: dict[fx.Node, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.target is _COPY and node.args[0].op == "placeholder":
            place, value = node.args[:2]
            writes[place] = value
            node.replace_all_uses_with(value)
            module.graph.erase_node(node)
    output = module.graph.output_node()
    output.args = ((*output.args[0], *writes.values()),)  # type: ignore[misc]
    module.graph.eliminate_dead_code()
    places = module.graph.find_nodes(op="placeholder")
    return [places.index(place) for place in writes]


def _device_of(module: fx.GraphModule) -> torch.device:
    """The device of most nodes."""
    counts: dict[torch.device, int] = {}
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            counts[value.device] = counts.get(value.device, 0) + 1
    return max(counts, key=lambda device: counts[device], default=torch.device("cpu"))


def _part_of(
    module: fx.GraphModule,
    node: fx.Node,
    known: Mapping[fx.Node, Given],
    writes: Mapping[fx.Node, fx.Node],
    device: torch.device,
) -> tuple[Part, set[fx.Node]]:
    """The part behind a call of a submodule, and the inputs of the graph that it updates in place."""
    graph: fx.GraphModule = module.get_submodule(str(node.target))  # type: ignore[assignment]
    _inputs_first(graph)
    results = {user.args[1]: user for user in node.users}
    inputs, updates, done = [], {}, set()
    for position, (source, place) in enumerate(zip(node.args, graph.graph.find_nodes(op="placeholder"), strict=True)):
        assert isinstance(source, fx.Node)
        own = _constant(module, source) or known.get(source, Given(Role.FRESH))
        role = own.role
        place.meta = dict(source.meta)
        change = None
        if source in writes:
            change = next((at for at, result in results.items() if result is writes[source]), None)
            # Others would read a state before or after it changed: then it is returned, and copied by the host.
            alone = set(source.users) == {node}
            change = change if change is not None and alone and _only_written(results[change], module) else None
        if change is not None:
            updates[position], role = change, Role.STATE
            done.add(source)
        elif source in writes:
            role = Role.FRESH
        if isinstance(source.meta.get("val"), int):
            role = Role.NUMBER
        inputs.append(Input(place.name, role, source.meta.get("val"), change, own.ref))  # type: ignore[arg-type]
    return Part(graph, tuple(inputs), updates, device), done  # type: ignore[arg-type]


def _constant(module: fx.GraphModule, source: fx.Node) -> Given | None:
    """A tensor of the graph itself, the same in every call."""
    value = getattr(module, str(source.target), None) if source.op == "get_attr" else None
    return Given(Role.STATIC, weakref.ref(value)) if isinstance(value, Tensor) else None


def _inputs_first(module: fx.GraphModule) -> None:
    """Move the placeholders of a part to the front; cutting leaves each before its first use."""
    for place in reversed(module.graph.find_nodes(op="placeholder")):
        first = next(iter(module.graph.nodes))
        if place is not first:
            first.prepend(place)
    module.recompile()


def _returned(module: fx.GraphModule) -> list[Any]:
    return list(module.graph.output_node().args[0])  # type: ignore[arg-type]


def _only_written(result: fx.Node, module: fx.GraphModule) -> bool:
    """Whether a result of a part is used for nothing but one write to an input."""
    return set(result.users) == {module.graph.output_node()} and _returned(module).count(result) == 1


class _Run(torch.nn.Module):
    """A compiled part in the place of its submodule; unused results, those of updates, are None."""

    def __init__(self, part: Part, compiled: Compiled, report: Report) -> None:
        super().__init__()
        self._is_impure = True  # for torch.fx: a part that only writes has no results that are used, and must run
        self._compiled, self._part, self._report = compiled, part, report
        self._count, self._returned = len(part.outputs), part.returned
        self._listed = PartReport.of(part)
        self._in_torch = False
        report.parts.append(self._listed)

    def __call__(self, *values: Any) -> Sequence[Any]:
        """Run the part."""
        if not self._in_torch:
            try:
                return self._on_device(values)
            except PartRefused as reason:
                self._refuse(first_line(reason), once=reason.once)
        states.synchronize(values)
        results = list(self._part.graph(*values))
        for place, position in self._part.updates.items():
            values[place].copy_(results[position])
            results[position] = None
        return results

    def _on_device(self, values: Sequence[Any]) -> Sequence[Any]:
        found = self._compiled(values)
        if len(found) == self._count:
            return found
        results: list[Any] = [None] * self._count
        for position, value in zip(self._returned, found, strict=True):
            results[position] = value
        return results

    def _refuse(self, why: str, *, once: bool) -> None:
        what = "a part runs in torch for a call" if once else "a part runs in torch"
        warnings.warn(f"{self._report.backend}: {what}: {why}", QcoreWarning, stacklevel=2)
        if once:
            self._report.calls[why] = self._report.calls.get(why, 0) + 1
            return
        self._in_torch = True
        self._report.parts = [one for one in self._report.parts if one is not self._listed]
        self._report.host += [HostNode.of(node, why) for node in self._part.nodes]


def _finish_writes(module: fx.GraphModule, writes: Mapping[fx.Node, fx.Node], report: Report) -> None:
    """Let the host copy what was not updated in place, and drop the values of all writes from the results."""
    output = module.graph.output_node()
    results = _returned(module)
    count = len(results) - report.writes
    with module.graph.inserting_before(output):
        for place, value in writes.items():
            module.graph.call_function(_COPY, (place, value))
            report.copied.append(place.name)
    output.args = (tuple(results[:count]),)
