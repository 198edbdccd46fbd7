"""HQQ, as transformers saves it: 4 and 8 bits (2 and 3 in a container of 4), groups along the input features.

``W_q`` holds the codes u of ``weight.reshape(-1, group)``; ``scale`` and ``zero`` are floats per group, and

    W = (u - zero) * scale

4 bits pack the first half of the groups into high nibbles, the second half into low ones; 2 bits four quarters; 3 bits
ten codes in 30 bits of an int32, tenths of the groups from the highest bits down. qcore's float zero point is
``(h - zero) * scale``, h the centre of the codes, in float32: exact up to the rounding of that product.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...formats import ZeroPoint
from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
from .base import ForeignWeight, LayerRefused, Plan, Read, Source, int_format, plan_layers
from .packing import plain_int4, signed

_BITS = (2, 3, 4, 8)
_MOST = 64
"""Elements of a tensor that describes a layer at most."""


class HQQ:
    """The importer of HQQ's checkpoints."""

    name = "hqq"

    def recognizes(self, source: Source) -> bool:
        """By ``quant_method``."""
        return source.method == "hqq"

    def plan(self, source: Source) -> Plan:
        """Every layer with ``W_q``."""
        return plan_layers(source.layers("W_q"), partial(_plan_layer, source))


def _plan_layer(source: Source, layer: str, plan: Plan) -> None:
    missing = [part for part in ("scale", "zero", "shape", "nbits", "axis") if f"{layer}.{part}" not in source.entries]
    if missing:
        raise LayerRefused(f"it lacks {', '.join(missing)}; scales that are quantized themselves are not read")
    bits, axis = (_numbers(source, f"{layer}.{part}")[0] for part in ("nbits", "axis"))
    shape = _numbers(source, f"{layer}.shape")
    if axis != 1:
        raise LayerRefused("its groups run along the output features (axis=0); quantize again with axis=1")
    if bits not in _BITS or len(shape) != 2 or min(shape) < 1:
        raise LayerRefused(f"it has {bits} bits and shape {shape}; qcore reads 2, 3, 4 and 8 bits")
    n, k = shape
    names = {part: f"{layer}.{part}" for part in ("W_q", "scale", "zero")}
    groups = source.entries[names["scale"]].shape[0] if source.entries[names["scale"]].shape else 0
    if groups < n or groups % n or k % (groups // n):
        raise LayerRefused(f"{groups} scales do not share a weight {(n, k)} into groups of a row")
    per_row = groups // n
    format = int_format(8 if bits == 8 else 4, k // per_row if per_row > 1 else None, ZeroPoint.FLOAT)
    centre = 1 << (bits - 1)

    def build(read: Read) -> QTensor:
        codes = _unpack(read(names["W_q"]), bits, groups).reshape(n, k)
        scale, zero = (read(names[part]).float().reshape(n, per_row).t() for part in ("scale", "zero"))
        data = signed(codes, 8) if bits == 8 else plain_int4(codes + (8 - centre))
        return QTensor(data, scale, (centre - zero) * scale, (n, k), format)

    described = {name for name in source.entries if name.rpartition(".")[0] == layer} - {f"{layer}.bias"}
    plan.dropped |= described - set(names.values())
    plan.weights.append(ForeignWeight(f"{layer}.weight", (n, k), Scheme(format), tuple(names.values()), build))


def _numbers(source: Source, name: str) -> list[int]:
    """The integers of a small tensor."""
    entry = source.entries[name]
    if not 0 < entry.nbytes <= _MOST or entry.dtype.is_floating_point or entry.dtype.is_complex:
        raise LayerRefused(f"its {name.rpartition('.')[2]} is {entry.dtype} of shape {entry.shape}")
    return [int(value) for value in source.read(name).flatten().tolist()]


def _unpack(packed: Tensor, bits: int, groups: int) -> Tensor:
    """Unsigned codes, uint8 (groups, group), from the parts of a word: the first groups in its highest bits."""
    if bits == 8:
        return packed
    count, mask = {4: 2, 2: 4, 3: 10}[bits], (1 << bits) - 1
    parts = [((packed >> (bits * (count - 1 - part))) & mask).to(torch.uint8) for part in range(count)]
    return torch.cat(parts)[:groups]
