"""optimum-quanto: qint8, qfloat8, qint4 and qint2, as transformers and optimum save them.

qint8 and qfloat8: ``weight._data`` int8 or e4m3fn (N, K), ``weight._scale`` (N, 1). qint4 and qint2:
``weight._data._data`` uint8, whose rows are groups, the first ones in the lowest bits; ``weight._scale`` and
``weight._shift`` (groups, 1):

    W = u * scale - shift

qcore's float zero point is ``h * scale - shift``, h the centre of the codes, exact to one unit in the last place of the
largest weight. ``quanto_qmap.json`` names the layers; the tensors tell as much.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...formats import ZeroPoint
from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
from .base import ForeignWeight, LayerRefused, Plan, Read, Source, int_format, plan_layers
from .packing import plain_int4

_PACKED, _WHOLE = ".weight._data._data", ".weight._data"
_BITS = {"qint4": 4, "qint2": 2}


class Quanto:
    """The importer of optimum-quanto's checkpoints."""

    name = "quanto"

    def recognizes(self, source: Source) -> bool:
        """By ``quant_method``, or by ``quanto_qmap.json``."""
        return source.method == "quanto" if source.method else bool(source.json("quanto_qmap.json"))

    def plan(self, source: Source) -> Plan:
        """Every layer with ``weight._data``."""
        layers = [name.removesuffix(end) for end in (_PACKED, _WHOLE) for name in source.entries if name.endswith(end)]
        plan = plan_layers(layers, partial(_plan_layer, source))
        for layer in layers:  # 1 unless activations were calibrated, which transformers never does
            plan.dropped |= {f"{layer}.input_scale", f"{layer}.output_scale"} & source.entries.keys()
        return plan


def _plan_layer(source: Source, layer: str, plan: Plan) -> None:
    scale = f"{layer}.weight._scale"
    if scale not in source.entries:
        raise LayerRefused("it has no scale")
    if f"{layer}{_PACKED}" in source.entries:
        _plan_packed(source, layer, plan)
        return
    data, scales = source.entries[f"{layer}{_WHOLE}"], source.entries[scale]
    if len(data.shape) != 2 or data.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise LayerRefused(f"its weight is {data.dtype} of shape {data.shape}; qcore reads qint8 and qfloat8 (N, K)")
    n, k = data.shape
    if scales.shape not in ((n, 1), (1,), ()):
        raise LayerRefused(f"its scales have shape {scales.shape}")
    scheme = Scheme.parse("w8a16" if data.dtype == torch.int8 else "wfp8a16")

    def build(read: Read) -> QTensor:
        codes = read(data.name)
        codes = codes if codes.dtype == torch.int8 else codes.view(torch.uint8)
        return QTensor.from_codes(codes, read(scale).reshape(1, -1).expand(1, n).contiguous(), None, scheme.weight)

    plan.weights.append(ForeignWeight(f"{layer}.weight", (n, k), scheme, (data.name, scale), build, scales.dtype))


def _plan_packed(source: Source, layer: str, plan: Plan) -> None:
    names = (f"{layer}{_PACKED}", f"{layer}.weight._scale", f"{layer}.weight._shift")
    if names[2] not in source.entries:
        raise LayerRefused("it has no shift")
    data, scale, shift = (source.entries[name] for name in names)
    qmap = source.json("quanto_qmap.json").get(layer)
    kind = qmap.get("weights") if isinstance(qmap, dict) else f"q{source.settings.get('weights')}"
    bits = _BITS.get(kind, 0) if isinstance(kind, str) else 0
    if not bits or data.dtype != torch.uint8 or len(data.shape) != 2 or not scale.shape:
        raise LayerRefused(f"its weights are {str(kind)[:20]!r}, {data.dtype} of shape {data.shape}")
    groups, group = scale.shape[0], data.shape[1]
    shape = _shape(source, layer, groups * group)
    if scale.shape != (groups, 1) or shift.shape != scale.shape or data.shape[0] != -(-groups * bits // 8):
        raise LayerRefused(f"its tensors have shapes {data.shape}, {scale.shape} and {shift.shape}")
    n, k = shape
    if groups % n or k % group:
        raise LayerRefused(f"groups of {group} run across rows of {k}")
    per_row = groups // n
    format = int_format(4, group if per_row > 1 else None, ZeroPoint.FLOAT)
    centre = 1 << (bits - 1)

    def build(read: Read) -> QTensor:
        codes = _unpack(read(names[0]), bits, groups).reshape(n, k)
        own, moved = (read(name).float().reshape(n, per_row).t() for name in names[1:])
        return QTensor(plain_int4(codes + (8 - centre)), own, centre * own - moved, (n, k), format)

    plan.weights.append(ForeignWeight(f"{layer}.weight", (n, k), Scheme(format), names, build))


def _shape(source: Source, layer: str, count: int) -> tuple[int, int]:
    """N and K, which the files of packed weights do not say: N is that of the bias, or K that of the configuration."""
    bias = source.entries.get(f"{layer}.bias")
    if bias is not None and len(bias.shape) == 1 and bias.shape[0] and count % bias.shape[0] == 0:
        return bias.shape[0], count // bias.shape[0]
    config, last = source.config, layer.rpartition(".")[2]
    hidden, inner, heads, size = (
        config.get(name) for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
    )
    k = inner if last == "down_proj" else hidden
    if last == "o_proj" and type(heads) is int and type(size) is int:
        k = heads * size
    if type(k) is not int or k < 1 or count % k:
        raise LayerRefused("its file does not say the shape of the weight, and config.json does not tell")
    return count // k, k


def _unpack(packed: Tensor, bits: int, groups: int) -> Tensor:
    """Unsigned codes, uint8 (groups, group): the first groups in the lowest bits."""
    mask = (1 << bits) - 1
    return torch.cat([(packed >> (bits * part)) & mask for part in range(8 // bits)])[:groups]
