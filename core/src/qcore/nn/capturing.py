"""Linear layers in traces for graph backends: their nodes, read from as few attributes as possible.

Dynamo guards on every value and every method that a trace reads, and evaluates all guards at each call of the compiled
model. A model has hundreds of linear layers; through the methods of the base class each adds 23 more (torch 2.13).
"""

# ruff: noqa: SLF001 - part of the layers' base class, in a module of its own

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..functional.autograd import needs_derivatives
from ..functional.checks import check_bias, check_dense, check_last_dimension
from .base import FLOATS
from .graph_ops import captures_layers, emit

if TYPE_CHECKING:
    from .linear import QuantizedLinear
    from .siblings import Siblings


def captured_linear(layer: QuantizedLinear, x: Tensor, group: Siblings | None = None) -> Tensor | None:
    """Emit the node of a linear layer, or return None if its call needs more: no node, gradients, autocast, codes in x.

    ``group``: the siblings that share the layer's packed weight; the node is that of all. Raises `FormatError` as the
    layer does.
    """
    # Constants of the trace first: what is read after them is guarded.
    if not captures_layers() or layer._node is None:
        return None
    call, sizes, marker, device, autocasts, out_dtype = layer._node
    check_dense("x", x, torch.device(device))
    if x.dtype not in FLOATS or (autocasts and torch.is_autocast_enabled(x.device.type)):
        return None
    bias = layer.bias if group is None else group.bias()
    if needs_derivatives(x, bias):
        return None
    check_last_dimension(x, sizes[1], "in_features")
    check_bias(bias, sizes[0], torch.device(device))
    weight: Any = layer._buffers[marker]
    return emit(call, x, weight, bias, x.dtype if out_dtype is None else getattr(torch, out_dtype), {})
