"""gpt-oss: experts in MXFP4.

``P_blocks`` uint8 (E, N, K / 32, 16), low nibble first, and ``P_scales`` uint8 (E, N, K / 32), e8m0, for
``P = ...mlp.experts.gate_up_proj`` and ``...down_proj``:

    W[e, n, k] = e2m1(blocks[e, n, k]) * 2 ** (scales[e, n, k // 32] - 127)

The model itself holds the parameter ``P`` transposed, (E, K, N), which `QuantizedExperts` handles.
"""

from __future__ import annotations

from functools import partial

import torch

from ...formats import Format
from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
from .base import ForeignWeight, LayerRefused, Plan, Read, Source, plan_layers

_FORMAT = "fp4-g32-e8m0"
_BYTES = 16
"""The bytes of one block of 32 weights."""


class MXFP4:
    """The importer of gpt-oss."""

    name = "mxfp4"

    def recognizes(self, source: Source) -> bool:
        """By ``quant_method``."""
        return source.method == "mxfp4"

    def plan(self, source: Source) -> Plan:
        """Every parameter with blocks and scales."""
        names = (name.removesuffix("_blocks") for name in source.entries if name.endswith("_blocks"))
        return plan_layers(names, partial(_plan_parameter, source))


def _plan_parameter(source: Source, parameter: str, plan: Plan) -> None:
    names = (f"{parameter}_blocks", f"{parameter}_scales")
    if names[1] not in source.entries:
        raise LayerRefused("it has no scales")
    blocks, scales = (source.entries[name] for name in names)
    if len(blocks.shape) != 4 or blocks.shape[3] != _BYTES or scales.shape != blocks.shape[:3]:
        raise LayerRefused(f"its blocks and scales have shapes {blocks.shape} and {scales.shape}")
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise LayerRefused(f"its blocks and scales are {blocks.dtype} and {scales.dtype}; they must be uint8")
    e, n, groups, _ = blocks.shape
    shape, format = (e, n, 2 * _BYTES * groups), Format.parse(_FORMAT)

    def build(read: Read) -> QTensor:
        scale = read(names[1]).transpose(1, 2).contiguous()
        return QTensor(read(names[0]).flatten(2), scale, None, shape, format)

    plan.weights.append(ForeignWeight(f"{parameter}.weight", shape, Scheme(format), names, build))
