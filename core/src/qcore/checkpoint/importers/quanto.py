"""optimum-quanto: qint8, qfloat8, qint4 and qint2, in the form that transformers and optimum save.

qint8 and qfloat8: ``weight._data`` int8, e4m3fn or e5m2 (N, K), ``weight._scale`` (N, 1). qint4 and qint2:
``weight._data._data`` uint8, whose rows are groups, the first ones in the lowest bits; ``weight._scale`` and
``weight._shift`` (groups, 1):

    W = u * scale - shift

qcore's float zero point is ``h * scale - shift``, h the centre of the codes, exact to one unit in the last place of the
largest weight. ``quanto_qmap.json`` names the layers, the types of their weights, and those of their activations, which
stay float here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import quoted
from ...formats import FLOAT_SCALES, ZeroPoint
from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
from .base import ForeignWeight, LayerRefused, Plan, Read, Source, check_dtypes, int_format, plan_layers
from .configured_shapes import shapes_by_name
from .packing import plain_int4

_PACKED, _WHOLE = ".weight._data._data", ".weight._data"
_BITS = {"qint4": 4, "qint2": 2}
_WHOLE_TYPES = {
    "qint8": torch.int8,
    **dict.fromkeys(("qfloat8", "qfloat8_e4m3fn"), torch.float8_e4m3fn),
    "qfloat8_e5m2": torch.float8_e5m2,
}
_WHOLE_SCHEMES = {torch.int8: "w8a16", torch.float8_e4m3fn: "wfp8a16", torch.float8_e5m2: "wfp8_e5m2a16"}


class Quanto:
    """The importer of optimum-quanto's checkpoints."""

    name = "quanto"

    def recognizes(self, source: Source) -> bool:
        """By ``quant_method``, or by ``quanto_qmap.json``."""
        return source.method == "quanto" if source.method else bool(source.json("quanto_qmap.json"))

    def plan(self, source: Source) -> Plan:
        """Every layer with ``weight._data``."""
        layers = [name.removesuffix(end) for end in (_PACKED, _WHOLE) for name in source.entries if name.endswith(end)]
        qmap = source.json("quanto_qmap.json")
        plan = plan_layers(layers, partial(_plan_layer, source, qmap))
        for layer in layers:
            plan.dropped |= {f"{layer}.input_scale", f"{layer}.output_scale"} & source.entries.keys()
            kind = _element(source, qmap, layer, "activations")
            if kind:
                plan.notes[layer] = (
                    f"its {quoted(kind)} activations and results stay float: qcore reads quanto's weights"
                )
        return plan


def _element(source: Source, qmap: Mapping[str, Any], layer: str, part: str) -> str:
    """The quantized type of a layer's ``weights`` or ``activations``, such as ``qint4``, or an empty string."""
    own = qmap.get(layer)
    kind = own.get(part) if isinstance(own, dict) else source.settings.get(part)
    if kind is None or kind == "none":
        return ""
    if not isinstance(kind, str):
        return quoted(kind)
    return kind if isinstance(own, dict) else f"q{kind}"


def _plan_layer(source: Source, qmap: Mapping[str, Any], layer: str, plan: Plan) -> None:
    scale = f"{layer}.weight._scale"
    if scale not in source.entries:
        raise LayerRefused("it has no scale")
    if f"{layer}{_PACKED}" in source.entries:
        _plan_packed(source, qmap, layer, plan)
        return
    data, scales = source.entries[f"{layer}{_WHOLE}"], source.entries[scale]
    if len(data.shape) != 2 or data.dtype not in _WHOLE_SCHEMES:
        raise LayerRefused(f"its weight is {data.dtype} of shape {data.shape}; qcore reads qint8 and qfloat8 (N, K)")
    n, k = data.shape
    if scales.shape not in ((n, 1), (1,), ()):
        raise LayerRefused(f"its scales have shape {scales.shape}")
    kind = _element(source, qmap, layer, "weights")
    if kind and _WHOLE_TYPES.get(kind) is not data.dtype:
        raise LayerRefused(f"its weights are {quoted(kind)} according to its settings, but {data.dtype} in its file")
    scheme = Scheme.parse(_WHOLE_SCHEMES[data.dtype])

    def build(read: Read) -> QTensor:
        codes = read(data.name)
        codes = codes if codes.dtype == torch.int8 else codes.view(torch.uint8)
        return QTensor.from_codes(codes, read(scale).reshape(1, -1).expand(1, n).contiguous(), None, scheme.weight)

    plan.weights.append(ForeignWeight(f"{layer}.weight", (n, k), scheme, (data.name, scale), build, scales.dtype))


def _plan_packed(source: Source, qmap: Mapping[str, Any], layer: str, plan: Plan) -> None:
    names = (f"{layer}{_PACKED}", f"{layer}.weight._scale", f"{layer}.weight._shift")
    if names[2] not in source.entries:
        raise LayerRefused("it has no shift")
    data, scale, shift = (source.entries[name] for name in names)
    kind = _element(source, qmap, layer, "weights")
    bits = _BITS.get(kind, 0)
    if not bits or data.dtype != torch.uint8 or len(data.shape) != 2 or not scale.shape:
        raise LayerRefused(f"its weights are {quoted(kind)}, {data.dtype} of shape {data.shape}")
    check_dtypes(source, {"scale": names[1], "shift": names[2]}, scale=FLOAT_SCALES, shift=FLOAT_SCALES)
    groups, group = scale.shape[0], data.shape[1]
    shape = _shape(source, layer, groups * group)
    if scale.shape != (groups, 1) or shift.shape != scale.shape or data.shape[0] != -(-groups * bits // 8):
        raise LayerRefused(f"its tensors have shapes {data.shape}, {scale.shape} and {shift.shape}")
    n, k = shape
    if groups % n or k % group:
        raise LayerRefused(f"groups of {group} cross the boundaries of rows of {k}")
    per_row = groups // n
    format = int_format(4, group if per_row > 1 else None, ZeroPoint.FLOAT)
    centre = 1 << (bits - 1)

    def build(read: Read) -> QTensor:
        codes = _unpack(read(names[0]), bits, groups).reshape(n, k)
        own, moved = (read(name).float().reshape(n, per_row).t() for name in names[1:])
        return QTensor(plain_int4(codes + (8 - centre)), own, centre * own - moved, (n, k), format)

    plan.weights.append(ForeignWeight(f"{layer}.weight", (n, k), Scheme(format), names, build))


def _shape(source: Source, layer: str, count: int) -> tuple[int, int]:
    """N and K, which files of packed weights do not contain: N from the bias, or both from the configuration."""
    bias = source.entries.get(f"{layer}.bias")
    if bias is not None and len(bias.shape) == 1 and bias.shape[0] and count % bias.shape[0] == 0:
        return bias.shape[0], count // bias.shape[0]
    fitting = shapes_by_name(source.config, layer, count)
    if len(fitting) != 1:
        raise LayerRefused("neither its file nor config.json contains the shape of the weight")
    return fitting.pop()


def _unpack(packed: Tensor, bits: int, groups: int) -> Tensor:
    """Unsigned codes, uint8 (groups, group): the first groups in the lowest bits."""
    mask = (1 << bits) - 1
    return torch.cat([(packed >> (bits * part)) & mask for part in range(8 // bits)])[:groups]
