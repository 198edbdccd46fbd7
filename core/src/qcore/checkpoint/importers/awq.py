"""AWQ, written by autoawq, older versions of llmcompressor and auto-round: 4 bits, one zero point per group.

With unsigned codes u and zero points z, ``W[n, k] = (u - z) * scale``; the zero points are stored unchanged. P is
``[0, 2, 4, 6, 1, 3, 5, 7]``: nibble i of a word of GEMM belongs to output ``8 c + P[i]``.

=====  ==================================================================================================
gemm   ``qweight`` int32 (K, N / 8) and ``qzeros`` int32 (G, N / 8), outputs in the order P; ``scales`` (G, N)
gemv   ``qweight`` int32 (N, K / 8) and ``qzeros`` int32 (N, W), sequential; ``scales`` (N, 8 W), G of them used
=====  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...formats import ZeroPoint
from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
from ..header import file_error
from .base import (
    USUAL_GROUPS,
    ForeignWeight,
    LayerRefused,
    Plan,
    Read,
    Source,
    group_size,
    int_format,
    plan_layers,
    tensor_name,
)
from .gptq import AUTO_ROUND, group_sizes, packing_format
from .packing import SIGN_OF_NIBBLES, signed, unpack_words
from .turning import turned_awq

LOW_OUTPUTS = (0, 4, 1, 5)
"""The outputs (of eight) in the low nibbles of the four bytes of a word."""
HIGH_OUTPUTS = (2, 6, 3, 7)
_CENTRE = 8
_OLD_SETTINGS = "quant_config.json"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class AWQ:
    """The importer of AWQ checkpoints."""

    name = "awq"

    def recognizes(self, source: Source) -> bool:
        """By ``quant_method``, by auto-round's ``packing_format``, or for old directories by ``quant_config.json``."""
        if source.method:
            return source.method == "awq" or (source.method in AUTO_ROUND and "awq" in packing_format(source))
        return any(source.layers("qweight", "scales")) and "w_bit" in source.json(_OLD_SETTINGS)

    def plan(self, source: Source) -> Plan:
        """Every layer with ``qweight``; those of ``modules_to_not_convert`` have none."""
        source = replace(source, settings=source.settings or source.json(_OLD_SETTINGS))
        layout = _layout(source)
        bits = source.setting("bits", int) or source.setting("w_bit", int, 4)
        if bits != 4:
            what = f"its quantization_config has {bits} bits; qcore reads AWQ with 4."
            raise file_error(source.path, what, "Get the checkpoint in the format gptq.")
        wanted = source.setting("group_size", int)
        wanted = source.setting("q_group_size", int) if wanted is None else wanted
        read_layer = {"gemm": _plan_gemm, "gemv": _plan_gemv}[layout]
        return plan_layers(source.layers("qweight", "scales"), partial(read_layer, source, group_sizes(source, wanted)))


def _layout(source: Source) -> str:
    """``gemm`` or ``gemv``. Raises `CheckpointError` for the interleaved layouts."""
    found = source.settings.get("version") or source.settings.get("format") or "gemm"
    layout = "gemm" if source.method in AUTO_ROUND else str(found).lower()
    if layout in ("gemm", "gemv"):
        return layout
    raise file_error(
        source.path,
        f"its AWQ version is {layout[:40]!r}; qcore reads the layouts 'gemm' and 'gemv'.",
        "Get the checkpoint in the version gemm, or quantize the float model with qcore.",
    )


def _parts(source: Source, layer: str) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a layer, by part."""
    names = {part: tensor_name(layer, part) for part in ("qweight", "qzeros", "scales")}
    names = {part: name for part, name in names.items() if name in source.entries}
    if "qzeros" not in names and source.settings.get("zero_point") is not False:
        raise LayerRefused("it has no qzeros, although zero_point is not false")
    entries = {part: source.entries[name] for part, name in names.items()}
    shapes = {part: tuple(entry.shape) for part, entry in entries.items()}
    if any(len(shape) != 2 or not all(shape) for shape in shapes.values()):
        raise LayerRefused(f"its tensors have shapes {shapes}")
    wrong = [part for part, entry in entries.items() if entry.dtype not in ((torch.int32,), _FLOATS)[part == "scales"]]
    if wrong:
        raise LayerRefused(f"its {wrong[0]} is {entries[wrong[0]].dtype}")
    return names, shapes


def _plan_gemm(source: Source, wanted: tuple[int, ...], layer: str, plan: Plan) -> None:
    names, shapes = _parts(source, layer)
    (k, words), (groups, n) = shapes["qweight"], shapes["scales"]
    if n != 8 * words or shapes.get("qzeros", (groups, words)) != (groups, words) or groups > k:
        raise LayerRefused(f"its tensors have shapes {shapes}, which are inconsistent")
    size = group_size(k, groups, *wanted)
    zero = _zero(unpack_gemm(source.read(names["qzeros"]))) if "qzeros" in names else None
    _add(source, layer, names, (n, k), size, zero, turned_awq, lambda scales: scales, plan)


def _plan_gemv(source: Source, wanted: tuple[int, ...], layer: str, plan: Plan) -> None:
    names, shapes = _parts(source, layer)
    (n, words), (rows, stored) = shapes["qweight"], shapes["scales"]
    k = 8 * words
    named = next((size for size in wanted if size), -1)
    size = named if 0 < named < k else None
    groups = -(-k // size) if size else 1
    zeros = shapes.get("qzeros", (n, -(-groups // 8)))
    if rows != n or stored < groups or zeros[0] != n or 8 * zeros[1] < groups:
        raise LayerRefused(f"its tensors have shapes {shapes}, which are inconsistent")
    used = 1 + max(source.read(names["scales"]).any(dim=0).nonzero().flatten().tolist(), default=groups - 1)
    # Zeros fill up words. Fewer scales than groups may be those of a last group of zeros, unless another size fits.
    if used > groups or (used < groups and k % used == 0 and k // used in USUAL_GROUPS):
        raise LayerRefused(f"its rows have {used} scales, which is not {k} columns by a group_size of {size or k}")
    zero = None
    if "qzeros" in names:
        zero = _zero(unpack_words(source.read(names["qzeros"]), 4, groups, dim=1).t())
    _add(source, layer, names, (n, k), size, zero, _gemv_to_plain, lambda scales: scales[:, :groups].t(), plan)


def _add(
    source: Source,
    layer: str,
    names: dict[str, str],
    shape: tuple[int, int],
    size: int | None,
    zero: Tensor | None,
    to_plain: Callable[[Tensor], Tensor],
    to_scale: Callable[[Tensor], Tensor],
    plan: Plan,
) -> None:
    format = int_format(4, size, ZeroPoint.NONE if zero is None else ZeroPoint.INT)

    def build(read: Read) -> QTensor:
        scale = to_scale(read(names["scales"])).contiguous()
        return QTensor(to_plain(read(names["qweight"])), scale, zero, shape, format)

    dtype = source.entries[names["scales"]].dtype
    plan.weights.append(
        ForeignWeight(tensor_name(layer, "weight"), shape, Scheme(format), tuple(names.values()), build, dtype)
    )


def _zero(unsigned: Tensor) -> Tensor | None:
    """Zero points in qcore's form, int8 (G, N), or None if all are the centre of the codes."""
    return None if bool((unsigned == _CENTRE).all()) else signed(unsigned.contiguous(), 4)


def unpack_gemm(words: Tensor) -> Tensor:
    """Unsigned codes, uint8 (R, 8 C), of int32 words (R, C) with outputs in the order P."""
    raw = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    codes = torch.empty(*words.shape, 8, dtype=torch.uint8)
    codes[..., LOW_OUTPUTS] = raw & 15
    codes[..., HIGH_OUTPUTS] = raw >> 4
    return codes.flatten(1)


def _gemv_to_plain(words: Tensor) -> Tensor:
    """``qweight`` int32 (N, K / 8), packed sequentially: a byte holds two neighbouring codes, as in PLAIN."""
    return words.contiguous().view(torch.uint8).bitwise_xor_(SIGN_OF_NIBBLES)
