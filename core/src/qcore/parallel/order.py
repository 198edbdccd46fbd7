"""`fold_order_`: columns in the order of their groups (act-order), folded into the layers that produce them."""

# ruff: noqa: SLF001 - reads the stores of quantized layers

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..formats.bits import raw
from ..nn.linear import QuantizedLinear
from ..resolving.binding import WeightStore
from ..weights.qtensor import QTensor


def fold_order_(producers: Sequence[nn.Module], consumer: QuantizedLinear) -> None:
    """Permute the output features of ``producers`` by the order of ``consumer``'s weight, which then has none. Exact.

    ``producers``: the linear layers, quantized or float, whose results, combined element by element (gate and up of an
    MLP), are the only input of ``consumer``, and which nothing else reads. In place. Nothing happens if the weight has
    no order. Raises `UnsupportedError` for other kinds of layers and other numbers of features.
    """
    weight = consumer._store.neutral()
    if weight.order is None:
        return
    for layer in producers:
        rows = layer.out_features if isinstance(layer, (nn.Linear, QuantizedLinear)) else None
        if rows != weight.shape[1] or (isinstance(layer, QuantizedLinear) and len(layer._store.users) > 1):
            raise UnsupportedError(
                f"cannot fold an order of {weight.shape[1]} features into a {type(layer).__name__} of {rows}.\n"
                f"Give linear layers with a weight of their own that produce the input of the consumer."
            )
    order = weight.order.long()
    for layer in producers:
        _permute(layer, order)
    _replace(consumer, weight.derived(order=None))


def _permute(layer: nn.Module, order: Tensor) -> None:
    if isinstance(layer, QuantizedLinear):
        _replace(layer, permuted_rows(layer._store.neutral(), order))
    else:
        assert isinstance(layer, nn.Linear)
        with torch.no_grad():
            layer.weight.copy_(layer.weight[order])
    bias: Tensor | None = layer.bias
    if bias is not None:
        with torch.no_grad():
            bias.copy_(bias[order])


def permuted_rows(weight: QTensor, order: Tensor) -> QTensor:
    """The weight ``(N, K)`` with its output features in ``order``."""

    def pick(values: Tensor | None) -> Tensor | None:
        return None if values is None else raw(values).index_select(-1, order).view(values.dtype)

    data = weight.encode(weight.codes().index_select(0, order))
    return weight.derived(data=data, scale=pick(weight.scale), zero=pick(weight.zero))


def _replace(layer: QuantizedLinear, weight: QTensor) -> None:
    """Give a layer another weight with or without an order, under the settings that it was bound with."""
    layer._store.users.discard(layer)
    layer._store = WeightStore(weight)
    layer._store.users.add(layer)
    layer.scheme = replace(layer.scheme, weight=weight.format)
    layer._bind_primary(layer._bind_settings.settings)
