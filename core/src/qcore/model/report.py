"""`report`: kernel, scheme and memory of every layer of a model that holds a weight."""

# ruff: noqa: SLF001 - reads the stores and bound kernels of layers, and torch's table of submodules

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from ..errors import did_you_mean
from ..functional.checks import check_module
from ..nn.base import QuantizedModule
from ..nn.counterparts import COUNTERPARTS
from ..nn.neutral import NeutralLinear, WeightParts
from ..resolving.decision import format_table
from ..resolving.hints import dtype_hint
from ..runtime.settings import current
from .grouping import grouped

QUANTIZED, EXCLUDED, REFUSED = "quantized", "excluded", "refused"


@dataclass(frozen=True)
class Skipped:
    """Why a layer or a tensor is not quantized. ``state``: as in a report, such as ``excluded``; ``reason``."""

    state: str
    reason: str


@dataclass(frozen=True)
class LayerReport:
    """The outcome for one layer.

    **Fields:** ``name``; ``kind``: class name; ``state``: ``quantized``, ``excluded``, ``refused`` or ``float``;
    ``reason``; ``scheme``; ``plugin`` and ``kernel`` that run it; ``bytes_before``: of the float weight;
    ``bytes_after``: of the weight as it is stored now; ``tied_to``: the layer whose weight it shares;
    ``bytes_shared``: the part of ``bytes_after`` that an earlier layer of the report holds, too, and that the totals
    count once; ``hint``: how to make the layer faster.
    """

    name: str
    kind: str
    state: str
    reason: str = ""
    scheme: str = ""
    plugin: str = ""
    kernel: str = ""
    bytes_before: int = 0
    bytes_after: int = 0
    tied_to: str = ""
    bytes_shared: int = 0
    hint: str = ""


@dataclass(frozen=True)
class Report:
    """Every layer that holds a weight; ``str(report)`` is a table.

    Three or more layers that differ only in the numbers in their names share a line,
    ``24 x model.layers.*.mlp.up_proj``, with the sum of their bytes. ``details()`` has a line for every layer.
    """

    layers: tuple[LayerReport, ...]

    def __iter__(self) -> Iterator[LayerReport]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> LayerReport:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"no layer is called {name!r}.{did_you_mean(name, [layer.name for layer in self.layers])}")

    def by_state(self, state: str) -> tuple[LayerReport, ...]:
        """The layers that were ``quantized``, ``excluded`` or ``refused``."""
        return tuple(layer for layer in self.layers if layer.state == state)

    def kernels(self) -> dict[str, int]:
        """Count the layers that each kernel runs."""
        counts: dict[str, int] = {}
        for layer in self.by_state(QUANTIZED):
            counts[layer.kernel] = counts.get(layer.kernel, 0) + 1
        return counts

    def __str__(self) -> str:
        return self._table(grouped(self.layers, lambda row: row.name, _looks))

    def details(self) -> str:
        """Return the table with a line for every layer; ``str(report)`` has one for all equal blocks."""
        return self._table([(row.name, [row]) for row in self.layers])

    def _table(self, lines: Sequence[tuple[str, Sequence[LayerReport]]]) -> str:
        rows = []
        for label, together in lines:
            row = together[0]
            sizes = sum(r.bytes_before for r in together), sum(r.bytes_after for r in together)
            rows.append((label, row.kind, row.state, row.scheme, row.kernel, *map(_size, sizes), row.reason))
        header = ("layer", "kind", "state", "scheme", "kernel", "before", "after", "why")
        states = dict.fromkeys((QUANTIZED, EXCLUDED, REFUSED, *(r.state for r in self.layers)))
        counts = ", ".join(f"{len(self.by_state(s))} {s}" for s in states)
        total = (
            f"{len(self.layers)} layers: {counts}; {_size(self.bytes_before)} before, {_size(self.bytes_after)} after"
        )
        return "\n".join([*format_table(header, rows), total, *(f"hint: {hint}" for hint in self.hints)])

    @property
    def hints(self) -> tuple[str, ...]:
        """How to make layers faster; each hint once."""
        return tuple(dict.fromkeys(layer.hint for layer in self.layers if layer.hint))

    @property
    def bytes_before(self) -> int:
        """Bytes of all float weights; tied ones count once."""
        return sum(layer.bytes_before for layer in self.layers if not layer.tied_to)

    @property
    def bytes_after(self) -> int:
        """Bytes of all weights as they are stored now; tied ones count once."""
        return sum(layer.bytes_after - layer.bytes_shared for layer in self.layers)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the layers as plain values for JSON."""
        return [vars(layer) for layer in self.layers]


def _looks(row: LayerReport) -> tuple[str, ...]:
    """Return the cells of a layer's line in the table, except for its name and sizes."""
    return row.kind, row.state, row.scheme, row.kernel, row.reason


def _size(count: int) -> str:
    return f"{count / 2**20:.2f} MiB" if count >= 2**17 else f"{count / 2**10:.1f} KiB"


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of a layer's float weight."""
    if isinstance(module, QuantizedModule):
        return int(math.prod(module._store.shape) * module._dtype.itemsize)
    return sum(_tensor_bytes(module).values())


def quantized_row(name: str, module: QuantizedModule) -> LayerReport:
    """Return the row of a quantized layer."""
    decision = module.decision
    bound_kernel = decision.selected if decision else None
    return LayerReport(
        name,
        type(module).__name__,
        QUANTIZED,
        (bound_kernel.reason if bound_kernel else "on meta: bound when its weights are loaded")
        + _other_kernels(module),
        str(module.scheme.blank()),
        bound_kernel.plugin if bound_kernel else "",
        bound_kernel.kernel if bound_kernel else "",
        weight_bytes(module),
        sum(_tensor_bytes(module).values()),
        hint=dtype_hint(decision, module._bind_settings.settings or current()) if decision else "",
    )


def _neutral_row(name: str, module: NeutralLinear) -> LayerReport:
    """Return the row of a layer whose weight is not packed; bytes are those of this rank, if it is sharded."""
    held: list[Any] = [getattr(part, "to_local", lambda part=part: part)() for part in module.weight.parameters()]
    return LayerReport(
        name,
        type(module).__name__,
        QUANTIZED,
        "not packed: its weight is parameters",
        str(module.scheme.blank()),
        "torch",
        "torch.plain.linear",
        math.prod(module.weight.shape) * module.compute_dtype.itemsize,
        sum(tensor.numel() * tensor.element_size() for tensor in held),
    )


def _other_kernels(module: QuantizedModule) -> str:
    """Describe further kernels that a layer has bound: for gradients, or for another dtype of x."""
    found: dict[str, list[str]] = {}
    for (dtype, training), bound in module._bounds.items():
        if bound.name != (module._primary and module._primary.name):
            named = f"{'gradients, ' if training else ''}x={str(dtype).removeprefix('torch.')}"
            found.setdefault(bound.name, []).append(named)
    return "".join(f"; {kernel} for {' and '.join(calls)}" for kernel, calls in found.items())


def report(model: nn.Module) -> Report:
    """Report plugin, kernel, reason, and bytes before and after for every layer of a model that holds a weight."""
    check_module(model, "report")
    tracker, rows = TieTracker(), []
    for name, module in model.named_modules():
        if isinstance(module, NeutralLinear):
            rows.append(_neutral_row(name, module))
        elif holds_weight(module):
            row = quantized_row(name, module) if isinstance(module, QuantizedModule) else float_row_of(name, module)
            rows.append(tracker.with_ties(row, module))
    return Report(tuple(rows))


class TieTracker:
    """Tracks the tensors of the layers in a report, so that shared tensors are counted once."""

    def __init__(self) -> None:
        self.owners: dict[int, str] = {}
        self.seen: set[int] = set()

    def with_ties(self, row: LayerReport, module: nn.Module) -> LayerReport:
        """Return the row with ``tied_to`` and ``bytes_shared`` relative to the rows before it."""
        weight = (
            module._store if isinstance(module, QuantizedModule) else dict(module._parameters.items()).get("weight")
        )
        first = self.owners.setdefault(id(module if weight is None else weight), row.name)
        held = _tensor_bytes(module)
        shared = sum(size for key, size in held.items() if key in self.seen)
        self.seen |= held.keys()
        return replace(row, tied_to="" if first == row.name else first, bytes_shared=shared)


def _tensor_bytes(module: nn.Module) -> dict[int, int]:
    """Map the id of each tensor that represents a layer's weight to its bytes."""
    if isinstance(module, QuantizedModule):
        return {id(t): b.nbytes(t) for b in module._bounds.values() for t in b.packed.values()}
    parametrized: Any = module.parametrizations if is_parametrized(module) else None
    own = module.parameters(recurse=False) if parametrized is None else parametrized.parameters()
    return {id(p): p.numel() * p.element_size() for p in own if not is_lazy(p) and p.dim() >= 2}


def float_row_of(name: str, module: nn.Module) -> LayerReport:
    """Return the row of a layer that is not quantized."""
    size = weight_bytes(module)
    return LayerReport(name, type(module).__name__, "float", plugin="torch", bytes_before=size, bytes_after=size)


def holds_weight(module: nn.Module) -> bool:
    """Whether a module has a row in a report: it is quantized, can be, or has a parameter of two dimensions."""
    if isinstance(module, (QuantizedModule, *COUNTERPARTS)):
        return True
    if isinstance(module, WeightParts):  # the weight of a NeutralLinear, which has a row of its own
        return False
    # The tensors behind a parametrized weight are counted for the layer that owns the weight.
    if isinstance(module, ParametrizationList):
        return False
    behind: Any = module.parametrizations.parameters() if is_parametrized(module) else ()  # type: ignore[union-attr]
    own = (*module.parameters(recurse=False), *behind)
    return any(_is_weight(p) and p.is_floating_point() for p in own)


def _is_weight(parameter: Any) -> bool:
    """Whether a parameter is a weight (two or more dimensions), or lazy and may become one."""
    return is_lazy(parameter) or parameter.dim() >= 2
