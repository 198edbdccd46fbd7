"""``model.dequantize()`` of transformers: the float model with the weights that the quantized one computes with."""

# ruff: noqa: SLF001 - reads the stores of quantized layers, and torch's tables

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..errors import UnsupportedError
from ..nn import QuantizedConv2d, QuantizedEmbedding, QuantizedLinear
from ..nn.base import QuantizedModule, adopt
from ..nn.experts import QuantizedExperts
from ..nn.neutral import NeutralLinear
from ..nn.scaled_embedding import QuantizedScaledEmbedding
from .placing import forget_place

_KINDS = (QuantizedModule, QuantizedExperts, NeutralLinear)


def dequantize_(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace each quantized layer by the float layer that it was made from. Tied weights stay tied.

    ``dtype``: of the weights, default the dtype that each layer computes in; other parameters of that dtype are cast to
    ``dtype``, too. Raises `UnsupportedError` for weights that are offloaded or cut, before anything is changed.
    """
    _check(model)
    if dtype is not None:
        own = {layer.weight.dtype for layer in model.modules() if isinstance(layer, QuantizedModule)}
        own |= {layer.compute_dtype for layer in model.modules() if isinstance(layer, NeutralLinear)}
        for parameter in model.parameters():
            if parameter.dtype in own:
                parameter.data = parameter.data.to(dtype)
    run = _Dequantizing(dtype)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, _KINDS) and not isinstance(parent, QuantizedExperts):
                setattr(parent, name, run.layer(child))
    forget_place(model)


def _check(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "ranks"):
            raise UnsupportedError(f"dequantize: this rank holds a part of {name!r}.\nLoad the model on one device.")
        if isinstance(module, QuantizedModule) and module._store.device.type == "meta":
            raise UnsupportedError(f"dequantize: {name!r} is offloaded.\nLoad the model without device_map.")


class _Dequantizing:
    """One run; ``layers``: the float layer of each quantized one, ``weights``: the weight of each store, by id."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.layers: dict[int, tuple[nn.Module, nn.Module]] = {}  # both, so that no id is used again
        self.weights: dict[int, nn.Parameter] = {}

    def layer(self, layer: nn.Module) -> nn.Module:
        """The float layer, one for each quantized layer, also if that is in several places."""
        if id(layer) not in self.layers:
            made = self._experts(layer) if isinstance(layer, QuantizedExperts) else self._single(layer)
            adopt(made, layer)
            self.layers[id(layer)] = layer, made
        return self.layers[id(layer)][1]

    def _single(self, layer: Any) -> Any:
        found = layer.packed() if isinstance(layer, NeutralLinear) else layer
        made = next(make for kind, make in _FLOAT.items() if isinstance(found, kind))(found)
        if id(found._store) not in self.weights:
            self.weights[id(found._store)] = self._weight(found, isinstance(made, Conv1D))
        made.weight = self.weights[id(found._store)]
        if found.bias is not None:
            made.bias = found.bias
        return made

    def _weight(self, layer: QuantizedModule, transposed: bool) -> nn.Parameter:
        dense = layer.weight.dequantize(self.dtype or layer._dtype)
        if isinstance(layer, QuantizedConv2d):
            dense = dense.reshape(len(dense), *layer.kernel_size, -1).permute(0, 3, 1, 2)
        return nn.Parameter((dense.transpose(-1, -2) if transposed else dense).contiguous())

    def _experts(self, layer: QuantizedExperts) -> nn.Module:
        made: nn.Module = layer.gate
        for name, projection in layer.projections().items():
            setattr(made, name, self._weight(projection, bool(getattr(made, "is_transposed", False))))
            if projection.bias is not None:
                setattr(made, f"{name}_bias", projection.bias)
        return made


def _linear(layer: Any) -> Any:
    if layer.is_transposed:
        with torch.device("meta"):
            return Conv1D(layer.out_features, layer.in_features)
    return nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")


def _embedding(layer: Any) -> Any:
    if isinstance(layer, QuantizedScaledEmbedding):
        return layer.empty_float()
    return nn.Embedding(layer.num_embeddings, layer.embedding_dim, layer.padding_idx, device="meta")


def _conv2d(layer: Any) -> Any:
    left, right, top, bottom = layer._outer_padding or (0, 0, 0, 0)
    same = (left, top) != (right, bottom)
    padding: Any = "same" if same else (top, left) if layer._outer_padding else layer.padding
    return nn.Conv2d(
        layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, padding, layer.dilation, layer.groups,
        layer.bias is not None, layer.padding_mode, device="meta",
    )  # fmt: skip


_FLOAT: dict[type[nn.Module], Callable[[Any], Any]] = {
    QuantizedLinear: _linear,
    QuantizedEmbedding: _embedding,
    QuantizedConv2d: _conv2d,
}
