"""Products with int8 activations: quantize x, multiply codes tile by tile, one epilogue."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qcore_triton import host
from qcore_triton.codes import Codes, Given
from qcore_triton.geometry import power_of_two
from qcore_triton.kernels.int8_gemm import tiles
from qcore_triton.weights import Weight

from . import quantizing
from .device import empty, launch, options

_BAND = 8
"""Rows of tiles that are computed consecutively, so that the weight stays in the cache."""


class How(NamedTuple):
    """The quantization of activations and of results.

    **Fields:** ``symmetric``: whether parameters computed per token are; ``given``: parameters instead of those;
    ``out``: parameters of int8 results; ``dtype``: of the result.
    """

    symmetric: bool
    given: Given | None
    out: Given | None
    dtype: torch.dtype


class Tile(NamedTuple):
    """Rows and columns of a program's part of the result, and its sub-groups."""

    bm: int
    bn: int
    warps: int


def tile_for(m: int, n: int) -> Tile:
    """The tile for a result ``(m, n)``.

    Not measured: no such device was available. DPAS computes 8 x 16 of the result per sub-group in a step of 32 codes.
    A sub-group gets one such block if rows are few, to keep as many sub-groups busy as possible, else two. Four would
    use operands twice, but with two sums for each of them (of a group, and scaled) and the operands of a step of 128
    codes, they exceed the 8 KiB of registers of a sub-group.
    """
    narrow = max(16, power_of_two(n))
    if m <= 16:
        bn = min(32, narrow)
        return Tile(16, bn, bn // 8)
    bn = min(64, narrow)
    return Tile(32, bn, bn // 8) if m <= 64 else Tile(64, bn, bn // 4)


def product(x: Tensor, weight: Weight, sums: Tensor | None, bias: Tensor | None, how: How) -> Tensor:
    """Quantize x ``(M, K)`` and multiply: ``(M, N)``. See `quantizing.rows` and `linear`."""
    total = host.totals_needed(weight)
    codes = quantizing.rows(x, how.symmetric, how.given, total=total, order=weight.order)
    return linear(codes, weight, sums, bias, how)


def linear(codes: Codes, weight: Weight, sums: Tensor | None, bias: Tensor | None, how: How) -> Tensor:
    """``(M, N)``: codes times a packed weight, scaled, plus bias, rounded once.

    ``sums``: int32 ``(G, pitch_of(N))``, needed if the codes have a zero point.
    """
    m, n = codes.q.shape[0], weight.n
    y = empty((m, n), how.dtype, codes.q.device)
    if not m:
        return y
    p, grouped, per = host.blocking(weight)
    blocks, pitch = host.steps(weight, p)
    of_x, of_w = host.operands(codes, weight, sums)
    end = host.end_of(bias, how.out, y)
    x_sums = host.x_sums(launch, empty, codes, weight.zero_kind, grouped, p, blocks, **options(4))
    tile = tile_for(m, n)
    launch(
        tiles, (-(-m // tile.bm) * -(-n // tile.bn),),
        codes.q, *of_x, weight.data, *of_w, x_sums, *end.args, y, *end.numbers, m, n, weight.k, blocks,
        codes.q.shape[1] // 128, pitch,
        BITS=weight.bits, P=p, BN=tile.bn, BM=tile.bm, STAGES=2, GROUP_M=_BAND, SWAP=False, GROUPED=grouped, PER=per,
        WZERO=weight.zero_kind, XZERO=codes.zero is not None, ALIGNED=n % 16 == 0, ASM=False,
        **end.meta, **options(tile.warps),
    )  # fmt: skip
    return y
