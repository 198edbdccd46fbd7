"""Two workarounds for torch_xla's tensors inside an op: correct views, and computing tensors before they are kept.

Outside ops, torch functionalizes XLA tensors: views and writes to them become new tensors. Inside an op, this is off,
and torch_xla's own views are silently wrong: a view of a permuted tensor reads other elements, and a write to a view is
lost. Functions that depend on views are therefore functionalized here again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qcore import Format, QTensor
from qcore.plugin_api import Packed


def whole(function: Callable[..., Any], tensors: Any) -> Any:
    """``function(tensors)``, with correct views; arguments and results are trees of tensors."""
    first = next(iter(tensors.values())) if isinstance(tensors, dict) else tensors
    if first.device.type != "xla" or torch._is_functional_tensor(first):  # noqa: SLF001
        return function(tensors)
    return torch.func.functionalize(function, remove="mutations_and_views")(tensors)


def computed(tensor: Tensor) -> Tensor:
    """The tensor, computed now, so that it can be kept beyond this call.

    torch_xla executes lazily. After its torch.compile backend has collected a graph, it drops all operations that are
    still pending on the device, and reading a tensor kept from there would crash.
    """
    if tensor.device.type == "xla":
        sys.modules["torch_xla"]._XLAC._xla_sync_multi([tensor], [], True, False)  # noqa: SLF001 - as torch_xla does
    return tensor


def pack_whole(weight: QTensor, pack: Callable[[QTensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    """``pack(weight)``."""
    packed: dict[str, Tensor] = whole(lambda tensors: pack(_like(weight, tensors)), weight.tensors())
    weight.map(computed)
    return {name: computed(tensor) for name, tensor in packed.items()}


def unpack_whole(
    packed: Packed, shape: tuple[int, ...], format: Format, unpack: Callable[[Packed], QTensor]
) -> QTensor:
    """``unpack(packed)``, of this shape and format."""
    tensors = whole(lambda parts: unpack(parts).tensors(), dict(packed))
    return QTensor.from_tensors(tensors, shape, format)


def _like(weight: QTensor, tensors: dict[str, Tensor]) -> QTensor:
    return QTensor.from_tensors(tensors, weight.shape, weight.format, weight.quantizer)
