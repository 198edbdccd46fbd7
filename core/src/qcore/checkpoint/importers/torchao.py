"""torchao's safetensors, whose metadata holds, per weight, the class of its tensor and its attributes as JSON.

``LAYER._weight_qdata``, ``._weight_scale`` and ``._weight_zero_point`` (a prefix on the last part of the name):

- ``Int8Tensor``: int8 (N, K), scale (N, 1), (N, G) or (1, 1), zero points int8 or none: ``W = (q - z) * s``; calibrated
  activations have ``._weight_act_quant_scale`` and usually ``._weight_act_quant_zero_point``;
- ``IntxUnpackedToInt8Tensor``: codes of 1 to 8 bits in int8, otherwise the same;
- ``Float8Tensor``: e4m3fn or e5m2 (N, K), scale (N, 1), (1, 1) or in groups or blocks;
- ``Int4Tensor``: int8 (N, K / 2), two's complement nibbles, the low one first, scale and zero point (G, N),
  ``W = q * s + z``: the bytes of PLAIN. Its quantizer needs a GPU, so this was derived from torchao's source code.

Activations that the tool quantizes per tensor at run time are quantized per token here, which is noted.
"""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import torch

from ...errors import quoted
from ...formats import Format, ZeroPoint
from ...weights.activations import Activation, DynamicFP8, DynamicInt8, StaticInt8
from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
from .base import (
    ForeignTensor,
    ForeignWeight,
    LayerRefused,
    Plan,
    Read,
    Source,
    calibrated,
    group_size,
    int_format,
    plan_layers,
)
from .fp8 import scale_blocks, spread_scale

_MOST_TEXT = 1 << 16
_PARTS = ("qdata", "scale", "zero_point", "act_pre_scale", "act_quant_scale", "act_quant_zero_point")
_FLOAT8 = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2"}
_PLAIN_TYPES = ("Tensor", "Parameter")
_UNDESCRIBED = (
    "its file's metadata does not describe it: the file was rewritten without it, or describes it by the name that "
    "transformers gives it, so that it can only be loaded into the model"
)


class TorchAO:
    """The importer of torchao's checkpoints."""

    name = "torchao"

    def recognizes(self, source: Source) -> bool:
        """By the metadata of the files: without it, the directory was written with pickle and is not read."""
        return source.method == "torchao" or any(_described(source, name) for name in source.metadata)

    def plan(self, source: Source) -> Plan:
        """Every weight whose class the metadata names."""
        names = [name for name in source.metadata if _described(source, name)]
        plan = plan_layers(names, partial(_plan_weight, source))
        known = set(names)
        for layer, attribute in map(_stored_weight, source.entries):
            name = f"{layer}.{attribute}".lstrip(".")
            if attribute and name not in known:
                plan.refused[name] = _UNDESCRIBED
        return plan


def _stored_weight(name: str) -> tuple[str, str]:
    """Layer and parameter of the codes of a weight; an empty parameter for other tensors."""
    layer, _, last = name.rpartition(".")
    return layer, last[1:].removesuffix("_qdata") if last.startswith("_") and last.endswith("_qdata") else ""


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
    listed = described.get("_tensor_data_names")
    lost = [part for part in listed if f"{start}{part}" not in source.entries] if isinstance(listed, list) else []
    if lost:
        raise LayerRefused(f"its tensor {quoted(lost[0])} is missing")
    if "act_pre_scale" in names:
        raise LayerRefused("its inputs are scaled before the product (act_pre_scale), which qcore does not support")
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
    scheme = plan.weights[-1].scheme
    plan.tensors += _static(source, layer, names, scheme)
    text = _note(data, scheme)
    if text:
        plan.notes[layer] = text


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
    if points is not None and not symmetric and points.dtype != torch.int8:
        raise LayerRefused(f"its zero points are {points.dtype}; qcore reads int8")
    format = int_format(
        8 if bits == 8 else 4,
        _group(data, k, groups),
        ZeroPoint.NONE if symmetric else ZeroPoint.INT,
    )

    def build(read: Read) -> QTensor:
        def spread(part: str) -> torch.Tensor:
            return read(part).expand(n, groups).t().contiguous()

        found = None if symmetric or zero is None else spread(zero)
        return QTensor.from_codes(read(names["qdata"]), spread(names["scale"]), found, format)

    scheme = Scheme(format, activation=_activation(data, "act_quant_scale" in names))
    return ForeignWeight(name, (n, k), scheme, _weight_names(names), build, scale.dtype)


def _plan_float8(source: Source, name: str, names: dict[str, str], data: dict[str, Any]) -> ForeignWeight:
    codes, scale = source.entries[names["qdata"]], source.entries[names["scale"]]
    n, k = codes.shape
    block = data.get("block_size")
    sizes = (
        block if isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block) else None
    )
    if codes.dtype not in _FLOAT8 or sizes is None:
        raise LayerRefused(f"its codes are {codes.dtype} in blocks of {quoted(block)}")
    whole = sizes[1] >= k
    rows, group = scale_blocks(scale.shape, (n, k), None if whole and sizes[0] in (1, n) else (sizes[0], sizes[1]))
    format = Format.parse(_FLOAT8[codes.dtype] + (f"-g{group}" if group and not whole else ""))

    def build(read: Read) -> QTensor:
        spread = spread_scale(read(names["scale"]), n, rows)
        return QTensor.from_codes(read(names["qdata"]).view(torch.uint8), spread, None, format)

    scheme = Scheme(format, activation=None if _kwargs(data) is None else DynamicFP8())
    return ForeignWeight(name, (n, k), scheme, _weight_names(names), build, scale.dtype)


def _plan_int4(source: Source, name: str, names: dict[str, str], data: dict[str, Any]) -> ForeignWeight:
    codes, scale = source.entries[names["qdata"]], source.entries[names["scale"]]
    n, k = codes.shape[0], 2 * codes.shape[1]
    groups = scale.shape[0] if len(scale.shape) == 2 else 0
    zero = names.get("zero_point")
    if codes.dtype != torch.int8 or scale.shape != (groups, n) or not groups:
        raise LayerRefused(f"its tensors are {codes.dtype} {codes.shape} and {scale.shape}: not the layout PLAIN")
    if zero is not None and (source.entries[zero].shape, source.entries[zero].dtype) != (scale.shape, scale.dtype):
        raise LayerRefused(f"its zero points are {source.entries[zero].dtype} of shape {source.entries[zero].shape}")
    moved = None if zero is None or not bool(source.read(zero).any()) else zero
    format = int_format(4, _group(data, k, groups), ZeroPoint.NONE if moved is None else ZeroPoint.FLOAT)

    def build(read: Read) -> QTensor:
        raw = read(names["qdata"]).view(torch.uint8)
        return QTensor(raw, read(names["scale"]), None if moved is None else read(moved), (n, k), format)

    scheme = Scheme(format, activation=_float_activation(data))
    return ForeignWeight(name, (n, k), scheme, _weight_names(names), build, scale.dtype)


def _columns(scale: tuple[int, ...], n: int) -> int:
    """The number of scales per row."""
    if scale != (1, 1) and (len(scale) != 2 or scale[0] != n or not scale[1]):
        raise LayerRefused(f"its scales have shape {scale}; qcore reads (N, 1), (N, G) and (1, 1)")
    return scale[1]


def _group(data: dict[str, Any], k: int, groups: int) -> int | None:
    block = data.get("block_size")
    wanted = block[-1] if isinstance(block, list) and block and type(block[-1]) is int else None
    if wanted is not None and (wanted < 1 or -(-k // wanted) != groups):
        raise LayerRefused(f"its {k} columns in blocks of {wanted} do not have {groups} scales per row")
    return group_size(k, groups, wanted)


def _bits(data: dict[str, Any]) -> int:
    """Bits of the codes: 8, or those of ``target_dtype``."""
    target = data.get("target_dtype")
    text = target.get("_data") if isinstance(target, dict) else None
    if text is None:
        return 8
    if not isinstance(text, str) or text not in {f"int{bits}" for bits in range(1, 9)}:
        raise LayerRefused(f"its target_dtype is {quoted(text)}")
    return 4 if int(text[3:]) <= 4 else 8


def _weight_names(names: dict[str, str]) -> tuple[str, ...]:
    """The stored tensors that a weight is built from."""
    return tuple(name for part, name in names.items() if not part.startswith("act_"))


def _activation(data: dict[str, Any], static: bool) -> Activation | None:
    """The activations of an integer weight. ``static``: the file holds their scale."""
    kind = data.get("activation_quantization")
    if kind == "int8_asym_per_token":
        return DynamicInt8(symmetric=False)
    if kind is not None:
        raise LayerRefused(f"its activation_quantization is {quoted(kind)}; qcore supports int8_asym_per_token")
    act = _kwargs(data)
    if act is None:
        if static:
            raise LayerRefused("it has an activation scale that its metadata does not describe")
        return None
    mapping = act.get("mapping_type")
    text = mapping.get("_data") if isinstance(mapping, dict) else None
    if text not in ("SYMMETRIC", "ASYMMETRIC"):
        raise LayerRefused(f"the mapping_type of its activations is {quoted(text)}")
    return StaticInt8() if static else DynamicInt8(symmetric=text == "SYMMETRIC")


def _float_activation(data: dict[str, Any]) -> Activation | None:
    """The activations of an ``Int4Tensor``: bfloat16, or fp8 per row."""
    told = data.get("activation_dtype")
    text = told.get("_data") if isinstance(told, dict) else told
    if text not in (None, "bfloat16", "float8_e4m3fn"):
        raise LayerRefused(f"its activation_dtype is {quoted(text)}; qcore reads bfloat16 and float8_e4m3fn")
    return DynamicFP8() if text == "float8_e4m3fn" else None


def _kwargs(data: dict[str, Any]) -> dict[str, Any] | None:
    """The quantization of activations, None if there is none. Raises `LayerRefused` for other granularities."""
    act = data.get("act_quant_kwargs")
    if act is None:
        return None
    inner = act.get("_data") if isinstance(act, dict) else None
    if not isinstance(inner, dict) or _granularity(inner) not in ("PerRow", "PerTensor"):
        raise LayerRefused("its activations are quantized neither per row nor per tensor")
    return inner


def _granularity(act: dict[str, Any]) -> Any:
    told = act.get("granularity")
    return told.get("_type") if isinstance(told, dict) else None


def _note(data: dict[str, Any], scheme: Scheme) -> str:
    """The difference between torchao's and qcore's activations, or an empty string."""
    act = _kwargs(data)
    if act is None:
        return ""
    if any(act.get(bound) is not None for bound in ("hp_value_lb", "hp_value_ub")):
        return "its activations are not clipped; torchao clips them (hp_value_lb, hp_value_ub)"
    if isinstance(told := act.get("float8_dtype"), dict) and told.get("_data") != "float8_e4m3fn":
        return f"its activations are quantized to float8_e4m3fn; torchao uses {quoted(told.get('_data'))}"
    if act.get("reduce_range") is True:
        return "its activations are quantized to 8 bits; torchao uses 7 of them (reduce_range)"
    if _granularity(act) == "PerTensor" and not isinstance(scheme.activation, StaticInt8):
        return "its activations are quantized per token; torchao uses one scale for all tokens"
    return ""


def _static(source: Source, layer: str, names: dict[str, str], scheme: Scheme) -> list[ForeignTensor]:
    """Scale and zero point of calibrated activations. Raises `LayerRefused` for more than one of each."""
    if not isinstance(scheme.activation, StaticInt8):
        return []
    stored = names["act_quant_scale"], names.get("act_quant_zero_point", names["act_quant_scale"])
    if any(math.prod(source.entries[name].shape) != 1 for name in stored):
        raise LayerRefused("it has several activation scales; qcore supports one per layer")
    scale, zero = stored
    if not source.entries[scale].dtype.is_floating_point or (
        zero != scale and source.entries[zero].dtype != torch.int8
    ):
        raise LayerRefused(f"its activations have {source.entries[scale].dtype} and {source.entries[zero].dtype}")

    start = f"{layer}." if layer else ""
    target = f"{start}input_zero_point"
    none = ForeignTensor(target, torch.int32, (), (scale,), lambda _: torch.zeros((), dtype=torch.int32))
    point = none if zero == scale else calibrated(target, torch.int32, zero)
    return [calibrated(f"{start}input_scale", torch.float32, scale), point]
