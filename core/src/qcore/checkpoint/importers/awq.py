"""AWQ, as AutoAWQ, llm-compressor's older versions and auto-round write it: 4 bits with zero points.

GEMM: ``qweight`` int32 (K, N / 8), packed along the output features; ``qzeros`` int32 (G, N / 8); ``scales`` float
(G, N). Nibble i of a word holds output ``0, 2, 4, 6, 1, 3, 5, 7`` of its eight. GEMV: ``qweight`` int32 (N, K / 8) in
order, ``qzeros`` int32 (N, words), ``scales`` (N, at least G). In both, with unsigned codes u and zero points z:

    W[n, k] = scales[g, n] * (u[k, n] - z[g, n])
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...formats import Format, ZeroPoint
from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
from ..header import file_error
from .base import ForeignWeight, LayerRefused, Plan, Read, Source, group_size, int_format, plan_layers
from .gptq import AUTO_ROUND, packing_format
from .packing import SIGN_OF_NIBBLES, plain_int4, signed, unpack_words

_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble that holds each of a word's eight outputs."""


class AWQ:
    """The importer of AWQ checkpoints."""

    name = "awq"

    def recognizes(self, source: Source) -> bool:
        """By ``quant_method``."""
        return source.method == "awq" or (source.method in AUTO_ROUND and "awq" in packing_format(source))

    def plan(self, source: Source) -> Plan:
        """Every layer with ``qweight``."""
        layout = "gemm" if source.method in AUTO_ROUND else str(source.settings.get("version") or "gemm").lower()
        if layout not in ("gemm", "gemv"):
            raise file_error(
                source.path,
                f"its AWQ version is {layout[:40]!r}, another layout of the bytes.",
                "Get the checkpoint in the version gemm.",
            )
        bits = source.setting("bits", int) or source.setting("w_bit", int) or 4
        if bits != 4:
            raise file_error(source.path, f"AWQ with {bits} bits is not defined.", "Get the checkpoint with 4 bits.")
        group = source.setting("group_size", int) or source.setting("q_group_size", int) or -1
        plan_one = _plan_gemm if layout == "gemm" else _plan_gemv
        return plan_layers(source.layers("qweight", "scales"), partial(plan_one, source, group))


def _plan_gemm(source: Source, group: int, layer: str, plan: Plan) -> None:
    names, (k, words), (groups, n) = _described(source, layer)
    shape = source.entries[names["qzeros"]].shape if "qzeros" in names else (groups, words)
    if n != 8 * words or shape != (groups, words) or not groups:
        raise LayerRefused(f"its tensors have shapes {(k, words)}, {shape} and {(groups, n)}, which contradict")
    format = _format(k, groups, group, has_zeros="qzeros" in names)

    def build(read: Read) -> QTensor:
        zero = signed(_unpack_gemm(read(names["qzeros"])), 4) if "qzeros" in names else None
        data = _data_gemm(read(names["qweight"]))
        return QTensor(data, read(names["scales"]), zero, (n, k), format)

    _add(source, layer, (n, k), format, names, build, plan)


def _plan_gemv(source: Source, group: int, layer: str, plan: Plan) -> None:
    names, (n, words), (rows, padded) = _described(source, layer)
    k = 8 * words
    groups = -(-k // group) if group > 0 else 1
    zeros = source.entries[names["qzeros"]].shape if "qzeros" in names else (n, -(-groups // 8))
    if rows != n or padded < groups or zeros[0] != n or 8 * zeros[1] < groups or not groups:
        raise LayerRefused(f"its tensors have shapes {(n, words)}, {zeros} and {(rows, padded)}, which contradict")
    format = _format(k, groups, group, has_zeros="qzeros" in names)

    def build(read: Read) -> QTensor:
        zero = None
        if "qzeros" in names:
            zero = signed(unpack_words(read(names["qzeros"]), 4, groups, dim=1), 4).t().contiguous()
        data = plain_int4(unpack_words(read(names["qweight"]), 4, k, dim=1))
        return QTensor(data, read(names["scales"])[:, :groups].t(), zero, (n, k), format)

    _add(source, layer, (n, k), format, names, build, plan)


def _described(source: Source, layer: str) -> tuple[dict[str, str], tuple[int, int], tuple[int, int]]:
    """The names of a layer's tensors, and the shapes of ``qweight`` and ``scales``."""
    names = {part: f"{layer}.{part}" for part in ("qweight", "qzeros", "scales")}
    names = {part: name for part, name in names.items() if name in source.entries}
    entries = {part: source.entries[name] for part, name in names.items()}
    if any(len(entry.shape) != 2 for entry in entries.values()):
        raise LayerRefused(f"its tensors have shapes {[entry.shape for entry in entries.values()]}")
    if any(entry.dtype != torch.int32 for part, entry in entries.items() if part != "scales"):
        raise LayerRefused("its codes are not int32")
    (a, b), (c, d) = entries["qweight"].shape, entries["scales"].shape
    return names, (a, b), (c, d)


def _format(k: int, groups: int, group: int, *, has_zeros: bool) -> Format:
    return int_format(4, group_size(k, groups, group), ZeroPoint.INT if has_zeros else ZeroPoint.NONE)


def _add(
    source: Source,
    layer: str,
    shape: tuple[int, int],
    format: Format,
    names: dict[str, str],
    build: Callable[[Read], QTensor],
    plan: Plan,
) -> None:
    dtype = source.entries[names["scales"]].dtype
    plan.weights.append(ForeignWeight(f"{layer}.weight", shape, Scheme(format), tuple(names.values()), build, dtype))


def _unpack_gemm(words: Tensor) -> Tensor:
    """Codes, uint8 (rows, outputs), of words ``(rows, outputs / 8)``."""
    nibbles = unpack_words(words, 4, 8 * words.shape[1], dim=1)
    return nibbles.view(*words.shape, 8)[..., list(_PLACE)].flatten(1)


def _data_gemm(words: Tensor) -> Tensor:
    """The data of PLAIN, uint8 (N, ceil(K / 2)), of words ``(K, N / 8)``."""
    k, count = words.shape
    if k % 2:
        return plain_int4(_unpack_gemm(words).t())
    # Byte b of a word has one output in its low nibble and one in its high nibble; those of two columns make one byte.
    parts = words.t().contiguous().view(torch.uint8).view(count, k // 2, 2, 4)
    data = torch.empty(count, 8, k // 2, dtype=torch.uint8)
    for output, place in enumerate(_PLACE):
        even, odd = parts[:, :, 0, place // 2], parts[:, :, 1, place // 2]
        data[:, output] = (even >> 4) | (odd & 0xF0) if place % 2 else (even & 15) | (odd << 4)
    return data.view(8 * count, k // 2) ^ SIGN_OF_NIBBLES
