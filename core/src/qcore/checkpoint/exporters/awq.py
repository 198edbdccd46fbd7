"""AWQ in the version gemm, for vLLM and transformers. The bytes are described in `importers.awq`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...formats import PLAIN
from ...weights.qtensor import QTensor
from ..importers.awq import HIGH_OUTPUTS, LOW_OUTPUTS
from ..importers.packing import SIGN_OF_NIBBLES
from .base import (
    Layer,
    Written,
    check_float_activation,
    check_integer_groups,
    check_multiple,
    check_one_format,
    unsigned_zeros,
)


class AWQExporter:
    """Writes int4 with or without zero points, per group or channel."""

    scales: torch.dtype | None = torch.float16

    def __init__(self) -> None:
        self._layers: list[Layer] = []

    def add(self, layer: Layer) -> Written:
        """``qweight`` int32 (K, N / 8), ``qzeros`` int32 (G, N / 8), ``scales`` float16 (G, N)."""
        check_float_activation(layer)
        check_integer_groups(layer, (4,))
        check_multiple(layer, 8, 2)
        rule = "AWQ has one group size for all layers"
        check_one_format(self._layers, layer, lambda one: one.record.format.group_size, rule)
        self._layers.append(layer)
        specs = layer.specs(
            qweight=(torch.int32, (layer.k, layer.n // 8)),
            qzeros=(torch.int32, (layer.groups, layer.n // 8)),
            scales=(torch.float16, (layer.groups, layer.n)),
        )
        return Written(specs, _pack)

    def settings(self, float_layers: Sequence[str]) -> dict[str, Any]:
        """In the form that autoawq writes."""
        size = self._layers[0].record.format.group_size or -1
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": size,
            "zero_point": True,
            "modules_to_not_convert": list(float_layers) or None,
        }


def _pack(weight: QTensor) -> list[Tensor]:
    n, k = weight.shape
    # A byte of PLAIN holds the codes of an even column and of the odd one after it.
    data = (weight.convert(PLAIN).data ^ SIGN_OF_NIBBLES).view(n // 8, 8, k // 2)
    low, high = data[:, LOW_OUTPUTS].permute(2, 0, 1), data[:, HIGH_OUTPUTS].permute(2, 0, 1)
    words = torch.empty(k // 2, 2, n // 8, 4, dtype=torch.uint8)
    words[:, 0] = (low & 15) | (high << 4)
    words[:, 1] = (low >> 4) | (high & 0xF0)
    return [words.view(k, n // 2).view(torch.int32), _pack_rows(unsigned_zeros(weight, 4)), weight.scale]


def _pack_rows(codes: Tensor) -> Tensor:
    """Unsigned codes, uint8 (R, 8 C), as int32 (R, C)."""
    parts = codes.view(codes.shape[0], -1, 8)
    raw = parts[..., LOW_OUTPUTS] | (parts[..., HIGH_OUTPUTS] << 4)
    return raw.flatten(1).contiguous().view(torch.int32)
