"""torchao's safetensors: their metadata holds, per weight, the class of its tensor and its attributes as JSON.

``LAYER._weight_qdata``, ``._weight_scale`` and ``._weight_zero_point`` (a prefix on the last part of the name):

- ``Int8Tensor``: int8 (N, K), scale (N, 1) or (N, G), zero points int8 or none: ``W = (q - z) * s``;
- ``IntxUnpackedToInt8Tensor``: codes of 2 to 8 bits in int8, otherwise the same;
- ``Float8Tensor``: e4m3fn (N, K), scale (N, 1), (1, 1) or in groups or blocks;
- ``Int4Tensor``: uint8 (N, K / 2), low nibble first, scale and zero point (G, N), ``W = (q - 8) * s + z`` (read in its
  source; its writer needs a GPU).
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch

from ...errors import quoted
from ...formats import Format, ZeroPoint
from ...weights.activations import Activation, DynamicFP8, DynamicInt8
from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
from .base import ForeignWeight, LayerRefused, Plan, Read, Source, group_size, int_format, plan_layers
from .fp8 import scale_blocks, spread_scale
from .packing import SIGN_OF_NIBBLES

_MOST_TEXT = 1 << 16
_PARTS = ("qdata", "scale", "zero_point", "act_pre_scale")
_PLAIN_TYPES = ("Tensor", "Parameter")


class TorchAO:
    """The importer of torchao's checkpoints."""

    name = "torchao"

    def recognizes(self, source: Source) -> bool:
        """By the metadata of the files: without it, the directory was written by pickle and is not read."""
        return source.method == "torchao" or any(_described(source, name) for name in source.metadata)

    def plan(self, source: Source) -> Plan:
        """Every weight whose class the metadata names."""
        names = [name for name in source.metadata if _described(source, name)]
        return plan_layers(names, partial(_plan_weight, source))


def _described(source: Source, name: str) -> dict[str, Any]:
    """The description of a quantized weight, empty for other metadata."""
    layer, _, attribute = name.rpartition(".")
    if f"{layer}._{attribute}_qdata".lstrip(".") not in source.entries:
        return {}
    text = source.metadata[name]
    try:
        found = json.loads(text) if len(text) <= _MOST_TEXT else None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and found.get("_type") not in _PLAIN_TYPES else {}


def _plan_weight(source: Source, name: str, plan: Plan) -> None:
    layer, _, attribute = name.rpartition(".")
    described = _described(source, name)
    kind, data = described.get("_type"), described.get("_data")
    start = f"{layer}._{attribute}_".lstrip(".")
    names = {part: f"{start}{part}" for part in _PARTS if f"{start}{part}" in source.entries}
    if not isinstance(data, dict) or "scale" not in names:
        raise LayerRefused("its metadata or its scale is missing")
    if "act_pre_scale" in names:
        raise LayerRefused("its inputs are scaled before the product (act_pre_scale), which qcore does not do")
    if len(source.entries[names["qdata"]].shape) != 2:
        raise LayerRefused(f"its codes have shape {source.entries[names['qdata']].shape}")
    plans = {
        "Int8Tensor": _plan_int,
        "IntxUnpackedToInt8Tensor": _plan_int,
        "Float8Tensor": _plan_float8,
        "Int4Tensor": _plan_int4,
    }
    plan_one = plans.get(kind) if isinstance(kind, str) else None
    if plan_one is None:
        raise LayerRefused(f"its class is {quoted(kind)}; qcore reads {', '.join(plans)}")
    plan.weights.append(plan_one(source, name, names, data))


def _plan_int(source: Source, name: str, names: dict[str, str], data: dict[str, Any]) -> ForeignWeight:
    codes, scale = source.entries[names["qdata"]], source.entries[names["scale"]]
    n, k = codes.shape
    groups = _columns(scale.shape, n)
    if codes.dtype != torch.int8:
        raise LayerRefused(f"its codes are {codes.dtype}")
    bits = _bits(data)
    zero = names.get("zero_point")
    if zero is not None and source.entries[zero].shape != scale.shape:
        raise LayerRefused(f"its zero points have shape {source.entries[zero].shape}")
    points = None if zero is None else source.read(zero)
    symmetric = points is None or not bool(points.any())
    format = int_format(
        8 if bits == 8 else 4,
        _group(data, k, groups),
        ZeroPoint.NONE if symmetric else ZeroPoint.INT,
    )

    def build(read: Read) -> QTensor:
        found = None if symmetric or zero is None else read(zero).reshape(n, groups).t().to(torch.int8)
        own = read(names["scale"]).reshape(n, groups).t()
        return QTensor.from_codes(read(names["qdata"]), own.contiguous(), found, format)

    scheme = Scheme(format, activation=_activation(data))
    return ForeignWeight(name, (n, k), scheme, tuple(names.values()), build, scale.dtype)


def _plan_float8(source: Source, name: str, names: dict[str, str], data: dict[str, Any]) -> ForeignWeight:
    codes, scale = source.entries[names["qdata"]], source.entries[names["scale"]]
    n, k = codes.shape
    block = data.get("block_size")
    sizes = (
        block if isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block) else None
    )
    if codes.dtype != torch.float8_e4m3fn or sizes is None:
        raise LayerRefused(f"its codes are {codes.dtype} in blocks of {quoted(block)}")
    whole = sizes[1] >= k
    rows, group = scale_blocks(scale.shape, (n, k), None if whole and sizes[0] in (1, n) else (sizes[0], sizes[1]))
    format = Format.parse("fp8" + (f"-g{group}" if group and not whole else ""))

    def build(read: Read) -> QTensor:
        spread = spread_scale(read(names["scale"]), n, rows)
        return QTensor.from_codes(read(names["qdata"]).view(torch.uint8), spread, None, format)

    activation = DynamicFP8() if data.get("act_quant_kwargs") else None
    scheme = Scheme(format, activation=activation)
    return ForeignWeight(name, (n, k), scheme, tuple(names.values()), build, scale.dtype)


def _plan_int4(source: Source, name: str, names: dict[str, str], data: dict[str, Any]) -> ForeignWeight:
    codes, scale = source.entries[names["qdata"]], source.entries[names["scale"]]
    n, k = codes.shape[0], 2 * codes.shape[1]
    groups = scale.shape[0] if len(scale.shape) == 2 else 0
    zero = names.get("zero_point")
    if codes.dtype not in (torch.uint8, torch.int8) or scale.shape != (groups, n) or not groups:
        raise LayerRefused(f"its tensors are {codes.dtype} {codes.shape} and {scale.shape}: not the layout PLAIN")
    if zero is not None and source.entries[zero].shape != scale.shape:
        raise LayerRefused(f"its zero points have shape {source.entries[zero].shape}")
    format = int_format(4, _group(data, k, groups), ZeroPoint.NONE if zero is None else ZeroPoint.FLOAT)

    def build(read: Read) -> QTensor:
        raw = read(names["qdata"]).view(torch.uint8) ^ SIGN_OF_NIBBLES
        return QTensor(raw, read(names["scale"]), None if zero is None else read(zero), (n, k), format)

    return ForeignWeight(name, (n, k), Scheme(format), tuple(names.values()), build, scale.dtype)


def _columns(scale: tuple[int, ...], n: int) -> int:
    """Scales per row."""
    if len(scale) != 2 or scale[0] != n or not scale[1]:
        raise LayerRefused(f"its scales have shape {scale}; qcore reads (N, 1) and (N, G)")
    return scale[1]


def _group(data: dict[str, Any], k: int, groups: int) -> int | None:
    block = data.get("block_size")
    wanted = block[-1] if isinstance(block, list) and block and type(block[-1]) is int else None
    return group_size(k, groups, wanted)


def _bits(data: dict[str, Any]) -> int:
    """Bits of the codes: 8, or what ``target_dtype`` names."""
    target = data.get("target_dtype")
    text = target.get("_data") if isinstance(target, dict) else None
    if text is None:
        return 8
    if not isinstance(text, str) or text not in {f"int{bits}" for bits in range(2, 9)}:
        raise LayerRefused(f"its target_dtype is {quoted(text)}")
    return 4 if int(text[3:]) <= 4 else 8


def _activation(data: dict[str, Any]) -> Activation | None:
    kind = data.get("activation_quantization")
    if kind == "int8_asym_per_token":
        return DynamicInt8(symmetric=False)
    if kind is not None:
        raise LayerRefused(f"its activation_quantization is {quoted(kind)}; qcore has int8_asym_per_token")
    act = data.get("act_quant_kwargs")
    if act is None:
        return None
    inner = act.get("_data") if isinstance(act, dict) else None
    granularity = inner.get("granularity") if isinstance(inner, dict) else None
    mapping = inner.get("mapping_type") if isinstance(inner, dict) else None
    per_row = isinstance(granularity, dict) and granularity.get("_type") == "PerRow"
    text = mapping.get("_data") if isinstance(mapping, dict) else None
    if not per_row or text not in ("SYMMETRIC", "ASYMMETRIC"):
        raise LayerRefused("its activations are not quantized per row")
    return DynamicInt8(symmetric=text == "SYMMETRIC")
