"""GPTQ for gptqmodel, vLLM and optimum. The bytes are described in `importers.gptq`.

Version 1, which every tool reads, stores zero points minus one. There is nothing to store for a zero point of 0 that
all tools read in the same way: those that add the one to whole words need a borrow from the neighbour, those that add
it to each field do not, and vLLM reads 16. A checkpoint with such a zero point is written in version 2, which stores
them as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...formats import ZeroPoint
from ...weights.qtensor import QTensor
from ..importers.gptq import ONES
from .base import (
    Layer,
    Written,
    check_float_activation,
    check_integer_groups,
    check_multiple,
    check_one_format,
    offset_bytes,
    pack_words,
    unsigned_zeros,
)


class GPTQExporter:
    """Writes int4 and int8 with or without zero points, per group or channel, with or without an order."""

    scales: torch.dtype | None = torch.float16

    def __init__(self) -> None:
        self._layers: list[Layer] = []
        self._version = 1

    def add(self, layer: Layer) -> Written:
        """``qweight`` int32 (K * bits / 32, N), ``qzeros``, ``scales`` float16 (G, N), ``g_idx`` int32 (K,)."""
        check_float_activation(layer)
        check_integer_groups(layer, (4, 8), order=True)
        bits = layer.record.format.bits
        per_word = 32 // bits
        check_multiple(layer, per_word, per_word)
        check_one_format(self._layers, layer, _common_settings, "GPTQ has one format for all layers")
        self._layers.append(layer)
        if _has_lowest_zero(layer):
            self._version = 2
        size = layer.record.format.group(layer.k)
        specs = layer.specs(
            qweight=(torch.int32, (layer.k // per_word, layer.n)),
            qzeros=(torch.int32, (layer.groups, layer.n // per_word)),
            scales=(torch.float16, (layer.groups, layer.n)),
            g_idx=(torch.int32, (layer.k,)),
        )
        # The version is known once all layers are added.
        return Written(specs, lambda weight: _pack(weight, bits, size, 0 if self._version == 2 else ONES[bits][0]))

    def settings(self, float_layers: Sequence[str]) -> dict[str, Any]:
        """In the form that gptqmodel writes; layers that stay float are named in ``dynamic``."""
        bits, size = _common_settings(self._layers[0])
        found = {
            "quant_method": "gptq",
            "checkpoint_format": "gptq" if self._version == 1 else "gptq_v2",
            "bits": bits,
            "group_size": size,
            "desc_act": any(layer.record.order for layer in self._layers),
            "sym": all(layer.record.format.zero is ZeroPoint.NONE for layer in self._layers),
            "pack_dtype": "int32",
            "lm_head": any(layer.name.rpartition(".")[2] == "lm_head" for layer in self._layers),
        }
        excluded: dict[str, dict[str, int]] = {f"-:^{re.escape(name)}$": {} for name in float_layers}
        return {**found, "dynamic": excluded} if excluded else found


def _common_settings(layer: Layer) -> tuple[int, int]:
    return layer.record.format.bits, layer.record.format.group_size or -1


def _has_lowest_zero(layer: Layer) -> bool:
    """Whether a zero point is 0 as an unsigned code."""
    zero = layer.zero()
    return zero is not None and bool((zero == layer.record.format.code_range[0]).any())


def _pack(weight: QTensor, bits: int, size: int, ones: int) -> list[Tensor]:
    """``ones``: subtracted from the words of zero points."""
    n, k = weight.shape
    # Four bytes along K form one word of one output.
    words = offset_bytes(weight).view(n, -1, 4).transpose(0, 1).contiguous().view(torch.int32).squeeze(-1)
    zeros = pack_words(unsigned_zeros(weight, bits), bits) - ones
    groups = (torch.arange(k, dtype=torch.int32) // size).to(torch.int32)
    if weight.order is not None:
        g_idx = torch.empty_like(groups)
        g_idx[weight.order.long()] = groups
        groups = g_idx
    return [words, zeros, weight.scale, groups]
