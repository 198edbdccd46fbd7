"""`explain`: which parts of a compiled model run on the device, what stays on the host, and why."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ..nn.base import QuantizedModule
from .backends import Part, Role
from .breaks import TORCH
from .ops import base_name


@dataclass(frozen=True)
class HostNode:
    """A node that torch runs: its op, the reason, and the line of the model that it comes from."""

    op: str
    reason: str
    line: str = ""

    @classmethod
    def of(cls, node: fx.Node, reason: str) -> HostNode:
        """Describe a node of a captured graph."""
        return cls(base_name(node.target) or str(node.target), reason, _line(str(node.meta.get("stack_trace") or "")))


def _line(trace: str) -> str:
    """The innermost line of a stack trace that is not torch's own, such as that of a `torch.device` around the call."""
    lines = [line.strip() for line in trace.splitlines() if line.strip("^~ ")]  # without the marks under a line
    places = [at for at, line in enumerate(lines) if line.startswith('File "')]
    own = [at for at in places if TORCH not in lines[at]]
    for at in reversed(own or places):
        return lines[at + 1] if at + 1 < len(lines) and at + 1 not in places else lines[at]
    return lines[-1] if lines else ""


@dataclass(frozen=True)
class PartReport:
    """A part that the device runs: how many nodes by op, and its inputs by role."""

    ops: dict[str, int]
    inputs: dict[str, int]

    @classmethod
    def of(cls, part: Part) -> PartReport:
        """Count the nodes and inputs of a part."""
        ops = Counter(base_name(node.target) or str(node.target) for node in part.nodes)
        return cls(dict(ops.most_common()), dict(Counter(one.role.value for one in part.inputs)))

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return sum(self.ops.values())


@dataclass
class Report:
    """One graph for one set of sizes.

    **Fields:** ``backend``; ``sizes``: of its dynamic dimensions; ``parts``: each is one submission per call; ``host``:
    nodes that torch runs; ``copied``: states that are copied in and out at each call; ``refused``: why the whole graph
    runs in torch, empty if it does not; ``writes``: how many inputs it mutates; ``calls``: how many calls of parts
    torch has run because of their values, by reason; ``broken``: why states come back with each call, empty if they
    stay or a backend never defers writes.
    """

    backend: str
    sizes: tuple[int, ...] = ()
    parts: list[PartReport] = field(default_factory=list)
    host: list[HostNode] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    refused: str = ""
    writes: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    broken: str = ""

    @property
    def states(self) -> int:
        """How many tensors are updated in place on the device."""
        return sum(part.inputs.get(Role.STATE.value, 0) for part in self.parts)

    def __str__(self) -> str:
        head = f"{self.backend}" + (f", sizes {', '.join(map(str, self.sizes))}" if self.sizes else "")
        if self.refused:
            return f"{head}: all in torch: {self.refused}"
        lines = [f"{head}: {len(self.parts)} part(s) on the device, {len(self.host)} node(s) in torch"]
        for number, part in enumerate(self.parts):
            ops = ", ".join(f"{count} {op}" for op, count in part.ops.items())
            inputs = ", ".join(f"{count} {role}" for role, count in part.inputs.items())
            lines.append(f"  part {number}: {part.nodes} nodes ({ops}); inputs: {inputs}")
        for node, count in Counter(self.host).most_common():
            where = f" [{node.line}]" if node.line else ""
            lines.append(f"  torch: {count} {node.op}: {node.reason}{where}")
        lines += [f"  torch: {count} call(s) of a part: {why}" for why, count in self.calls.items()]
        lines += [f"  copied in and out at each call: {name}" for name in self.copied]
        if self.broken and self.states:
            lines.append(f"  states come back with each call: {self.broken}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """What `explain` returns; ``print`` it, or look at the fields.

    **Fields:** ``reports``: one per graph and set of sizes; ``outside``: names of layers whose parameters no graph
    reads: torch runs them if the model calls them, as `torch.compile` does not record everything (``nn.LSTM``, say).
    """

    reports: tuple[Report, ...]
    outside: tuple[str, ...] = ()

    @property
    def submissions(self) -> int:
        """Parts of all graphs: with one set of sizes, how often a call of the model goes to the device."""
        return sum(len(report.parts) for report in self.reports)

    @property
    def host(self) -> tuple[HostNode, ...]:
        """Every node that torch runs."""
        return tuple(node for report in self.reports for node in report.host)

    @property
    def refused(self) -> tuple[str, ...]:
        """Why whole graphs run in torch."""
        return tuple(report.refused for report in self.reports if report.refused)

    def __str__(self) -> str:
        if not self.reports:
            return "no graph was captured yet: call the compiled model first."
        names = ", ".join(self.outside[:_NAMED]) + (", ..." if len(self.outside) > _NAMED else "")
        outside = [f"in no graph, so that torch runs them if the model calls them: {names}"] if names else []
        return "\n".join([*map(str, self.reports), *outside])


_NAMED = 12
"""Names of layers in a text."""


@dataclass(eq=False)
class Record:
    """The reports of one captured graph, and weak references to the parameters and buffers that it reads."""

    reports: list[Report]
    tensors: list[weakref.ref[Tensor]]


_records: weakref.WeakSet[Record] = weakref.WeakSet()


def remember(record: Record) -> None:
    """Let `explain` find a captured graph as long as it lives."""
    _records.add(record)


def explain(compiled: Any = None) -> Explanation:
    """What runs where, of every graph captured from ``compiled``; None: of every graph of this process.

    ``compiled``: a module, what `torch.compile` made of one, or several in a list. Graphs are found by the parameters
    and buffers that they read; a graph without any is found with None only.
    """
    found = list(_records)
    if compiled is not None:
        modules = _modules(compiled if isinstance(compiled, Sequence) else [compiled])
        wanted = {id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}
        found = [record for record in found if any(id(ref()) in wanted for ref in record.tensors)]
    else:
        modules = []
    read = {id(ref()) for record in found for ref in record.tensors}
    outside = tuple(name for module in modules for name in _outside(module, read)) if found else ()
    return Explanation(tuple(report for record in found for report in record.reports), outside)


def _modules(given: Sequence[Any]) -> list[torch.nn.Module]:
    found = []
    for module in given:
        owner = module if isinstance(module, torch.nn.Module) else getattr(module, "__self__", None)
        if not isinstance(owner, torch.nn.Module):
            raise TypeError(f"explain takes modules or their compiled form, not a {type(module).__name__}")
        found.append(getattr(owner, "_orig_mod", owner))
    return found


def _outside(module: torch.nn.Module, read: set[int]) -> Iterator[str]:
    """Names of the layers of ``module`` none of whose tensors is among ``read``."""
    for name, layer in module.named_modules():
        own = list(layer.parameters(recurse=False))
        if own or isinstance(layer, QuantizedModule):
            own += layer.buffers(recurse=False)
            if name and read.isdisjoint(map(id, own)):  # a model has parameters of its own for training
                yield name
