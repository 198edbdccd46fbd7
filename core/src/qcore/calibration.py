"""Finding the numbers of static activations: run batches, watch what enters each layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .activations import StaticInt8, static_from_range
from .errors import FormatError
from .schemes import Scheme

Calibration = Iterable[Any] | Callable[[nn.Module], Any]
"""Batches (each a tensor, a tuple of positional or a mapping of keyword arguments), or a function of the model."""


class _Range:
    """The smallest and largest value that entered a layer."""

    def __init__(self) -> None:
        self.low, self.high, self.seen, self.finite = 0.0, 0.0, False, True

    def watch(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(iter((*args, *kwargs.values())), None)
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
            low, high = (float(v) for v in x.detach().aminmax())
            # min() and max() would pass over NaN.
            self.finite = self.finite and math.isfinite(low) and math.isfinite(high)
            self.low, self.high, self.seen = min(self.low, low), max(self.high, high), True


def calibrate(model: nn.Module, schemes: Mapping[str, Scheme], calibration: Calibration | None) -> dict[str, Scheme]:
    """Fill in the static activations of ``schemes``, keyed by layer name, from the range of each layer's input.

    Scale and zero point cover ``[min(x, 0), max(x, 0)]``. Raises `FormatError` where there is no calibration, or a
    layer saw no input or a value that is not finite.
    """
    # A table has no activations: an embedding under a static scheme needs no numbers.
    wanted = {name: s for name, s in schemes.items() if not isinstance(model.get_submodule(name), nn.Embedding)}
    if not wanted:
        return {name: _without_activation(scheme) for name, scheme in schemes.items()}
    if calibration is None:
        raise FormatError(
            f"scheme {str(next(iter(wanted.values())))!r} has static activations, whose scale must be known.\n"
            f"Pass calibration=batches, or a function that runs the model on typical inputs."
        )
    ranges = _observe(model, wanted, calibration)
    filled = {name: _filled(name, scheme, ranges[name]) for name, scheme in wanted.items()}
    return {name: filled.get(name) or _without_activation(scheme) for name, scheme in schemes.items()}


def _observe(model: nn.Module, names: Iterable[str], calibration: Calibration) -> dict[str, _Range]:
    ranges = {name: _Range() for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(r.watch, with_kwargs=True) for name, r in ranges.items()
    ]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            _run(model, calibration)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
    return ranges


def _run(model: nn.Module, calibration: Calibration) -> None:
    if callable(calibration):
        calibration(model)
        return
    for batch in calibration:
        if isinstance(batch, Mapping):
            model(**batch)
        elif isinstance(batch, (tuple, list)):
            model(*batch)
        else:
            model(batch)


def _filled(name: str, scheme: Scheme, found: _Range) -> Scheme:
    if not found.seen:
        raise FormatError(
            f"layer {name!r} saw no input during calibration.\nExclude it, or calibrate with batches that reach it."
        )
    if not found.finite:
        raise FormatError(f"layer {name!r} saw NaN or Inf during calibration.")
    return replace(scheme, activation=StaticInt8(*static_from_range(found.low, found.high)))


def _without_activation(scheme: Scheme) -> Scheme:
    return replace(scheme, activation=None, output=None)
