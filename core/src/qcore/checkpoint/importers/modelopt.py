"""NVIDIA's modelopt: NVFP4 and FP8 in Hugging Face directories.

NVFP4: ``weight`` uint8 (N, K / 2), low nibble first, ``weight_scale`` e4m3fn (N, K / 16), ``weight_scale_2`` float32:

    W[n, k] = e2m1(weight[n, k]) * (weight_scale[n, k // 16] * weight_scale_2)

FP8: ``weight`` e4m3fn (N, K), ``weight_scale`` (), ``input_scale`` (). qcore does not support NVFP4's own activations,
fp4 with a static scale: such weights run with float activations.
"""

from __future__ import annotations

from functools import partial

import torch

from ...formats import FLOAT_SCALES, Format
from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
from .base import ForeignWeight, LayerRefused, Plan, Read, Source, check_dtypes, plan_layers, tensor_name
from .fp8 import ATTENTION_PARAMETERS, plan_fp8

_FORMAT = "fp4-g16-e4m3"
_GROUP = 16


class ModelOpt:
    """The importer of modelopt's checkpoints."""

    name = "modelopt"

    def recognizes(self, source: Source) -> bool:
        """By ``quant_method``, or the producer in ``hf_quant_config.json``."""
        if source.method:
            return source.method in ("modelopt", "modelopt_fp4", "modelopt_fp8")
        producer = source.json("hf_quant_config.json").get("producer")
        return isinstance(producer, dict) and producer.get("name") == "modelopt"

    def plan(self, source: Source) -> Plan:
        """Every layer with ``weight_scale``."""
        plan = plan_layers(source.layers("weight_scale", "weight"), partial(_plan_layer, source))
        plan.dropped |= {name for name in source.entries if name.endswith(ATTENTION_PARAMETERS)}
        return plan


def _plan_layer(source: Source, layer: str, plan: Plan) -> None:
    if tensor_name(layer, "pre_quant_scale") in source.entries:
        raise LayerRefused(
            "its inputs are multiplied by pre_quant_scale (AWQ, SmoothQuant), which qcore does not support"
        )
    dtype = source.entries[tensor_name(layer, "weight")].dtype
    if dtype == torch.float8_e4m3fn:
        plan_fp8(source, None, layer, plan)
    elif dtype == torch.uint8 and tensor_name(layer, "weight_scale_2") in source.entries:
        _plan_nvfp4(source, layer, plan)
    else:
        raise LayerRefused(f"its weight is {dtype}; qcore reads modelopt's NVFP4 and FP8")


def _plan_nvfp4(source: Source, layer: str, plan: Plan) -> None:
    names = {part: tensor_name(layer, part) for part in ("weight", "weight_scale", "weight_scale_2")}
    weight, scale, factor = (source.entries[name] for name in names.values())
    if len(weight.shape) != 2:
        raise LayerRefused(f"its weight has shape {weight.shape}")
    n, k = weight.shape[0], 2 * weight.shape[1]
    if scale.shape != (n, -(-k // _GROUP)) or scale.dtype != torch.float8_e4m3fn or factor.shape not in ((), (1,)):
        raise LayerRefused(f"its scales have shapes {scale.shape} and {factor.shape}, {scale.dtype}")
    check_dtypes(source, names, weight_scale_2=FLOAT_SCALES)
    format = Format.parse(_FORMAT)

    def build(read: Read) -> QTensor:
        factor = read(names["weight_scale_2"]).float().reshape(())
        scale = read(names["weight_scale"]).t().contiguous()
        return QTensor(read(names["weight"]), scale, None, (n, k), format, global_scale=factor)

    sources = tuple(names.values())
    plan.weights.append(
        ForeignWeight(tensor_name(layer, "weight"), (n, k), Scheme(format), sources, build, global_scale=sources[-1])
    )
    if tensor_name(layer, "input_scale") in source.entries:
        plan.dropped.add(tensor_name(layer, "input_scale"))
