"""Quantized experts on meta that replace the fused float experts of a model if a checkpoint holds them quantized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..nn.experts import QuantizedExperts, expert_weights, why_not_experts
from ..nn.grouped_linear import QuantizedGroupedLinear
from ..resolving.binding import WeightStore
from ..weights.parts import parts
from ..weights.qtensor import QTensor
from ..weights.schemes import Scheme
from .records import Record

# ruff: noqa: SLF001 - reads the tables that torch keeps in modules


@dataclass(frozen=True)
class StandIn:
    """``experts``: the replacement of ``module``, on meta, which shares its biases; ``device``: of its weights."""

    module: nn.Module
    experts: QuantizedExperts
    device: torch.device


def stand_ins(layers: Mapping[str, nn.Module], records: Mapping[str, Record]) -> dict[str, StandIn]:
    """Return the replacements of float experts whose weights are all in ``records``, by the name of the module."""
    made: dict[int, StandIn] = {}
    found = {}
    for name, module in layers.items():
        weights = expert_weights(module)
        if name and weights and all(f"{name}.{weight}.weight" in records for weight in weights):
            if id(module) not in made and not why_not_experts(module):
                made[id(module)] = _stand_in(module, {weight: records[f"{name}.{weight}.weight"] for weight in weights})
            if id(module) in made:
                found[name] = made[id(module)]
    return found


def _stand_in(module: nn.Module, records: Mapping[str, Record]) -> StandIn:
    def grouped(which: str) -> QuantizedGroupedLinear:
        weight, format = module._parameters[which], records[which].format
        assert weight is not None
        e, *sizes = weight.shape
        n, k = reversed(sizes) if getattr(module, "is_transposed", False) else sizes
        described = parts(format, n, k)
        tensors = {p.name: torch.empty((e, *p.shape), dtype=p.dtype, device="meta") for p in described}
        blank = QTensor.from_tensors(tensors, (e, n, k), format)
        bias = module._parameters.get(f"{which}_bias")
        return QuantizedGroupedLinear(WeightStore(blank), Scheme(format), bias, weight.dtype)

    device = next(
        weight.device for name, weight in module._parameters.items() if name in records and weight is not None
    )
    return StandIn(module, QuantizedExperts.wrap(module, grouped), device)


def with_stand_ins(layers: Mapping[str, nn.Module], found: Mapping[str, StandIn]) -> dict[str, nn.Module]:
    """Return the modules of a model by name, with the replacements applied."""
    gone = {name for name in layers if any(start in found for start in _prefixes(name))}
    new = {
        name: module
        for start, stand_in in found.items()
        for name, module in stand_in.experts.named_modules(prefix=start, remove_duplicate=False)
    }
    return {**{name: module for name, module in layers.items() if name not in gone}, **new}


def _prefixes(name: str) -> Iterator[str]:
    """Yield a name and the names of its parents."""
    while name:
        yield name
        name = name.rpartition(".")[0]
