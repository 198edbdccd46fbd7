"""Quantized layers as steps: whether a layer runs on a kernel of this plugin, and slots for its packed tensors."""

from __future__ import annotations

from typing import Any

import torch

from qcore import ScaleType, ZeroPoint
from qcore.plugin_api import bound_layer, layers_of

from ..embedding import CpuEmbedding
from ..linear import CpuLinear
from ..ops import SCALE_TYPES
from .lowering import LayerSlots, Lowering
from .memory import Value
from .steps import NOWHERE, Embedding, Place

_PACKED = {
    "data": "codes",
    "scale": "scale",
    "zero": "zero",
    "sums": "sums",
    "table": "table",
    "global_scale": "factor",
}
"""The fields of a step for packed tensors."""


def layer_of(
    marker: Any, contract: str, scheme: str, x_dtype: torch.dtype, out_dtype: torch.dtype
) -> tuple[CpuLinear | CpuEmbedding, Any] | None:
    """Kernel and packed tensors of the layer that owns a weight; None if it runs on another kernel or needs more."""
    bound = bound_layer(layers_of(marker, contract, scheme)[0], None if contract == "embedding" else x_dtype)
    kernel = bound.kernel
    if not isinstance(kernel, (CpuLinear, CpuEmbedding)) or kernel.out_dtype != out_dtype or kernel.form is None:
        return None
    return kernel, bound.packed


def layer_places(
    low: Lowering, position: int, contract: str, scheme: str, x_dtype: torch.dtype, out_dtype: torch.dtype
) -> tuple[Any, Any, dict[str, Place]] | None:
    """Kernel, packed tensors, and their places in a step by the names of its fields; None as `layer_of`."""
    layer = layer_of(low.part.inputs[position].value, contract, scheme, x_dtype, out_dtype)
    if layer is None:
        return None
    kernel, packed = layer
    slots = {name: low.slot() for name in _PACKED if name in packed}
    assert kernel.form is not None
    scale_dtype = packed["scale"].dtype
    made_for = (contract, scheme, x_dtype, out_dtype, kernel.form, scale_dtype)
    low.done.layers.append(LayerSlots(position, *made_for, slots))
    places = dict.fromkeys(_PACKED.values(), NOWHERE) | {_PACKED[name]: Place(at, 0, 0) for name, at in slots.items()}
    places["scale"] = Place(slots["scale"], SCALE_TYPES[scale_dtype], 0)
    return kernel, packed, places


def embedding_step(kernel: CpuEmbedding, indices: Value, packed: Any, places: dict[str, Place], y: Value) -> Embedding:
    """The step that looks up rows of a table."""
    step = Embedding(indices.place, *(places[name] for name in ("codes", "scale", "zero", "table", "factor")), y.place)
    step.count, step.v, step.k = indices.meta.numel(), kernel.n, kernel.k
    step.group, step.row_bytes = kernel.format.group(kernel.k), packed["data"].shape[1]
    step.element, step.float_zeros = int(kernel.kind), kernel.format.zero is ZeroPoint.FLOAT
    step.divides = kernel.format.scale is ScaleType.E4M3D
    return step
