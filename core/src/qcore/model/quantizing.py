"""`quantize_`: quantize the layers of a model in place."""

# ruff: noqa: SLF001 - reads torch's table of submodules, and the store that tied layers share

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from operator import length_hint
from typing import Any, cast

from torch import Tensor, nn

from ..errors import QcoreWarning, UnsupportedError
from ..functional.checks import check_module
from ..nn.base import QuantizedModule
from ..nn.counterparts import (
    COUNTERPARTS,
    float_base,
    is_transposed_linear,
    quantized,
    rebuild,
    why_parent_reads,
    why_unsupported,
)
from ..nn.experts import QuantizedExperts, expert_weights
from ..runtime.companions import tell_changed
from ..runtime.progress import Progress, ProgressChoice, shown
from ..weights.schemes import Scheme
from .calibration import Calibrated, Calibration, calibrate
from .report import (
    EXCLUDED,
    REFUSED,
    LayerReport,
    Report,
    Skipped,
    TieTracker,
    float_row_of,
    holds_weight,
    quantized_row,
    weight_bytes,
)
from .selection import Choice, Patterns, Selection, Sharing, why_adapter_needs_it


def quantize_(
    model: nn.Module,
    scheme: str | Scheme | Mapping[str, str | Scheme],
    *,
    include: Patterns | None = None,
    exclude: Patterns = (),
    calibration: Calibration | None = None,
    progress: ProgressChoice = None,
) -> Report:
    """Quantize a model in place: every `torch.nn.Linear`, `Conv2d` and `Embedding` becomes its quantized counterpart.

    So does transformers' ``Conv1D``, the transposed linear layer of GPT-2.

    **Arguments:**

    - ``scheme``: e.g. ``"w4a16-g128"``, or a mapping from patterns to schemes; the first pattern that matches decides.
    - ``include``, ``exclude``: patterns of layer names: a full name, a glob, or its last parts (``"lm_head"`` matches
      ``model.lm_head``).
    - ``calibration``: batches, or a function of the model, for schemes with static activations, ``@awq`` or ``@gptq``;
      runs once.
    - ``progress``: a bar on a terminal (None), a bar anywhere (True), nothing (False), or a function that is called
      with (layers done, all layers, name of the next layer).

    Returns a `Report` of every layer that holds a weight: quantized, excluded, or refused with the reason. Tied weights
    stay tied: they are quantized together or not at all.

    Each float weight is released as soon as its layer is quantized, so memory peaks at the float model and one layer.
    Arguments, calibration and weights (NaN, Inf) are checked before the first layer changes: if they raise, the model
    is unchanged. If a later step raises (out of memory, Ctrl-C, a failing kernel), the layers before it stay quantized,
    a `QcoreWarning` counts them, and another call of `quantize_` continues with the others.
    """
    check_module(model, "quantize_")
    plan = ModelPlan(model, Selection.of(scheme, include, exclude))
    plan.check_model()
    needing = {name: s for name, s in plan.schemes.items() if s.needs_calibration}
    with _calibration_shown(calibration, progress if needing else False) as batches:
        found = calibrate(model, needing, batches, plan.ties)
    plan.check_weights(found)
    with shown(progress, "quantizing", "layers") as tell:
        made = plan.replace_layers(found, tell)
    tell_changed(model)
    return Report(tuple(plan.rows(made)))


@contextlib.contextmanager
def _calibration_shown(calibration: Calibration | None, progress: ProgressChoice) -> Iterator[Calibration | None]:
    """Yield the calibration, with a bar that counts its batches if their number is known.

    If ``progress`` is a function, it counts layers only.
    """
    uncounted = calibration is None or callable(calibration) or isinstance(calibration, Mapping)
    total = 0 if uncounted else length_hint(calibration)
    if not total or callable(progress):
        yield calibration
        return
    with shown(progress, "calibrating", "batches") as tell:
        yield _told(cast("Iterable[Any]", calibration), total, tell)


def _told(batches: Iterable[Any], total: int, tell: Progress) -> Iterator[Any]:
    for done, batch in enumerate(batches):
        tell(done, total, "")
        yield batch


def _kind_of_other_layout(layers: Iterable[nn.Module | None]) -> str:
    """The kind of a layer whose weight has another layout than that of linear layers and embeddings, or empty."""
    found = [layer for layer in layers if layer is not None]
    if any(isinstance(layer, nn.Conv2d) for layer in found):
        return "convolutions"
    return "Conv1D" if any(map(is_transposed_linear, found)) else ""


class ModelPlan:
    """The scheme of every layer, or the reason for leaving it unchanged; decided before the model is changed."""

    def __init__(self, model: nn.Module, selection: Selection) -> None:
        every = (model.named_modules, model.named_parameters)
        names = [name for found in every for name, _ in found(remove_duplicate=False)]
        self.model, self.selection = model, selection.within(names)
        self.layers = {name: module for name, module in model.named_modules() if holds_weight(module)}
        self.bytes_before: dict[str, int] = {}
        self.sharing = Sharing(model, self.layers)
        self.schemes: dict[str, Scheme] = {}
        self.skipped: dict[str, Skipped] = {}
        self.notes: dict[str, str] = {}
        for name, module in self.layers.items():
            decided = self._decide(name, module)
            if isinstance(decided, Skipped):
                self.skipped[name] = decided
            else:
                self.schemes[name] = decided
        self.ties = self._tie_groups()
        self._warn_about_conflicts()
        selection.warn_about_typos(self.sharing.names_of(*self.layers), stacklevel=4)

    def check_model(self) -> None:
        if isinstance(self.model, tuple(COUNTERPARTS)):
            kind = COUNTERPARTS[float_base(self.model)].__name__
            raise UnsupportedError(
                f"the model itself is a {type(self.model).__name__}, which cannot be replaced in place.\n"
                f"Use qcore.nn.{kind}.from_float(model, scheme)."
            )

    def _decide(self, name: str, module: nn.Module) -> Scheme | Skipped:
        if isinstance(module, QuantizedModule):
            return Skipped(REFUSED, f"already quantized as {module.scheme}")
        own, group = self._choice(name), self._choice(*self.sharing.layers_with(name))
        if not own.same_weight_as(group):
            other = self._deciding_layer(name, group)
            self.notes[name] = f"its weight is tied to {other!r}, which {group.reason}"
        if group.scheme is None:
            return Skipped(EXCLUDED, self.notes.get(name, group.reason))
        scheme = own.scheme if own.scheme is not None and own.same_weight_as(group) else group.scheme
        reason = (
            why_adapter_needs_it(self.model, name)
            or why_unsupported(module)
            or self._reads_weight(name)
            or _unsupported_scheme(scheme)
        )
        if expert_weights(module):
            reason = reason or _unsupported_for_experts(scheme)
        return Skipped(REFUSED, reason) if reason else scheme

    def _choice(self, *layers: str) -> Choice:
        return self.selection.choose(self.sharing.names_of(*layers))

    def _deciding_layer(self, name: str, group: Choice) -> str:
        """Return the layer whose name determined the choice for all layers that share its weight."""
        layers = self.sharing.layers_with(name)
        return next((layer for layer in layers if self._choice(layer) == group), layers[0])

    def _reads_weight(self, name: str) -> str:
        """Return why replacing the layer would break its parent, or an empty string."""
        return why_parent_reads(self.model.get_submodule(name.rpartition(".")[0]))

    def _tie_groups(self) -> dict[str, str]:
        """Map each tied layer to the first layer with the same weight.

        If only some layers of a group can be quantized, none of them is.
        """
        ties: dict[str, str] = {}
        for group in self.sharing.groups:
            if any(layer in self.schemes for layer in group):
                self._tie(group, ties)
        return ties

    def _tie(self, layers: list[str], ties: dict[str, str]) -> None:
        outside = [layer for layer in layers if layer not in self.schemes]
        kind = _kind_of_other_layout(self.layers.get(layer) for layer in layers)
        if not outside and not kind:
            ties.update(dict.fromkeys(layers, layers[0]))
            return
        why = "which stays float" if outside else f"and {kind} cannot share a quantized weight"
        for layer in [layer for layer in layers if layer in self.schemes]:
            other = next(name for name in (outside or layers) if name != layer)
            reason = f"its weight is tied to {other!r}, {why}; treat both alike, or untie them"
            self.skipped[layer] = Skipped(REFUSED, reason)
            del self.schemes[layer]

    def _warn_about_conflicts(self) -> None:
        """Warn if patterns select different schemes for layers that share a weight, since they get one scheme."""
        for group in self.sharing.groups:
            layers = [layer for layer in group if layer in self.layers]
            refused = any(layer in self.skipped and self.skipped[layer].state == REFUSED for layer in layers)
            if not refused and any(layer in self.notes for layer in layers):
                choices = ", ".join(f"{layer} as {self._choice(layer)}" for layer in layers)
                decided = self._choice(*layers)
                warnings.warn(
                    f"the patterns select different schemes for layers that share a weight: {choices}.\n"
                    f"All of them get {decided}, "
                    f"since {self._deciding_layer(layers[0], decided)!r} {decided.reason}. "
                    f"Untie them first to treat them differently.",
                    QcoreWarning,
                    stacklevel=4,
                )
        for layer in self.schemes:
            self._warn_about_names(layer)

    def _warn_about_names(self, layer: str) -> None:
        """Warn if patterns select different schemes for the names of one module."""
        names = self.sharing.names_of(layer)
        chosen = {name: self.selection.choose([name]).scheme for name in names} if len(names) > 1 else {}
        if len({scheme for scheme in chosen.values() if scheme is not None}) > 1:
            choices = ", ".join(f"{name} as {scheme}" for name, scheme in chosen.items() if scheme is not None)
            warnings.warn(
                f"the patterns select different schemes for the names of one layer: {choices}.\n"
                f"It gets {self._choice(layer)}. Copy the layer first to treat its names differently.",
                QcoreWarning,
                stacklevel=5,
            )

    def check_weights(self, found: Calibrated) -> None:
        """Raise the quantizer's error for a weight with NaN or Inf before any layer is replaced."""
        for name, scheme in self.schemes.items():
            layer = self.layers[name]
            if self.ties.get(name, name) == name and not all(map(_is_finite, layer.parameters(recurse=False))):
                # The quantizer's own error says what is wrong, and where; one that accepts such weights raises nothing.
                quantized(layer, found.schemes.get(name, scheme), name, found.moments.get(name))

    def replace_layers(self, found: Calibrated, tell: Progress) -> dict[str, QuantizedModule | QuantizedExperts]:
        """Replace every planned layer by its quantized counterpart and return those by name.

        Releases each float layer, and its moments, as soon as it is replaced. Layers that share a weight are replaced
        one right after the other.
        """
        places = self.places()
        made: dict[str, QuantizedModule | QuantizedExperts] = {}
        placed = 0
        try:
            for group in self._groups():
                tell(placed, len(self.schemes), group[0])
                for name in group:
                    made[name] = self._build(name, made.get(group[0]), found)
                for name in group:
                    module = self.layers[name]
                    self.bytes_before[name] = weight_bytes(module)
                    for parent, child in places[id(module)]:
                        setattr(parent, child, made[name])
                    self.layers[name] = made[name]
                    # A name that still holds the float layer would keep its weight alive.
                    del module
                placed += len(group)
        except BaseException:
            if placed:
                warnings.warn(
                    f"quantize_ stopped after {placed} of {len(self.schemes)} layers, which stay quantized; the others "
                    f"are unchanged.\nCall quantize_ again to continue, or load the model again to start over.",
                    QcoreWarning,
                    stacklevel=3,
                )
            raise
        tell(placed, len(self.schemes), "")
        return made

    def _groups(self) -> Iterator[list[str]]:
        """Yield the planned layers, those that share a weight together, the one that is quantized first."""
        groups: dict[str, list[str]] = {}
        for name in self.schemes:
            groups.setdefault(self.ties.get(name, name), []).append(name)
        return (sorted(group, key=lambda name: name != first) for first, group in groups.items())

    def _build(
        self, name: str, owner: QuantizedModule | QuantizedExperts | None, found: Calibrated
    ) -> QuantizedModule | QuantizedExperts:
        """Build the counterpart of one layer; ``owner``: that of the layer whose weight it shares, if already built."""
        layer, scheme = self.layers[name], found.schemes.get(name, self.schemes[name])
        if isinstance(owner, QuantizedModule):
            return rebuild(layer, owner._store, replace(scheme, quantizer=owner.scheme.quantizer))
        return quantized(layer, scheme, name, found.moments.pop(self.ties.get(name, name), None))

    def places(self) -> dict[int, list[tuple[nn.Module, str]]]:
        """Map the id of each planned layer to every (parent, child name) where it is; it may be in several places."""
        places: dict[int, list[tuple[nn.Module, str]]] = {id(self.layers[name]): [] for name in self.schemes}
        for parent in self.model.modules():
            for child, module in parent._modules.items():
                if id(module) in places:
                    places[id(module)].append((parent, child))
        return places

    def rows(self, made: Mapping[str, QuantizedModule | QuantizedExperts]) -> Iterator[LayerReport]:
        tracker = TieTracker()
        for name, module in self.layers.items():
            new = made.get(name)
            if isinstance(new, QuantizedExperts):
                for which, part in new.projections().items():
                    yield tracker.with_ties(quantized_row(f"{name}.{which}", part), part)
            elif new is not None:
                # The ties are those of the float model, so that its bytes are counted once, too.
                row = tracker.with_ties(quantized_row(name, new), new)
                notes = (self.notes.get(name), self._quantizer_note(name, new), row.reason)
                yield replace(row, bytes_before=self.bytes_before[name], reason="; ".join(filter(None, notes)))
            else:
                skipped = self.skipped[name]
                own = isinstance(module, QuantizedModule)
                row = quantized_row(name, module) if own else replace(float_row_of(name, module), plugin="")
                yield replace(tracker.with_ties(row, module), state=skipped.state, reason=skipped.reason)

    def _quantizer_note(self, name: str, module: QuantizedModule) -> str:
        """Explain a quantizer other than the requested one; empty if it is the requested one."""
        wanted, used = self.schemes[name].quantizer, module.scheme.quantizer
        return "" if used == wanted else f"{used} instead of {wanted}: no inputs reach a table's weight"


def _is_finite(parameter: Tensor) -> bool:
    if parameter.is_meta or not parameter.is_floating_point() or not parameter.numel():
        return True
    values = parameter.detach()
    # aminmax propagates NaN and needs no temporaries; it does not take dtypes of one byte.
    low, high = (values.float() if values.itemsize == 1 else values).aminmax()
    return math.isfinite(low) and math.isfinite(high)


def _unsupported_for_experts(scheme: Scheme) -> str:
    """Return why fused experts cannot take a scheme, or an empty string."""
    if scheme.needs_calibration:
        other = Scheme(scheme.weight)
        return f"{scheme} needs the inputs of each expert, which are not collected; use {other} for experts, say"
    return ""


def _unsupported_scheme(scheme: Scheme) -> str:
    if scheme.output is not None:
        return "-o8 makes a layer return int8 codes, which the next layer cannot read; use it on single modules"
    if getattr(scheme.activation, "per_token", False):
        return "per-token parameters are passed with each call; use qcore.linear"
    return ""
