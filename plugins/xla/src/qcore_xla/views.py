"""Two things that XLA tensors of torch_xla want inside of an op: views that work, and computing what is to be kept.

Outside, torch functionalizes what is done to XLA tensors: views and writes to them become new tensors. Inside an op
that is off, and torch_xla's own views go wrong without an error: a view of a permuted tensor reads other elements, and
a write to a view is lost. Functions that depend on views are therefore functionalized here once more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qcore import QTensor
from qcore.plugin_api import Packed


def whole(function: Callable[..., Any], tensors: Any) -> Any:
    """``function(tensors)``, with views that work; both sides are trees of tensors."""
    first = next(iter(tensors.values())) if isinstance(tensors, dict) else tensors
    if first.device.type != "xla" or torch._is_functional_tensor(first):  # noqa: SLF001
        return function(tensors)
    return torch.func.functionalize(function, remove="mutations_and_views")(tensors)


def computed(tensor: Tensor) -> Tensor:
    """The tensor, for keeping beyond this call.

    torch_xla puts off what it is asked for. When its backend of torch.compile has collected a graph, it drops whatever
    is still pending on the device, and a tensor kept from there would be a hole that crashes whoever reads it.
    """
    if tensor.device.type == "xla":
        sys.modules["torch_xla"]._XLAC._xla_sync_multi([tensor], [], True, False)  # noqa: SLF001 - as torch_xla does
    return tensor


def pack_whole(weight: QTensor, pack: Callable[[QTensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    """``pack(weight)``."""
    packed: dict[str, Tensor] = whole(lambda tensors: pack(_like(weight, tensors)), weight.tensors())
    weight.map(computed)
    return {name: computed(tensor) for name, tensor in packed.items()}


def unpack_whole(packed: Packed, like: tuple[Any, ...], unpack: Callable[[Packed], QTensor]) -> QTensor:
    """``unpack(packed)``; ``like``: shape and format of the weight."""
    tensors = whole(lambda parts: unpack(parts).tensors(), dict(packed))
    return QTensor(tensors["data"], tensors["scale"], tensors.get("zero"), *like)


def _like(weight: QTensor, tensors: dict[str, Tensor]) -> QTensor:
    parts = (tensors["data"], tensors["scale"], tensors.get("zero"))
    return QTensor(*parts, weight.shape, weight.format, weight.quantizer)
