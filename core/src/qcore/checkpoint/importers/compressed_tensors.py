"""compressed-tensors, written by llm-compressor and vLLM's tools: integers, fp8, NVFP4, MXFP4 and MXFP8.

The storage of a layer follows from its tensors; ``config_groups`` in the settings contain the number of bits of the
codes and the quantization of activations. With h the centre of the codes:

- ``weight_packed`` int32 (N, words), codes plus h packed along K; ``weight_zero_point`` int32, packed along N, or int8
  (N, G) in old files;
- ``weight`` int8 (N, K), codes of any number of bits; ``weight_zero_point`` int8;
- ``weight`` e4m3fn (N, K) with float scales, or with e8m0 ones for groups of 32 (MXFP8);
- ``weight_packed`` uint8 (N, K / 2), e2m1, low nibble first: with e8m0 scales for groups of 32 (MXFP4), or with e4m3fn
  ones for groups of 16 and ``weight_global_scale``, which divides them (NVFP4).

Scales are (N, G), or one for the tensor. ``weight_g_idx`` (K,) is the group of each column; newer versions of the tool
no longer read it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...errors import FormatError, dtype_name
from ...formats import FLOAT_SCALES, Format, ZeroPoint
from ...weights.qtensor import QTensor
from ..header import file_error
from .base import (
    INTEGERS,
    ForeignWeight,
    LayerRefused,
    Plan,
    Read,
    Source,
    check_dtypes,
    group_size,
    int_format,
    order_by_group,
    plan_layers,
    tensor_name,
)
from .compressed_tensors_settings import Group, Groups, activation_of, check_transforms, groups_of
from .fp8 import ATTENTION_PARAMETERS, E8M0, fp8_format, scale_blocks, spread_scale
from .packing import SIGN_OF_NIBBLES, plain_int4, signed, unpack_words

_REFUSED = ("marlin", "sparse", "dense", "bitmask")
_KEEPS_ZEROS, _CROSSES_WORDS = 10, 20
"""Versions 0.x of the tool: earlier ones left out zero points that are all 0, and let no code cross words."""
_ONE = ((), (1,), (1, 1))
"""Shapes of a scale or zero point for the whole tensor."""
_UNUSED = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".weight_shape"),
    *(".output_scale", ".output_zero_point", *ATTENTION_PARAMETERS),
)


class CompressedTensors:
    """The importer of compressed-tensors' checkpoints."""

    name = "compressed-tensors"

    def recognizes(self, source: Source) -> bool:
        """By ``quant_method``."""
        return source.method in ("compressed-tensors", "compressed_tensors")

    def plan(self, source: Source) -> Plan:
        """Every layer with ``weight_scale``."""
        groups = groups_of(source)
        check_transforms(source)
        formats = {str(source.settings.get("format", "")), *groups.formats}
        refused = next((text for text in formats if text.startswith(_REFUSED)), None)
        if refused is not None:
            raise file_error(
                source.path,
                f"its format is {refused[:40]!r}, which qcore does not read.",
                "Get the checkpoint in pack-quantized, int-quantized or float-quantized.",
            )
        plan = plan_layers(source.layers("weight_scale"), partial(_plan_layer, source, groups))
        used = plan.used
        plan.dropped |= {name for name in source.entries if f".{name}".endswith(_UNUSED) and name not in used}
        return plan


@dataclass(frozen=True)
class _Layer:
    """The stored tensors of a layer by the last part of their names, and its group in the settings."""

    source: Source
    name: str
    group: Group
    names: dict[str, str]

    def shape(self, part: str) -> tuple[int, ...]:
        return self.source.entries[self.names[part]].shape

    def dtype(self, part: str) -> torch.dtype:
        return self.source.entries[self.names[part]].dtype

    def matrix(self, part: str) -> tuple[int, int]:
        shape = self.shape(part)
        if len(shape) != 2:
            raise LayerRefused(f"its {part} has shape {shape}")
        return shape[0], shape[1]


_Planned = tuple[tuple[int, int], Format, Callable[[Read], QTensor], torch.dtype, bool]
"""Shape, format, the function that builds the weight, the dtype of its scales, and whether it has a column order."""
_PARTS = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale", "weight_g_idx")


def _plan_layer(source: Source, groups: Groups, name: str, plan: Plan) -> None:
    group = groups.find(name)
    names = {part: tensor_name(name, part) for part in _PARTS if tensor_name(name, part) in source.entries}
    layer = _Layer(source, name, group, names)
    _leave_out_zeros(layer, plan)
    _check_parts(layer)
    if "weight_packed" in names:
        planned = _packed_int(layer) if layer.dtype("weight_packed") == torch.int32 else _packed_fp4(layer)
    else:
        planned = _whole_int(layer) if layer.dtype("weight") == torch.int8 else _whole_fp8(layer)
    shape, format, build, dtype, ordered = planned
    scheme = activation_of(source, name, group, format, plan)
    sources, factor = tuple(names.values()), names.get("weight_global_scale", "")
    plan.weights.append(
        ForeignWeight(tensor_name(name, "weight"), shape, scheme, sources, build, dtype, ordered, factor)
    )


def _leave_out_zeros(layer: _Layer, plan: Plan) -> None:
    """Leave out zero points of float codes if all of them are zero. Raises `LayerRefused` for others."""
    names = layer.names
    codes = {layer.dtype(part) for part in ("weight", "weight_packed") if part in names}
    if "weight_zero_point" not in names or codes & {torch.int32, torch.int8}:
        return
    if bool(layer.source.read(names["weight_zero_point"]).float().any()):
        raise LayerRefused("its weight_zero_point is not zero, although its codes are floats")
    plan.dropped.add(names.pop("weight_zero_point"))


def _check_parts(layer: _Layer) -> None:
    """Raise `LayerRefused` unless the tensors have the dtypes of the layer's settings, and none is missing."""
    names = layer.names
    weight = next((part for part in ("weight_packed", "weight") if part in names), None)
    if weight is None:
        raise LayerRefused("it has a scale, but no weight")
    codes = layer.dtype(weight)
    points = (torch.int32, torch.int8) if "weight_packed" in names else INTEGERS
    check_dtypes(layer.source, names, weight_zero_point=points, weight_g_idx=INTEGERS, weight_global_scale=FLOAT_SCALES)
    kind = "int" if codes in (torch.int32, torch.int8) else "float"
    if layer.group.kind not in ("", kind):
        raise LayerRefused(f"its codes are {dtype_name(codes)}, but its settings say {layer.group.kind[:20]!r}")
    lost = not layer.group.symmetric and kind == "int" and "weight_zero_point" not in names
    if lost and not _is_before(layer.source, _KEEPS_ZEROS):
        raise LayerRefused("its settings say asymmetric, but it has no zero points")


def _packed_int(layer: _Layer) -> _Planned:
    bits = layer.group.bits
    n, words = layer.matrix("weight_packed")
    k, whole = _columns(layer, n, words, bits)
    groups = _groups(layer, n)
    size = group_size(k, groups, layer.group.size)
    names, has_zero = layer.names, "weight_zero_point" in layer.names
    format = int_format(4 if bits <= 4 else 8, size, ZeroPoint.INT if has_zero else ZeroPoint.NONE)
    order = _order(layer, k, size)
    _check_zeros(layer, -(-n // (32 // bits)) if whole else -(-n * bits // 32), (n, groups))

    def build(read: Read) -> QTensor:
        packed, scale = read(names["weight_packed"]), _of_rows(read(names["weight_scale"]), n, groups)
        points = read(names["weight_zero_point"]) if has_zero else None
        if points is not None and points.dtype != torch.int8:
            points = signed(unpack_words(points, bits, n, dim=0, whole=whole), bits)
        zero = None if points is None else _of_rows(points, n, groups)
        if bits == 4 and order is None and k == 8 * words:
            data = packed.view(torch.uint8) ^ SIGN_OF_NIBBLES
            return QTensor(data, scale, zero, (n, k), format)
        codes = unpack_words(packed, bits, k, dim=1, whole=whole)
        centre = 1 << (bits - 1)
        if bits <= 4:
            data = plain_int4(codes if centre == 8 else codes + (8 - centre), order)
        else:
            codes = codes if order is None else codes.index_select(1, order)
            data = signed(codes if centre == 128 else codes + (128 - centre), 8)
        return QTensor(data, scale, zero, (n, k), format, order=order)

    return (n, k), format, build, layer.dtype("weight_scale"), order is not None


def _check_zeros(layer: _Layer, words: int, shape: tuple[int, int]) -> None:
    """Raise `LayerRefused` unless zero points are packed along N, or whole, int8.

    They are whole in files of old versions, (N, G), and if the tensor has one.
    """
    if "weight_zero_point" not in layer.names:
        return
    found, whole = layer.shape("weight_zero_point"), layer.dtype("weight_zero_point") == torch.int8
    one = whole and found in _ONE and layer.shape("weight_scale") in _ONE
    if not one and found != (shape if whole else (words, shape[1])):
        raise LayerRefused(f"its zero points have shape {found}")


def _order(layer: _Layer, k: int, size: int | None) -> Tensor | None:
    """The order of columns according to ``weight_g_idx``, None if there is none."""
    if "weight_g_idx" not in layer.names:
        return None
    if layer.shape("weight_g_idx") != (k,):
        raise LayerRefused(f"its weight_g_idx has shape {layer.shape('weight_g_idx')}")
    g_idx = layer.source.read(layer.names["weight_g_idx"])
    # The tool marks columns that were never sorted by -1.
    return None if bool((g_idx == -1).any()) else order_by_group(g_idx, size)


def _columns(layer: _Layer, n: int, words: int, bits: int) -> tuple[int, bool]:
    """K according to ``weight_shape``, if the words can hold it, and whether no code crosses words.

    Older versions of the tool leave the highest bits of a word empty; 0.20 packs all bits consecutively.
    """
    name, most = tensor_name(layer.name, "weight_shape"), words * 32 // bits
    entry = layer.source.entries.get(name)
    if entry is None:
        return most, False
    if entry.shape != (2,) or entry.dtype not in (torch.int64, torch.int32):
        raise LayerRefused(f"its weight_shape is {entry.dtype} of shape {entry.shape}")
    rows, k = (int(size) for size in layer.source.read(name))
    if rows == n and k > 0 and -(-k // (32 // bits)) == words:
        return k, -(-k * bits // 32) != words or _is_before(layer.source, _CROSSES_WORDS)
    if rows != n or not 0 < k <= most or -(-k * bits // 32) != words:
        raise LayerRefused(f"its weight_shape {(rows, k)} does not match weight_packed {(n, words)} with {bits} bits")
    return k, False


def _is_before(source: Source, minor: int) -> bool:
    """Whether version 0.x of the tool with x below ``minor`` wrote the file."""
    version = re.match(r"0\.(\d{1,4})(\D|$)", str(source.settings.get("version", "")))
    return version is not None and int(version[1]) < minor


def _groups(layer: _Layer, n: int) -> int:
    """The number of scales per row."""
    shape = layer.shape("weight_scale")
    if shape in (*_ONE, (n,)):
        return 1
    if len(shape) != 2 or shape[0] != n or not shape[1]:
        raise LayerRefused(f"its scales have shape {shape}; qcore reads (N, 1) and (N, G)")
    return shape[1]


def _whole_int(layer: _Layer) -> _Planned:
    n, k = layer.matrix("weight")
    groups = _groups(layer, n)
    names, has_zero = layer.names, "weight_zero_point" in layer.names
    zero = ZeroPoint.INT if has_zero else ZeroPoint.NONE
    format = int_format(4 if layer.group.bits <= 4 else 8, group_size(k, groups, layer.group.size), zero)

    def build(read: Read) -> QTensor:
        scale = _of_rows(read(names["weight_scale"]), n, groups)
        points = _as_int8(read(names["weight_zero_point"])) if has_zero else None
        own = None if points is None else _of_rows(points, n, groups)
        return QTensor.from_codes(read(names["weight"]), scale, own, format)

    return (n, k), format, build, layer.dtype("weight_scale"), False


def _of_rows(values: Tensor, n: int, groups: int) -> Tensor:
    """Scales or zero points of rows and groups, or one for the whole tensor, as ``(G, N)``."""
    return values.reshape(-1, groups).expand(n, groups).t().contiguous()


def _as_int8(points: Tensor) -> Tensor:
    found = points.to(torch.int8)
    if not torch.equal(found.long(), points.long()):
        raise FormatError("its zero points are outside the range of int8.")
    return found


def _whole_fp8(layer: _Layer) -> _Planned:
    n, k = layer.matrix("weight")
    names, scale = layer.names, layer.shape("weight_scale")
    if layer.dtype("weight") != torch.float8_e4m3fn:
        raise LayerRefused(f"its weight is {layer.dtype('weight')}; qcore reads int8 and float8_e4m3fn")
    if len(scale) == 2 and scale[0] == n and scale[1] > 1 and layer.group.block is None:
        rows, size = 1, group_size(k, scale[1], layer.group.size)
    else:
        rows, size = scale_blocks(scale, (n, k), layer.group.block)
    format = fp8_format(size, powers=layer.dtype("weight_scale") in E8M0)

    def build(read: Read) -> QTensor:
        spread = spread_scale(read(names["weight_scale"]), n, rows)
        return QTensor.from_codes(read(names["weight"]).view(torch.uint8), spread, None, format)

    return (n, k), format, build, layer.dtype("weight_scale"), False


def _packed_fp4(layer: _Layer) -> _Planned:
    n, half = layer.matrix("weight_packed")
    k, names = 2 * half, layer.names
    scale, dtype = layer.shape("weight_scale"), layer.dtype("weight_scale")
    two = "weight_global_scale" in names
    wanted, size = ((torch.float8_e4m3fn,), 16) if two else (E8M0, 32)
    if layer.dtype("weight_packed") != torch.uint8 or dtype not in wanted or scale != (n, -(-k // size)):
        raise LayerRefused(f"its tensors are {layer.dtype('weight_packed')} {(n, half)} and {dtype} {scale}")
    if two and layer.shape("weight_global_scale") not in ((), (1,)):
        raise LayerRefused(f"its global scale has shape {layer.shape('weight_global_scale')}")
    format = Format.parse("fp4-g16-e4m3d" if two else "fp4-g32-e8m0")

    def build(read: Read) -> QTensor:
        factor = read(names["weight_global_scale"]).float().reshape(()) if two else None
        own = read(names["weight_scale"]).t().contiguous()
        own = own if two else own.view(torch.uint8)
        return QTensor(read(names["weight_packed"]), own, None, (n, k), format, global_scale=factor)

    return (n, k), format, build, torch.float32, False
