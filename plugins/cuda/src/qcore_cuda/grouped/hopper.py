"""`kernels.grouped_hopper` and its launch: many rows of 16-bit floats on sm_90."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qcore_triton.geometry import power_of_two
from qcore_triton.weights import FLOAT_ZERO

from ..products.base import decoding
from ..products.gemm_hopper import parameter_rows, stages_of
from ..runtime import hopper
from ..runtime.device import Device
from ..runtime.hopper import descriptor
from ..runtime.launch import launch, options
from ..runtime.replay import empty
from .problem import Experts, GroupedProblem, expert_slots


class Many(NamedTuple):
    """A tile of an expert's rows of x, by 128 rows of its weight.

    **Fields:** ``tokens``: 256, 128, 64 or 32 rows of x; ``turn``: blocks of 128 columns in a turn of the loop, at the
    end of which all products are waited for.
    """

    tokens: int
    turn: int = 2


def serves(device: Device, problem: GroupedProblem) -> bool:
    """As `gemm_hopper`; int8 activations meet weights that are exact, so their scales come after the whole sum."""
    gemm = problem.gemm
    if not gemm.narrow or gemm.out_dtype.itemsize != 2 or gemm.n % 8 or not hopper.fits(device, 128):
        return False
    return parameter_rows(gemm) > 0 and (problem.scaled or (gemm.one_group and gemm.zero != FLOAT_ZERO))


def multiply(
    x: Tensor, row_scale: Tensor | None, experts: Experts, bias: Tensor | None, offsets: Tensor, device: Device,
    problem: GroupedProblem, config: Many,
) -> Tensor:  # fmt: skip
    """``(T, N)``: x ``(T, columns)``, rows on 16 bytes; see `tiles.multiply`."""
    from ..kernels.grouped_hopper import grouped_hopper, list_tiles
    from ..kernels.operands_hopper import ROWS

    (data, scale, zero, n, *_, factor), gemm, t, e = experts, problem.gemm, problem.rows, experts.number
    bm, rows = config.tokens, ROWS.value
    blocks, pieces = -(-x.shape[1] // 128), 2 if bm > 128 else 1
    scaled, each = not gemm.one_group or gemm.zero == FLOAT_ZERO, parameter_rows(gemm)
    y, row_tiles, se = empty((t, n), gemm.out_dtype, x.device), problem.tiles_at_most(bm), expert_slots(e)
    table = empty((4 + 4 * row_tiles,), torch.int32, x.device)
    together = max(1, min(64, 4096 // se, power_of_two(row_tiles)))
    launch(
        list_tiles, (-(-row_tiles // together),), offsets, table, y, e, t, n,
        SE=se, BM=bm, B=together, debug=True, sanitize_overflow=False, **options(device, 4),
    )  # fmt: skip
    if gemm.bits == 4:
        w = descriptor(data.view(torch.int32).view(e * data.shape[1], -1), (4, 256), swizzled=False)
    else:
        w = descriptor(data.view(torch.int16).view(e * data.shape[1], -1), (rows, 32))
    flat = (-1, scale.shape[2])
    launch(
        grouped_hopper, (min(device.sms, row_tiles * -(-n // 128)),), descriptor(x, (bm, 64)), w,
        descriptor(scale.view(flat), (each, 2 * rows), swizzled=False) if scaled else scale,
        scale if zero is None else descriptor(zero.view(flat), (each, 2 * rows), swizzled=False),
        scale if factor is None else factor, scale if bias is None else bias,
        scale if row_scale is None else row_scale, table, y,
        descriptor(y, (bm // pieces, rows)),
        n, data.shape[1] * (16 if gemm.bits == 4 else 1), blocks,
        blocks if gemm.one_group else max(1, experts.group // 128), scale.shape[1],
        BITS=gemm.bits, BM=bm, STAGES=stages_of(experts.first, bm, pieces, each, scaled), GROUP=max(1, 2048 // bm),
        EACH=each, SCALED=scaled, ZERO=gemm.zero, BIAS=bias is not None, ROW_SCALES=row_scale is not None,
        PIECES=pieces, **decoding(experts.first), U=1 if bm > 128 and gemm.bits == 4 else config.turn,
        **options(device, 4),
    )  # fmt: skip
    return y
