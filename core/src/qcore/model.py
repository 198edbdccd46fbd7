"""`quantize_` a model in place, and `report` what became of every layer."""

# ruff: noqa: SLF001 - reads the layers' own bookkeeping, and torch's table of submodules

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from .calibration import Calibrated, Calibration, calibrate
from .decision import format_table
from .errors import FormatError, QcoreWarning, UnsupportedError, did_you_mean
from .hints import dtype_hint
from .nn import QuantizedConv2d, QuantizedEmbedding, QuantizedLinear
from .nn.base import QuantizedModule, adopt
from .schemes import Scheme
from .selection import Asked, Patterns, Selection, Sharing, as_patterns, as_rules
from .settings import current

QUANTIZED, EXCLUDED, REFUSED = "quantized", "excluded", "refused"

_SUPPORTED: dict[type[nn.Module], Any] = {
    nn.Linear: QuantizedLinear,
    nn.Conv2d: QuantizedConv2d,
    nn.Embedding: QuantizedEmbedding,
}


@dataclass(frozen=True)
class LayerReport:
    """What became of one layer.

    **Fields:** ``name``; ``kind``: class name; ``state``: ``quantized``, ``excluded`` or ``refused``; ``reason``;
    ``scheme``; ``plugin`` and ``kernel`` that serve it; ``bytes_before``: of the float weight; ``bytes_after``: of what
    is held now; ``tied_to``: the layer whose weight it shares; ``bytes_shared``: how much of ``bytes_after`` a layer
    above it holds already, which the totals count once; ``hint``: what would make the layer faster.
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
    """Every layer that holds a weight; ``str(report)`` is a table."""

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
        """How many layers each kernel serves."""
        counts: dict[str, int] = {}
        for layer in self.by_state(QUANTIZED):
            counts[layer.kernel] = counts.get(layer.kernel, 0) + 1
        return counts

    def __str__(self) -> str:
        rows = [
            (r.name, r.kind, r.state, r.scheme, r.kernel, _size(r.bytes_before), _size(r.bytes_after), r.reason)
            for r in self.layers
        ]
        header = ("layer", "kind", "state", "scheme", "kernel", "before", "after", "why")
        states = dict.fromkeys((QUANTIZED, EXCLUDED, REFUSED, *(r.state for r in self.layers)))
        counts = ", ".join(f"{len(self.by_state(s))} {s}" for s in states)
        sizes = f"{_size(self.bytes_before)} before, {_size(self.bytes_after)} after"
        total = f"{len(self.layers)} layers: {counts}; {sizes}"
        return "\n".join([*format_table(header, rows), total, *(f"hint: {hint}" for hint in self.hints)])

    @property
    def hints(self) -> tuple[str, ...]:
        """What would make layers faster, each hint once."""
        return tuple(dict.fromkeys(layer.hint for layer in self.layers if layer.hint))

    @property
    def bytes_before(self) -> int:
        """Bytes of all float weights; tied ones count once."""
        return sum(layer.bytes_before for layer in self.layers if not layer.tied_to)

    @property
    def bytes_after(self) -> int:
        """Bytes of all weights as they are held now; tied ones count once."""
        return sum(layer.bytes_after - layer.bytes_shared for layer in self.layers)

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values."""
        return [vars(layer) for layer in self.layers]


def _size(count: int) -> str:
    return f"{count / 2**20:.2f} MiB" if count >= 2**17 else f"{count / 2**10:.1f} KiB"


def quantize_(
    model: nn.Module,
    scheme: str | Scheme | Mapping[str, str | Scheme],
    *,
    include: Patterns | None = None,
    exclude: Patterns = (),
    calibration: Calibration | None = None,
) -> Report:
    """Quantize a model in place: every `torch.nn.Linear`, `Conv2d` and `Embedding` becomes its quantized counterpart.

    **Arguments:**

    - ``scheme``: e.g. ``"w4a16-g128"``, or a mapping from patterns to schemes; the first pattern that matches decides.
    - ``include``, ``exclude``: patterns of layer names: a full name, a glob, or its last parts (``"lm_head"`` matches
      ``model.lm_head``).
    - ``calibration``: batches, or a function of the model, for schemes with static activations or ``@gptq``; runs once.

    Returns a `Report` of every layer that holds a weight: quantized, excluded, or refused with the reason. Tied weights
    stay tied: they are quantized together or not at all. Where anything raises (NaN in a weight, a calibration that
    fails), the model is left as it was.
    """
    plan = _Plan(model, Selection(as_rules(scheme), as_patterns(include), as_patterns(exclude) or ()))
    plan.check_model()
    needing = {name: s for name, s in plan.schemes.items() if s.needs_calibration}
    made = plan.build(calibrate(model, needing, calibration, plan.ties))
    for (parent, child), module in plan.placements(made):
        setattr(parent, child, module)
    return Report(tuple(plan.rows(made)))


class _Plan:
    """What will happen to every layer, decided before anything is touched."""

    def __init__(self, model: nn.Module, selection: Selection) -> None:
        self.model, self.selection = model, selection
        self.layers = {name: module for name, module in model.named_modules() if _holds_weight(module)}
        self.sharing = Sharing(model, self.layers)
        self.schemes: dict[str, Scheme] = {}
        self.left: dict[str, tuple[str, str]] = {}
        self.notes: dict[str, str] = {}
        for name, module in self.layers.items():
            verdict = self._verdict(name, module)
            if isinstance(verdict, Scheme):
                self.schemes[name] = verdict
            else:
                self.left[name] = verdict
        self.ties = self._tie_groups()
        self._warn_about_conflicts()
        selection.warn_about_typos(self.sharing.names_of(*self.layers), stacklevel=4)

    def check_model(self) -> None:
        if isinstance(self.model, tuple(_SUPPORTED)):
            kind = _SUPPORTED[_base(self.model)].__name__
            raise UnsupportedError(
                f"the model itself is a {type(self.model).__name__}, which cannot be replaced in place.\n"
                f"Use qcore.nn.{kind}.from_float(model, scheme)."
            )

    def _verdict(self, name: str, module: nn.Module) -> Scheme | tuple[str, str]:
        if isinstance(module, QuantizedModule):
            return REFUSED, f"already quantized as {module.scheme}"
        own, group = self._asked(name), self._asked(*self.sharing.layers_with(name))
        if not own.same_weight_as(group):
            other = self._decider(name, group)
            self.notes[name] = f"its weight is tied to {other!r}, which {group.reason}"
        if group.scheme is None:
            return EXCLUDED, self.notes.get(name, group.reason)
        scheme = own.scheme if own.scheme is not None and own.same_weight_as(group) else group.scheme
        reason = _unsupported(module) or self._reads_weight(name) or _unfit(scheme)
        return (REFUSED, reason) if reason else scheme

    def _asked(self, *layers: str) -> Asked:
        return self.selection.asked(self.sharing.names_of(*layers))

    def _decider(self, name: str, group: Asked) -> str:
        """The layer whose name decided for all that share its weight."""
        layers = self.sharing.layers_with(name)
        return next((layer for layer in layers if self._asked(layer) == group), layers[0])

    def _reads_weight(self, name: str) -> str:
        """Why a parent would break: some modules use a child's weight instead of calling the child."""
        parent = self.model.get_submodule(name.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            return "torch.nn.MultiheadAttention reads this weight itself instead of calling the layer"
        return ""

    def _tie_groups(self) -> dict[str, str]:
        """Layer name to the name of the first layer with the same weight. Half-quantizable ties are given up whole."""
        ties: dict[str, str] = {}
        for group in self.sharing.groups:
            if any(layer in self.schemes for layer in group):
                self._tie(group, ties)
        return ties

    def _tie(self, layers: list[str], ties: dict[str, str]) -> None:
        outside = [layer for layer in layers if layer not in self.schemes]
        convolutions = any(isinstance(self.layers.get(layer), nn.Conv2d) for layer in layers)
        if not outside and not convolutions:
            ties.update(dict.fromkeys(layers, layers[0]))
            return
        why = "which stays float" if outside else "and convolutions cannot share a quantized weight"
        for layer in [layer for layer in layers if layer in self.schemes]:
            other = next(name for name in (outside or layers) if name != layer)
            self.left[layer] = (REFUSED, f"its weight is tied to {other!r}, {why}; treat both alike, or untie them")
            del self.schemes[layer]

    def _warn_about_conflicts(self) -> None:
        """Layers that share a weight get one scheme; where patterns ask for several, which one may surprise."""
        for group in self.sharing.groups:
            layers = [layer for layer in group if layer in self.layers]
            refused = any(self.left.get(layer, ("",))[0] == REFUSED for layer in layers)
            if not refused and any(layer in self.notes for layer in layers):
                asked = ", ".join(f"{layer} as {self._asked(layer)}" for layer in layers)
                decided = self._asked(*layers)
                warnings.warn(
                    f"layers that share a weight are asked for in different forms: {asked}.\n"
                    f"One form serves all: {decided}, since {self._decider(layers[0], decided)!r} {decided.reason}. "
                    f"Untie them first to treat them apart.",
                    QcoreWarning,
                    stacklevel=4,
                )

    def build(self, found: Calibrated) -> dict[str, QuantizedModule]:
        """Quantize every planned layer beside the original; gives up the moments as it goes."""
        made: dict[str, QuantizedModule] = {}
        for name, planned in self.schemes.items():
            first, layer, scheme = self.ties.get(name, name), self.layers[name], found.schemes.get(name, planned)
            if first in made:
                made[name] = _share(made[first], layer, scheme)
            else:
                moments = found.moments.pop(first, None)
                made[name] = _SUPPORTED[_base(layer)].from_float(layer, scheme, name=name, moments=moments)
        return made

    def placements(self, made: Mapping[str, QuantizedModule]) -> Iterator[tuple[tuple[nn.Module, str], nn.Module]]:
        """Every place a replaced layer sits, including places that share one module."""
        by_id = {id(self.layers[name]): module for name, module in made.items()}
        places = [
            ((parent, child), by_id[id(module)])
            for parent in self.model.modules()
            for child, module in parent._modules.items()
            if id(module) in by_id
        ]
        return iter(places)

    def rows(self, made: Mapping[str, QuantizedModule]) -> Iterator[LayerReport]:
        ledger = _Ledger()
        for name, module in self.layers.items():
            before = _weight_bytes(module)
            if name in made:
                # Ties are those of the float model: what it held is counted once too.
                row = ledger.entered(_row(name, made[name]), made[name])
                notes = (self.notes.get(name), self._instead(name, made[name]), row.reason)
                yield replace(row, bytes_before=before, reason="; ".join(filter(None, notes)))
            else:
                state, reason = self.left[name]
                quantized = isinstance(module, QuantizedModule)
                row = _row(name, module) if quantized else replace(_float_row(name, module), plugin="")
                yield replace(ledger.entered(row, module), state=state, reason=reason)

    def _instead(self, name: str, module: QuantizedModule) -> str:
        """Which other quantizer than the one asked for made a weight, and why."""
        wanted, used = self.schemes[name].quantizer, module.scheme.quantizer
        return "" if used == wanted else f"{used} instead of {wanted}: no inputs reach a table's weight"


def _holds_weight(module: nn.Module) -> bool:
    if isinstance(module, (QuantizedModule, *_SUPPORTED)):
        return True
    # The tensors behind a parametrized weight belong to the layer that they are for.
    own = () if isinstance(module, ParametrizationList) else module.parameters(recurse=False)
    return any(_counts(p) and p.is_floating_point() for p in own)


def _counts(parameter: Any) -> bool:
    """Whether a parameter is a weight: a lazy one will be."""
    return is_lazy(parameter) or parameter.dim() >= 2


def _base(module: nn.Module) -> type[nn.Module]:
    return next(base for base in _SUPPORTED if isinstance(module, base))


def _unsupported(module: nn.Module) -> str:
    """Why a module has no quantized counterpart; empty where it has one."""
    kind = type(module).__name__
    base: Any = next((base for base in _SUPPORTED if isinstance(module, base)), None)
    if base is None:
        return f"qcore has no contract for {kind}; it quantizes Linear, Conv2d and Embedding"
    if is_parametrized(module):
        return "its weight is parametrized; remove the parametrization first"
    if type(module).forward is not base.forward or "forward" in vars(module):
        return f"{kind} overrides the forward of {base.__name__}, which quantization would lose"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "an embedding with max_norm rewrites its table while it runs"
    return _unfit_weight(module._parameters.get("weight"))


def _unfit_weight(weight: Any) -> str:
    if weight is None:
        return "its weight is no parameter but computed (weight_norm, pruning); make it permanent first"
    return "its weight is not initialized yet; run the model once first" if is_lazy(weight) else ""


def _unfit(scheme: Scheme) -> str:
    if scheme.output is not None:
        return "-o8 makes a layer return int8 codes, which the next layer cannot read; use it on single modules"
    if getattr(scheme.activation, "per_token", False):
        return "per-token parameters come with each call; use qcore.linear"
    return ""


def _share(made: QuantizedModule, module: nn.Module, scheme: Scheme) -> QuantizedModule:
    """A layer tied to one that is quantized already: it shares the weight's store."""
    store, dtype = made._store, module.weight.dtype
    scheme = replace(scheme, quantizer=made.scheme.quantizer)
    if isinstance(module, nn.Embedding):
        tied: QuantizedModule = QuantizedEmbedding(store, scheme, dtype, module.padding_idx)  # type: ignore[arg-type]
    elif isinstance(module, nn.Linear):
        tied = QuantizedLinear(store, scheme, module.bias, dtype)  # type: ignore[arg-type]
    else:
        raise FormatError("convolutions with tied weights are not supported; exclude them.")
    adopt(tied, module)
    return tied


def _weight_bytes(module: nn.Module) -> int:
    if isinstance(module, QuantizedModule):
        n, k = module._store.shape
        return int(n * k * module._dtype.itemsize)
    return sum(_held(module).values())


def _row(name: str, module: QuantizedModule) -> LayerReport:
    decision = module.decision
    served = decision.selected if decision else None
    return LayerReport(
        name,
        type(module).__name__,
        QUANTIZED,
        (served.reason if served else "on meta: bound when its weights are loaded") + _others(module),
        str(module.scheme.blank()),
        served.plugin if served else "",
        served.kernel if served else "",
        _weight_bytes(module),
        sum(_held(module).values()),
        hint=dtype_hint(decision, module._made_under.settings or current()) if decision else "",
    )


def _others(module: QuantizedModule) -> str:
    """Other kernels that a layer has bound since: for gradients, or for an x of another dtype than its own."""
    found: dict[str, list[str]] = {}
    for (dtype, training), bound in module._bounds.items():
        if bound.name != (module._primary and module._primary.name):
            named = f"{'gradients, ' if training else ''}x={str(dtype).removeprefix('torch.')}"
            found.setdefault(bound.name, []).append(named)
    return "".join(f"; {kernel} for {' and '.join(calls)}" for kernel, calls in found.items())


def report(model: nn.Module) -> Report:
    """What serves every layer of a model that holds a weight: plugin, kernel, why, bytes before and after."""
    ledger, rows = _Ledger(), []
    for name, module in model.named_modules():
        if _holds_weight(module):
            row = _row(name, module) if isinstance(module, QuantizedModule) else _float_row(name, module)
            rows.append(ledger.entered(row, module))
    return Report(tuple(rows))


class _Ledger:
    """What the layers of a table hold, so that nothing is counted twice."""

    def __init__(self) -> None:
        self.owners: dict[int, str] = {}
        self.seen: set[int] = set()

    def entered(self, row: LayerReport, module: nn.Module) -> LayerReport:
        """The row, with what it shares with those before it."""
        weight = (
            module._store if isinstance(module, QuantizedModule) else dict(module._parameters.items()).get("weight")
        )
        first = self.owners.setdefault(id(module if weight is None else weight), row.name)
        held = _held(module)
        shared = sum(size for key, size in held.items() if key in self.seen)
        self.seen |= held.keys()
        return replace(row, tied_to="" if first == row.name else first, bytes_shared=shared)


def _held(module: nn.Module) -> dict[int, int]:
    """Bytes of each tensor that stands for a layer's weight."""
    if isinstance(module, QuantizedModule):
        return {id(t): b.nbytes(t) for b in module._bounds.values() for t in b.packed.values()}
    parametrized: Any = module.parametrizations if is_parametrized(module) else None
    own = module.parameters(recurse=False) if parametrized is None else parametrized.parameters()
    return {id(p): p.numel() * p.element_size() for p in own if not is_lazy(p) and p.dim() >= 2}


def _float_row(name: str, module: nn.Module) -> LayerReport:
    size = _weight_bytes(module)
    return LayerReport(name, type(module).__name__, "float", plugin="torch", bytes_before=size, bytes_after=size)
