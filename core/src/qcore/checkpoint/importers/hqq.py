"""HQQ, in the form that transformers saves: 4 and 8 bits (2 and 3 stored in 4), groups along the input features.

``W_q`` holds the codes u of ``weight.reshape(-1, group)``; ``scale`` and ``zero`` are floats per group, and

    W = (u - zero) * scale

For 4 bits, the first half of the groups is packed into high nibbles and the second half into low ones; for 2 bits, four
quarters; for 3 bits, ten codes in 30 bits of an int32, tenths of the groups from the highest bits down.
``view_as_float``: the same bytes as floats. Groups may cross rows. HQQ does not write quantized scales to safetensors.
qcore's float zero point is ``(h - zero) * scale``, h the centre of the codes, in float32: exact up to the rounding of
that product.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ...formats import FLOAT_SCALES, ZeroPoint
from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
from ..header import Entry
from .base import ForeignWeight, LayerRefused, Plan, Read, Source, int_format, plan_layers, tensor_name, within_rows
from .packing import plain_int4, signed

_CODES = {2: 4, 3: 10, 4: 2, 8: 1}
"""The number of codes per word, by their bits."""


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
    missing = [
        part for part in ("scale", "zero", "shape", "nbits", "axis") if tensor_name(layer, part) not in source.entries
    ]
    if missing:
        raise LayerRefused(f"it lacks {', '.join(missing)}; quantized scales are not supported")
    bits, axis = (source.integers(tensor_name(layer, part))[0] for part in ("nbits", "axis"))
    shape = source.integers(tensor_name(layer, "shape"))
    if axis != 1:
        raise LayerRefused("its groups run along the output features (axis=0); quantize again with axis=1")
    if bits not in _CODES or len(shape) != 2 or min(shape) < 1:
        raise LayerRefused(f"it has {bits} bits and shape {shape}; qcore reads 2, 3, 4 and 8 bits")
    n, k = shape
    names = {part: tensor_name(layer, part) for part in ("W_q", "scale", "zero")}
    entries = {part: source.entries[name] for part, name in names.items()}
    groups = math.prod(entries["scale"].shape)
    if not groups or n * k % groups:
        raise LayerRefused(f"{groups} scales do not split a weight {(n, k)} into groups")
    size = n * k // groups
    group = math.gcd(size, k)
    word = torch.int32 if bits == 3 else torch.uint8
    rows = -(-groups // _CODES[bits])
    _check(entries, groups, rows * size, word)
    format = int_format(8 if bits == 8 else 4, group if group < k else None, ZeroPoint.FLOAT)
    centre = 1 << (bits - 1)

    def build(read: Read) -> QTensor:
        words = read(names["W_q"]).flatten().view(word).view(rows, size)
        codes = _unpack(words, bits, groups).reshape(n, k)
        scale, zero = (within_rows(read(names[part]).float().flatten(), size, (n, k)) for part in ("scale", "zero"))
        data = signed(codes, 8) if bits == 8 else plain_int4(codes + (8 - centre))
        return QTensor(data, scale, (centre - zero) * scale, (n, k), format)

    described = {name for name in source.entries if name.rpartition(".")[0] == layer} - {tensor_name(layer, "bias")}
    plan.dropped |= described - set(names.values())
    plan.weights.append(
        ForeignWeight(tensor_name(layer, "weight"), (n, k), Scheme(format), tuple(names.values()), build)
    )


def _check(entries: dict[str, Entry], groups: int, words: int, word: torch.dtype) -> None:
    """Raise `LayerRefused` for tensors that do not match these numbers of groups and words."""
    packed, scale, zero = (entries[part] for part in ("W_q", "scale", "zero"))
    floats = (*FLOAT_SCALES, torch.float64)
    if packed.dtype not in (word, *floats):
        raise LayerRefused(f"its W_q is {packed.dtype}; it must be {word} for its number of bits")
    if packed.nbytes != words * word.itemsize:
        raise LayerRefused(f"its W_q has {packed.nbytes} bytes; its shape needs {words * word.itemsize}")
    if math.prod(zero.shape) != groups or zero.dtype not in floats or scale.dtype not in floats:
        raise LayerRefused(f"its scales are {scale.dtype} {scale.shape} and its zeros {zero.dtype} {zero.shape}")


def _unpack(packed: Tensor, bits: int, groups: int) -> Tensor:
    """Unsigned codes, uint8 (groups, group), from the parts of a word: the first groups in its highest bits."""
    if bits == 8:
        return packed
    count, mask = _CODES[bits], (1 << bits) - 1
    parts = [((packed >> (bits * (count - 1 - part))) & mask).to(torch.uint8) for part in range(count)]
    return torch.cat(parts)[:groups]
