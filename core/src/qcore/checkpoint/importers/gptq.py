"""GPTQ, written by AutoGPTQ, gptqmodel, optimum and auto-round: 2, 3, 4 and 8 bits, packed along the input features.

For each layer ``qweight`` int32 (K * bits / 32, N), ``qzeros`` int32 (G, N * bits / 32), ``scales`` float (G, N), and
usually ``g_idx`` int32 (K,), the group of each column. With unsigned codes u and zero points z:

    W[n, k] = scales[g_idx[k], n] * (u[k, n] - z[g_idx[k], n])

Version 1 stores z - 1, subtracted from whole words: a zero point of 0 borrows from its neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...formats import ZeroPoint
from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
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
from .packing import SIGN_OF_NIBBLES, plain_int4, signed, unpack_words
from .turning import turned, turned_by_order

USUAL_GROUP = 128
"""``group_size`` of settings that have none, as transformers takes it for GPTQ and AWQ."""
AUTO_ROUND = ("auto-round", "intel/auto-round")
"""auto-round's names in ``quant_method``; its layouts are those of GPTQ and AWQ."""
_BITS = (2, 3, 4, 8)
ONES = {2: (0x55555555,), 3: (0x24924924, 0x92492492, 0x49249249), 4: (0x11111111,), 8: (0x01010101,)}
"""Added by gptqmodel to the words of zero points: one in every field; its words for 3 bits are in reverse order."""
_OTHER_LAYOUTS = ("gptq_p", "marlin", "bitblas", "exl2", "exl3", "qqq")


class GPTQ:
    """The importer of GPTQ checkpoints."""

    name = "gptq"

    def recognizes(self, source: Source) -> bool:
        """By ``quant_method``, or for old directories by the file ``quantize_config.json``."""
        if source.method:
            return source.method == "gptq" or (source.method in AUTO_ROUND and "awq" not in packing_format(source))
        return bool(source.json("quantize_config.json")) and any(source.layers("qweight", "qzeros", "scales"))

    def plan(self, source: Source) -> Plan:
        """Every layer with ``qweight``."""
        settings = _Settings.of(source)
        return plan_layers(source.layers("qweight", "scales"), partial(_plan_layer, source, settings))


def packing_format(source: Source) -> str:
    """The layout that auto-round names, such as ``auto_round:auto_gptq``, lower case, or empty."""
    return str(source.settings.get("packing_format", "")).lower()


@dataclass(frozen=True)
class _Settings:
    """What quantization_config says of all layers.

    ``bits``: of those without settings of their own; ``group_sizes``: theirs, then those of single layers; ``version``:
    of zero points, 1 or 2; ``symmetric``: most layers are; ``mixed``: some layers are not, according to settings of
    their own.
    """

    bits: int
    group_sizes: tuple[int, ...]
    version: int
    symmetric: bool
    by_gptqmodel: bool
    mixed: bool

    @classmethod
    def of(cls, source: Source) -> _Settings:
        settings = source.settings or source.json("quantize_config.json")
        known = Source(source.path, source.config, settings, {}, {}, source.read)
        layout = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
        layout = "marlin" if settings.get("is_marlin_format") is True else layout  # AutoGPTQ before 0.7
        if any(layout.startswith(other) for other in _OTHER_LAYOUTS):
            raise file_error(
                source.path,
                f"its checkpoint_format is {layout[:40]!r}, a different byte layout than GPTQ's.",
                "Get the checkpoint in the format gptq, or convert it with gptqmodel.",
            )
        own = known.method in AUTO_ROUND and "gptq" not in packing_format(known)
        meta = settings.get("meta")
        by_gptqmodel = isinstance(meta, dict) and "gptqmodel" in str(meta.get("quantizer", ""))
        return cls(
            known.setting("bits", int, 4),
            group_sizes(known, known.setting("group_size", int)),
            2 if layout == "gptq_v2" or own else 1,
            known.setting("sym", bool, False) is True,
            by_gptqmodel,
            any(layer.get("sym") is False for layer in _layer_settings(known)),
        )


def group_sizes(source: Source, size: int | None) -> tuple[int, ...]:
    """``size``, that of the settings or None if they have none, and those of single layers."""
    own = dict.fromkeys(layer.get("group_size") for layer in _layer_settings(source))
    return (size or 0, *([USUAL_GROUP] if size is None else []), *(size for size in own if type(size) is int))


def _layer_settings(source: Source) -> Iterator[dict[str, Any]]:
    """Settings of single layers by name or pattern: gptqmodel's ``dynamic``, auto-round's ``extra_config``."""
    for name in ("dynamic", "extra_config"):
        layers = source.settings.get(name)
        yield from (one for one in (layers.values() if isinstance(layers, dict) else ()) if isinstance(one, dict))


def _plan_layer(source: Source, settings: _Settings, layer: str, plan: Plan) -> None:
    names = {part: tensor_name(layer, part) for part in ("qweight", "qzeros", "scales", "g_idx")}
    names = {part: name for part, name in names.items() if name in source.entries}
    if "qzeros" not in names:
        raise LayerRefused("it has no qzeros")
    shapes = {part: source.entries[name].shape for part, name in names.items()}
    if any(len(shape) != (1 if part == "g_idx" else 2) for part, shape in shapes.items()):
        raise LayerRefused(f"its tensors have shapes {shapes}")
    check_dtypes(source, names, qweight=(torch.int32,), qzeros=(torch.int32,), g_idx=INTEGERS)
    n, groups = shapes["qweight"][1], shapes["scales"][0]
    bits, k = _bits_and_columns(settings.bits, shapes)
    if shapes["scales"][1] != n or shapes["qzeros"] != (groups, -(-n * bits // 32)) or not groups:
        raise LayerRefused(f"its tensors have shapes {shapes}, which are inconsistent")
    g_idx = source.read(names["g_idx"]) if shapes.get("g_idx") == (k,) else None
    # The first group is a full one, whatever the settings say: layers may have settings of their own.
    wanted = 0 if g_idx is None else int((g_idx == 0).sum())
    size = group_size(k, groups, *([wanted] if wanted else settings.group_sizes))
    order = None if g_idx is None else order_by_group(g_idx, size)
    zeros = _zeros(source.read(names["qzeros"]), bits, n, settings)
    centre = 1 << (bits - 1)
    zero = None if bool((zeros == centre).all()) else signed(zeros.contiguous(), bits).contiguous()
    format = int_format(8 if bits == 8 else 4, size, ZeroPoint.NONE if zero is None else ZeroPoint.INT)
    dtype = source.entries[names["scales"]].dtype

    def build(read: Read) -> QTensor:
        data = _data(read(names["qweight"]), bits, k, order)
        return QTensor(data, read(names["scales"]), zero, (n, k), format, order=order)

    plan.weights.append(
        ForeignWeight(
            tensor_name(layer, "weight"), (n, k), Scheme(format), tuple(names.values()), build, dtype, order is not None
        )
    )


def _bits_and_columns(bits: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Bits and K of a layer, which may differ from ``bits``, those of the settings.

    ``g_idx`` has one entry per column; without it, ``qzeros`` reveals the bits, and whole words are assumed.
    """
    words, n = shapes["qweight"]
    known = (bits, *(b for b in _BITS if b != bits)) if bits in _BITS else _BITS
    k = shapes.get("g_idx", (0,))[0]
    if k:
        found = next((b for b in known if -(-k * b // 32) == words), None)
        each = 32 * words / k
    else:
        found = next((b for b in known if -(-n * b // 32) == shapes["qzeros"][1]), None)
        each = 32 * shapes["qzeros"][1] / max(n, 1)
    if found is None:
        raise LayerRefused(f"{each:.3g} bits per weight; qcore reads 2, 3, 4 and 8")
    return found, k or words * 32 // found


def _zeros(packed: Tensor, bits: int, n: int, settings: _Settings) -> Tensor:
    """Unsigned zero points, uint8 (G, N).

    Some files name the wrong version. If weights are symmetric, every zero point is the centre of the codes, which
    reveals how they are stored.
    """
    centre = 1 << (bits - 1)
    plain = unpack_words(packed, bits, n, dim=1)
    by_word = unpack_words(_plus(packed, ONES[bits]), bits, n, dim=1)
    # AutoGPTQ subtracts before it packs, which makes a difference for 3 bits, whose fields cross words.
    by_field = (plain + 1) & (2 * centre - 1) if bits == 3 else by_word
    if settings.symmetric:
        found = next((z for z in (by_word, by_field, plain) if bool((z == centre).all())), None)
        if found is not None:
            return found
        if not settings.mixed:
            raise LayerRefused("its settings say symmetric, but its zero points differ from the centre of the codes")
    return plain if settings.version == 2 else by_word if settings.by_gptqmodel else by_field


def _plus(packed: Tensor, ones: tuple[int, ...]) -> Tensor:
    """Add words to words modulo 2**32."""
    signed_ones = [word - (1 << 32) if word >> 31 else word for word in ones]
    repeated = torch.tensor(signed_ones, dtype=torch.int32).repeat(-(-packed.shape[1] // len(ones)))
    return packed + repeated[: packed.shape[1]]


def _data(packed: Tensor, bits: int, k: int, order: Tensor | None) -> Tensor:
    """``qweight`` as the data of PLAIN (N, ...)."""
    if bits in (4, 8) and k * bits == 32 * packed.shape[0]:
        # The codes of a word are adjacent codes of one output: PLAIN except for the sign and the order of words.
        flipped = SIGN_OF_NIBBLES if bits == 4 else 128
        data = turned_by_order(packed, bits, order) if order is not None else turned(packed, flipped).view(torch.uint8)
        return data if bits == 4 else data.view(torch.int8)
    codes = unpack_words(packed, bits, k, dim=0).t()
    if bits == 8:
        return signed(codes.contiguous() if order is None else codes.index_select(1, order), 8)
    centre = 1 << (bits - 1)
    return plain_int4(codes if centre == 8 else codes + (8 - centre), order)
