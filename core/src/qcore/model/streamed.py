"""Quantize a model on meta whose float weights arrive one by one, such as from a loader."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from ..errors import FormatError
from ..nn.counterparts import is_transposed_linear, quantize_transposed, rebuild
from ..nn.experts import QuantizedExperts, expert_weights
from ..nn.grouped_linear import QuantizedGroupedLinear, quantize_experts
from ..resolving.binding import WeightStore
from ..weights.parts import parts
from ..weights.qtensor import QTensor
from ..weights.quantizers import quantize
from ..weights.schemes import Scheme
from .quantizing import ModelPlan
from .selection import Patterns, Selection


class StreamedPlan:
    """The parameters of a model to quantize, and those that have arrived.

    The layers are selected as by `quantize_`. ``parameters``: full names of the weights to quantize; ``taken``: those
    of them whose values have arrived.
    """

    def __init__(
        self,
        model: nn.Module,
        scheme: str | Scheme | Mapping[str, str | Scheme],
        include: Patterns | None = None,
        exclude: Patterns = (),
    ) -> None:
        self._plan = ModelPlan(model, Selection.of(scheme, include, exclude))
        self._plan.check_model()
        needing = sorted({str(s) for s in self._plan.schemes.values() if s.needs_calibration})
        if needing:
            raise FormatError(
                f"scheme {needing[0]!r} needs calibration, and a model that is being loaded cannot run.\n"
                f"Load it in float and call qcore.quantize_(model, scheme, calibration=batches)."
            )
        self._layers = {name: layer for layer in self._plan.schemes for name in _weights_of(layer, self._plan.layers)}
        self._weights: dict[str, QTensor] = {}
        self.parameters = frozenset(self._layers)
        self.taken: set[str] = set()

    def bytes_per_weight(self, name: str) -> float:
        """Stored bytes per weight of a parameter."""
        layer = self._layers[name]
        format = self._plan.schemes[layer].weight
        weight = self._plan.layers[layer].get_parameter(name.rpartition(".")[2])
        n, k = (weight.shape[-2], weight.shape[-1]) if weight.dim() == 3 else (weight.shape[0], weight[0].numel())
        stored = sum(math.prod(part.shape) * part.dtype.itemsize for part in parts(format, n, k))
        return float(stored / (n * k))

    def take(self, name: str, value: Tensor) -> set[str]:
        """Quantize the weight of a parameter on the device of ``value``.

        Returns the parameters that share this value. Raises `FormatError` for NaN or Inf, naming the parameter.
        """
        layer, _, which = name.rpartition(".")
        scheme = self._plan.schemes[layer]
        if value.dim() == 3:
            transposed = getattr(self._plan.layers[layer], "is_transposed", False)
            weight = quantize_experts(value.transpose(1, 2) if transposed else value, scheme, name)
        else:
            weight = self._quantized(layer, value, scheme, name)
        self._weights[self._owner(name)] = weight
        first = self._plan.ties.get(layer, layer)
        tied = {other for other, group in self._plan.ties.items() if group == first} | {layer}
        done = {f"{other}.{which}" for other in tied} & self.parameters
        self.taken |= done
        return done

    def _quantized(self, layer: str, value: Tensor, scheme: Scheme, name: str) -> QTensor:
        if is_transposed_linear(self._plan.layers[layer]):
            return quantize_transposed(value, scheme, name)
        flat = value.permute(0, 2, 3, 1).flatten(1) if value.dim() == 4 else value  # of a convolution
        return quantize(flat, scheme.weight, scheme.quantizer, name=name)

    def _owner(self, name: str) -> str:
        layer, _, which = name.rpartition(".")
        return f"{self._plan.ties.get(layer, layer)}.{which}"

    def install(self) -> None:
        """Replace the layers whose weights have arrived by their quantized counterparts."""
        stores: dict[str, WeightStore] = {}
        places = self._plan.places()
        for name, scheme in self._plan.schemes.items():
            module = self._plan.layers[name]
            names = [self._owner(own) for own in _weights_of(name, self._plan.layers)]
            if not all(own in self._weights or own in stores for own in names):
                continue
            for own in names:  # popped, so that a neutral weight is freed once it is packed
                stores.setdefault(own, WeightStore(self._weights.pop(own)) if own in self._weights else stores[own])
            experts = expert_weights(module)
            made = _experts(module, name, scheme, stores) if experts else rebuild(module, stores[names[0]], scheme)
            for parent, child in places[id(module)]:
                setattr(parent, child, made)


def _weights_of(layer: str, layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the full names of the parameters of a layer that become quantized."""
    for which in expert_weights(layers[layer]) or ("weight",):
        yield f"{layer}.{which}"


def _experts(module: nn.Module, name: str, scheme: Scheme, stores: Mapping[str, WeightStore]) -> QuantizedExperts:
    def grouped(which: str) -> QuantizedGroupedLinear:
        weight, bias = getattr(module, which), dict(module.named_parameters(recurse=False)).get(f"{which}_bias")
        return QuantizedGroupedLinear(stores[f"{name}.{which}"], scheme, bias, weight.dtype)

    return QuantizedExperts.wrap(module, grouped)
