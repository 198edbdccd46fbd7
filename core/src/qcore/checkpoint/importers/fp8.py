"""fp8 in the form of DeepSeek, Qwen, MiniMax and others (``fp8``), and of fbgemm (``fbgemm_fp8``).

``weight`` e4m3fn (N, K), and one of

- ``weight_scale_inv`` (ceil(N / bn), ceil(K / bk)): one scale for a block of bn x bk weights, usually 128 x 128;
  despite its name it multiplies. The last blocks may be ragged. float32, or e8m0 bytes;
- ``weight_scale`` (), (1,) or (N, 1): one scale for the tensor, or for each row.

Fused experts are a parameter ``P`` e4m3fn (E, N, K) with ``P_scale_inv`` (E, ceil(N / bn), ceil(K / bk)).

A block becomes a group of bk columns in each of its bn rows, with the same scale. Activations are e4m3fn, too: with
scales per token or per group computed at run time, or with ``input_scale`` for the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...formats import FLOAT_SCALES, Format
from ...weights.activations import DynamicFP8, StaticFP8
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
    check_dtypes,
    plan_layers,
    tensor_name,
)

E8M0 = (torch.uint8, torch.float8_e8m0fnu)
"""Dtypes in which files store scales that are powers of two."""
ATTENTION_PARAMETERS = (
    *(
        f".{part}{own}_{parameter}"
        for part in "qkv"
        for own in ("", "_proj.output")
        for parameter in ("scale", "zero_point")
    ),
    *(".kv_scale", ".prob_output_scale"),
)
"""The ends of names of scales and zero points of queries and of key and value caches, which qcore does not quantize."""
_SCALES = ("weight_scale_inv", "weight_scale")
_STATIC = ("input_scale", "activation_scale")
"""Names of the scale of static activations: vLLM's and transformers'."""


class FP8:
    """The importer of checkpoints with native fp8 weights."""

    name = "fp8"

    def recognizes(self, source: Source) -> bool:
        """By ``quant_method``."""
        return source.method in ("fp8", "fbgemm_fp8")

    def plan(self, source: Source) -> Plan:
        """Every layer with an e4m3fn ``weight`` and a scale, and every parameter of fused experts."""
        layers = (layer for scale in _SCALES for layer in source.layers(scale, "weight"))
        found = plan_layers(layers, partial(plan_fp8, source, block_size(source)))
        found.add(plan_layers(_fused_experts(source), partial(_plan_experts, source, block_size(source))))
        # The bound of fbgemm's activations, usually 1200, above which it clips.
        found.dropped |= {
            name for name in source.entries if f".{name}".endswith((".input_scale_ub", *ATTENTION_PARAMETERS))
        }
        return found


def _fused_experts(source: Source) -> Iterator[str]:
    for name in source.entries:
        parameter = name.removesuffix("_scale_inv")
        if parameter != name and parameter in source.entries and not f".{parameter}".endswith(".weight"):
            yield parameter


def _plan_experts(source: Source, block: tuple[int, int] | None, parameter: str, plan: Plan) -> None:
    weight, scale = source.entries[parameter], source.entries[f"{parameter}_scale_inv"]
    if weight.dtype != torch.float8_e4m3fn or len(weight.shape) != 3 or scale.shape[:1] != weight.shape[:1]:
        raise LayerRefused(f"it is {weight.dtype} of shape {weight.shape}, its scales have shape {scale.shape}")
    if f"{parameter}_activation_scale" in source.entries:
        raise LayerRefused("each of its experts has an activation scale, but qcore supports only one for all")
    e, n, k = weight.shape
    rows, group = scale_blocks(scale.shape[1:], (n, k), block)
    format = fp8_format(group, powers=scale.dtype in E8M0)

    def build(read: Read) -> QTensor:
        spread = torch.stack([spread_scale(each, n, rows) for each in read(scale.name)])
        return QTensor.from_codes(read(weight.name).view(torch.uint8), spread, None, format)

    scheme = Scheme(format, activation=DynamicFP8(group))
    sources = (weight.name, scale.name)
    plan.weights.append(ForeignWeight(f"{parameter}.weight", (e, n, k), scheme, sources, build, scale.dtype))


def fp8_format(group: int | None, *, powers: bool) -> Format:
    """The format of e4m3fn weights; ``group``: columns per scale, None for one per row; ``powers``: e8m0 scales."""
    return Format.parse("fp8" + (f"-g{group}" if group else "") + ("-e8m0" if powers else ""))


def block_size(source: Source) -> tuple[int, int] | None:
    """Rows and columns of a block, None if the settings do not name a block size."""
    given: Any = source.settings.get("weight_block_size")
    if isinstance(given, list) and len(given) == 2 and all(type(size) is int and size > 0 for size in given):
        return given[0], given[1]
    return None


def plan_fp8(source: Source, block: tuple[int, int] | None, layer: str, plan: Plan) -> None:
    """Plan a layer with ``weight`` e4m3fn (N, K), its scale, and one for its activations if they are static."""
    weight = source.entries[tensor_name(layer, "weight")]
    name = next(tensor_name(layer, scale) for scale in _SCALES if tensor_name(layer, scale) in source.entries)
    scale = source.entries[name]
    if weight.dtype != torch.float8_e4m3fn or len(weight.shape) != 2:
        raise LayerRefused(f"its weight is {weight.dtype} of shape {weight.shape}; qcore reads float8_e4m3fn (N, K)")
    n, k = weight.shape
    rows, group = scale_blocks(scale.shape, (n, k), block)
    format = fp8_format(group, powers=scale.dtype in E8M0)
    stored = [tensor_name(layer, part) for part in _STATIC if tensor_name(layer, part) in source.entries]
    kind = source.settings.get("activation_scheme")
    static = stored[0] if stored and kind != "dynamic" else None
    activation = StaticFP8() if static else DynamicFP8(group)

    def build(read: Read) -> QTensor:
        spread = spread_scale(read(name), n, rows)
        return QTensor.from_codes(read(weight.name).view(torch.uint8), spread, None, format)

    plan.weights.append(
        ForeignWeight(
            tensor_name(layer, "weight"),
            (n, k),
            Scheme(format, activation=activation),
            (weight.name, name),
            build,
            scale.dtype,
        )
    )
    if static:
        plan.tensors.append(input_scale(source, layer, static))
    plan.dropped.update(name for name in stored if name != static)  # the tools do not read them either
    if kind == "static" and not static:
        plan.notes[layer] = "it has no input_scale for its static activations: their scales are computed at run time"


def scale_blocks(
    scale: tuple[int, ...], shape: tuple[int, int], block: tuple[int, int] | None
) -> tuple[int, int | None]:
    """The number of rows that share a scale, and of columns per scale (None for all), from the shape of the scales.

    Raises `LayerRefused` for scales that do not match ``block``.
    """
    n, k = shape
    if scale in ((), (1,), (1, 1)) and block is None:
        return max(n, 1), None
    if scale in ((n,), (n, 1)) and block is None:
        return 1, None
    if block is not None and scale == (-(-n // block[0]), -(-k // block[1])):
        return block[0], block[1]
    raise LayerRefused(f"its scales have shape {scale}, which does not match blocks of {block} of a weight {shape}")


def spread_scale(scale: Tensor, n: int, rows: int) -> Tensor:
    """Expand scales per block of ``rows`` rows ``(blocks, G)``, per tensor or per row, to one per row and group."""
    own = scale.view(torch.uint8) if scale.dtype in E8M0 else scale
    table = own.reshape(1, 1) if own.numel() == 1 else own.reshape(own.shape[0], *own.shape[1:] or (1,))
    each = min(rows, max(n, 1))  # the file may claim a larger one, which must not be allocated
    spread = table if each == 1 else table.repeat_interleave(each, dim=0)[:n]
    return spread.expand(n, -1).t().contiguous()


def input_scale(source: Source, layer: str, name: str) -> ForeignTensor:
    """The scale of a layer's static activations, stored as ``name``, as the float32 number that a scheme takes."""
    if source.entries[name].shape not in ((), (1,)):
        part, shape = name.rpartition(".")[2], source.entries[name].shape
        raise LayerRefused(f"its {part} has shape {shape}; qcore takes one scale per tensor")
    check_dtypes(source, {"input_scale": name}, input_scale=FLOAT_SCALES)
    return calibrated(tensor_name(layer, "input_scale"), torch.float32, name)
