"""compressed-tensors, for vLLM and llmcompressor: a group of settings per format, with its layers by name.

====================  ================================================================================================
pack-quantized        int4, int8: ``weight_packed`` int32 (N, K * bits / 32), unsigned codes; ``weight_scale`` (N, G);
                      ``weight_zero_point`` int32 (ceil(N * bits / 32), G); ``weight_shape`` int64 (2,)
int-quantized         int8 with dynamic int8 activations: ``weight`` int8 (N, K); ``weight_scale`` (N, G)
float-quantized       fp8: ``weight`` e4m3fn (N, K); ``weight_scale`` (N, G)
nvfp4-pack-quantized  fp4-g16-e4m3d: ``weight_packed`` uint8 (N, K / 2); ``weight_scale`` e4m3fn (N, G);
                      ``weight_global_scale`` float32 (1,)
mxfp4-pack-quantized  fp4-g32-e8m0: ``weight_packed``; ``weight_scale`` uint8 (N, G)
====================  ================================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...formats import PLAIN, Format, ScaleType, ZeroPoint
from ...weights.activations import DynamicFP8, DynamicInt8
from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
from ..importers.base import LayerRefused
from .base import (
    Layer,
    Written,
    check_float_activation,
    check_integer_groups,
    check_multiple,
    offset_bytes,
    pack_words,
    unsigned_zeros,
)

_FP4 = {ScaleType.E4M3D: (16, "nvfp4-pack-quantized"), ScaleType.E8M0: (32, "mxfp4-pack-quantized")}


class CompressedTensorsExporter:
    """Writes the formats in the table above; layers of one checkpoint may have different ones."""

    scales: torch.dtype | None = None

    def __init__(self) -> None:
        self._groups: dict[Scheme, list[Layer]] = {}

    def add(self, layer: Layer) -> Written:
        """Describe the tensors in the table above."""
        kind = _kind(layer)
        written = {"pack-quantized": _packed, "int-quantized": _int8, "float-quantized": _fp8}.get(kind, _fp4)(layer)
        self._groups.setdefault(layer.record.scheme, []).append(layer)
        return written

    def settings(self, float_layers: Sequence[str]) -> dict[str, Any]:
        """In the form that llmcompressor writes."""
        groups = {
            f"group_{index}": {
                "targets": [layer.name for layer in layers],
                "weights": _weights(scheme.weight),
                "input_activations": _activations(scheme),
                "output_activations": None,
                "format": _kind(layers[0]),
            }
            for index, (scheme, layers) in enumerate(self._groups.items())
        }
        kinds = {group["format"] for group in groups.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(float_layers),
            "kv_cache_scheme": None,
        }


def _kind(layer: Layer) -> str:
    """The name of the layer's format. Raises `LayerRefused`."""
    format, activation = layer.record.format, layer.record.scheme.activation
    if len(layer.record.shape) != 2 or layer.record.order or layer.record.scheme.output is not None:
        raise LayerRefused("it has several experts, an order of columns or a quantized output")
    if format.dtype == "fp4" and activation is None and _FP4.get(format.scale, (0,))[0] == format.group_size:
        return _FP4[format.scale][1]
    plain_scale = format.scale is ScaleType.FLOAT and format.zero is ZeroPoint.NONE
    if format.dtype == "fp8" and plain_scale and activation in (None, DynamicFP8()):
        return "float-quantized"
    if format.dtype == "int8" and plain_scale and activation == DynamicInt8():
        return "int-quantized"
    if format.dtype in ("int4", "int8"):
        check_float_activation(layer)
        return "pack-quantized"
    raise LayerRefused(f"its scheme is {layer.record.scheme}")


def _packed(layer: Layer) -> Written:
    check_integer_groups(layer, (4, 8))
    bits = layer.record.format.bits
    check_multiple(layer, 1, 32 // bits)
    zero = layer.record.format.zero is ZeroPoint.INT
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "weight_packed": (torch.int32, (layer.n, layer.k * bits // 32)),
        "weight_scale": (layer.scale_dtype, (layer.n, layer.groups)),
        "weight_shape": (torch.int64, (2,)),
    }
    if zero:
        tensors["weight_zero_point"] = (torch.int32, (-(-layer.n * bits // 32), layer.groups))

    def pack(weight: QTensor) -> list[Tensor]:
        values = [offset_bytes(weight).view(torch.int32), weight.scale.t(), torch.tensor(weight.shape)]
        return [*values, pack_words(unsigned_zeros(weight, bits), bits).t()] if zero else values

    return Written(layer.specs(**tensors), pack)


def _int8(layer: Layer) -> Written:
    check_integer_groups(layer, (8,))
    return _whole_bytes(layer, torch.int8)


def _fp8(layer: Layer) -> Written:
    return _whole_bytes(layer, torch.float8_e4m3fn)


def _whole_bytes(layer: Layer, dtype: torch.dtype) -> Written:
    specs = layer.specs(weight=(dtype, (layer.n, layer.k)), weight_scale=(layer.scale_dtype, (layer.n, layer.groups)))
    return Written(specs, lambda weight: [weight.convert(PLAIN).data.view(dtype), weight.scale.t()])


def _fp4(layer: Layer) -> Written:
    check_multiple(layer, 1, _FP4[layer.record.format.scale][0])
    has_global = layer.record.format.scale.has_global
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "weight_packed": (torch.uint8, (layer.n, layer.k // 2)),
        "weight_scale": (layer.record.format.scale.dtypes[0], (layer.n, layer.groups)),
    }
    if has_global:
        tensors["weight_global_scale"] = (torch.float32, (1,))

    def pack(weight: QTensor) -> list[Tensor]:
        values = [weight.convert(PLAIN).data, weight.scale.t()]
        return [*values, weight.global_scale.view(1)] if weight.global_scale is not None else values

    return Written(layer.specs(**tensors), pack)


def _weights(format: Format) -> dict[str, Any]:
    strategy = "channel" if format.group_size is None else "group"
    return {
        "num_bits": format.element.bits,
        "type": "int" if format.element.is_integer else "float",
        "strategy": "tensor_group" if format.scale.has_global else strategy,
        "group_size": format.group_size,
        "symmetric": format.zero is ZeroPoint.NONE,
        "dynamic": False,
    }


def _activations(scheme: Scheme) -> dict[str, Any] | None:
    if scheme.activation is None:
        return None
    kind = "int" if isinstance(scheme.activation, DynamicInt8) else "float"
    return {"num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True}
