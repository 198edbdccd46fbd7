"""bitsandbytes: NF4, FP4 and int8, in the form that transformers saves.

4 bits: ``weight`` uint8, the codes of the flattened matrix, high nibble first; ``weight.absmax``, one scale for each
block of 64 of them; ``weight.quant_map``, the table of the 16 values; ``weight.quant_state.bitsandbytes__nf4`` or
``__fp4``, JSON as bytes. Blocks that cross rows, of K columns, become groups of gcd(64, K) that share scales. Double
quantization: ``absmax`` is uint8 and

    absmax[i] = nested_quant_map[absmax[i]] * nested_absmax[i // 256] + nested_offset

int8: ``weight`` int8 (N, K) and ``SCB`` float32 (N,): ``W = (weight * SCB) * (1 / 127)``. qcore uses one scale,
SCB / 127, rounded: a quarter of the weights differ by one unit in the last place of float32. The tool itself multiplies
int8 activations, except for outlier columns; here activations stay float.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import quoted
from ...formats import FLOAT_SCALES, Format, find_element
from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
from .base import ForeignWeight, LayerRefused, Plan, Read, Source, check_dtypes, plan_layers, tensor_name, within_rows

_ELEMENTS = {"nf4": "nf4", "fp4": "fp4_bnb"}
_MOST_STATE = 4096
"""The maximum bytes of the JSON of one layer."""
_ROW_MAJOR = [0]
_STORAGE = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Values of ``bnb_4bit_quant_storage``: the dtype in which the bytes of codes are stored."""
_MOST_OFFSET = torch.finfo(torch.float32).max


class BitsAndBytes:
    """The importer of bitsandbytes' checkpoints."""

    name = "bitsandbytes"

    def recognizes(self, source: Source) -> bool:
        """By ``quant_method``, or in directories of old versions of transformers by ``load_in_4bit`` and so on."""
        if source.method:
            return source.method in ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit")
        return any(source.settings.get(name) is True for name in ("load_in_4bit", "load_in_8bit"))

    def plan(self, source: Source) -> Plan:
        """Every layer with a table of 4-bit values, and every layer with ``SCB``."""
        tables = ".weight.quant_map"
        layers = [name.removesuffix(tables) for name in source.entries if name.endswith(tables)]
        plan = plan_layers(layers, partial(_plan_4bit, source))
        plan.add(plan_layers(source.layers("SCB", "weight"), partial(_plan_int8, source)))
        return plan


@dataclass(frozen=True)
class _State:
    """The JSON of a layer. ``nested_block``: the number of scales that share a scale, 0 if they are floats."""

    kind: str
    shape: tuple[int, int]
    block: int
    nested_block: int = 0
    nested_offset: float = 0.0

    @classmethod
    def parse(cls, raw: Tensor) -> _State:
        try:
            tree: Any = json.loads(bytes(raw.flatten().tolist())) if raw.dtype == torch.uint8 else None
        except (ValueError, RecursionError):
            raise LayerRefused("its quant_state is not JSON") from None
        if not isinstance(tree, dict):
            raise LayerRefused("its quant_state is not a JSON object")
        shape: Any = tree.get("shape")
        sizes: Any = (tree.get("blocksize"), tree.get("nested_blocksize", 0))
        fits = isinstance(shape, list) and len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)
        if not fits or any(type(size) is not int for size in sizes) or sizes[0] < 1 or sizes[1] < 0:
            raise LayerRefused(f"its quant_state has shape {quoted(shape)} and block sizes {quoted(sizes)}")
        kind, offset = tree.get("quant_type"), tree.get("nested_offset", 0.0)
        if not isinstance(kind, str) or kind not in _ELEMENTS:
            raise LayerRefused(f"its quant_type is {quoted(kind)}; qcore reads nf4 and fp4")
        if type(offset) not in (int, float) or not abs(offset) <= _MOST_OFFSET:
            raise LayerRefused(f"its quant_state has nested_offset {quoted(offset)}")
        return cls(kind, (shape[0], shape[1]), sizes[0], sizes[1], float(offset))


def _plan_4bit(source: Source, layer: str, plan: Plan) -> None:
    start = tensor_name(layer, "weight")
    states = [name for name in source.entries if name.startswith(f"{start}.quant_state.bitsandbytes__")]
    if len(states) != 1 or source.entries[states[0]].nbytes > _MOST_STATE:
        raise LayerRefused("its quant_state is missing or too large")
    state = _State.parse(source.read(states[0]))
    names = {part: f"{start}.{part}" for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")}
    names = {part: name for part, name in {"weight": start, **names}.items() if name in source.entries}
    _check(source, state, names)
    n, k = state.shape
    element = find_element(_ELEMENTS[state.kind])
    table = torch.tensor(element.values, dtype=torch.float32)
    if not torch.equal(source.read(names["quant_map"]), table):
        raise LayerRefused(f"its quant_map is not the table of {state.kind}")
    format = Format.parse(f"{element.name}-g{math.gcd(state.block, k)}")

    def build(read: Read) -> QTensor:
        # High nibble first in bitsandbytes, low nibble first in qcore.
        data = read(names["weight"]).view(torch.uint8).flatten()
        scale = within_rows(_absmax(read, names, state), state.block, (n, k))
        if k % 2:  # the codes of a row begin inside a byte
            codes = torch.stack((data >> 4, data & 15), dim=1).flatten()[: n * k].view(n, k)
            return QTensor.from_codes(codes, scale, None, format)
        return QTensor(((data >> 4) | (data << 4)).view(n, k // 2), scale, None, (n, k), format)

    sources = (*names.values(), states[0])
    plan.weights.append(ForeignWeight(start, (n, k), Scheme(format), sources, build))


def _check(source: Source, state: _State, names: dict[str, str]) -> None:
    """Raise `LayerRefused` for tensors that do not match the state."""
    entries = {part: source.entries[name] for part, name in names.items()}
    n, k = state.shape
    blocks = -(-n * k // state.block)
    nested = state.nested_block > 0
    needed = {"weight", "absmax", "quant_map"} | ({"nested_absmax", "nested_quant_map"} if nested else set())
    if needed - entries.keys():
        raise LayerRefused(f"it lacks {', '.join(sorted(needed - entries.keys()))}")
    check_dtypes(source, names, weight=_STORAGE, absmax=(torch.uint8 if nested else torch.float32,))
    sizes = {"weight": -(-n * k // 2), "absmax": blocks * entries["absmax"].dtype.itemsize, "quant_map": 16 * 4}
    if nested:
        sizes |= {"nested_absmax": -(-blocks // state.nested_block) * 4, "nested_quant_map": 256 * 4}
    wrong = [part for part, size in sizes.items() if entries[part].nbytes != size]
    floats = [part for part in needed - {"weight", "absmax"} if entries[part].dtype != torch.float32]
    if wrong or floats:
        raise LayerRefused(f"the sizes or dtypes of {', '.join([*wrong, *floats])} are wrong")


def _absmax(read: Read, names: dict[str, str], state: _State) -> Tensor:
    """The scales, float32, of all blocks in a row."""
    absmax = read(names["absmax"]).flatten()
    if absmax.dtype == torch.float32:
        return absmax
    own = read(names["nested_quant_map"]).flatten()[absmax.int()]
    block = min(state.nested_block, len(own))  # the file may claim a larger one, which must not be allocated
    nested = read(names["nested_absmax"]).flatten().repeat_interleave(block)[: len(own)]
    return own * nested + state.nested_offset


def _plan_int8(source: Source, layer: str, plan: Plan) -> None:
    weight, scb = source.entries[tensor_name(layer, "weight")], source.entries[tensor_name(layer, "SCB")]
    if (
        weight.dtype != torch.int8
        or scb.dtype not in FLOAT_SCALES
        or len(weight.shape) != 2
        or scb.shape not in (weight.shape[:1], (weight.shape[0], 1))
    ):
        raise LayerRefused(f"its weight is {weight.dtype} {weight.shape}, with SCB {scb.dtype} {scb.shape}")
    layout = tensor_name(layer, "weight_format")
    if layout in source.entries:
        if source.integers(layout) != _ROW_MAJOR:
            raise LayerRefused("its weight_format is a tiled layout for old GPUs; save it with a newer bitsandbytes")
        plan.dropped.add(layout)
    n, k = weight.shape
    scheme = Scheme.parse("w8a16")

    def build(read: Read) -> QTensor:
        scale = read(scb.name).float().reshape(1, n) * torch.tensor(1.0 / 127.0)
        return QTensor.from_codes(read(weight.name), scale, None, scheme.weight)

    plan.weights.append(ForeignWeight(tensor_name(layer, "weight"), (n, k), scheme, (weight.name, scb.name), build))
