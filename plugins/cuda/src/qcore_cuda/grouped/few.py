"""`kernels.grouped.grouped_gemv` and its launch: few rows of each expert, on NVIDIA."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.grouped import grouped_gemv
from ..products import skinny_gemm
from ..products.base import decoding
from ..products.skinny_gemm import WarpShape
from ..runtime.device import Device
from ..runtime.launch import launch, supports_dynamic_shared
from ..runtime.replay import empty
from .problem import Experts, GroupedProblem, expert_slots


class Few(NamedTuple):
    """**Fields:** ``tokens``: rows of x that a program takes, 8 or 16; the others as in `WarpShape`."""

    tokens: int
    row_blocks: int
    unroll: int = 1
    warps: int = 4
    stages: int = 2


def serves(device: Device, problem: GroupedProblem) -> bool:
    """Whether the kernel supports a problem."""
    return device.asm and problem.gemm.narrow


def multiply(
    x: Tensor, row_scale: Tensor | None, experts: Experts, bias: Tensor | None, offsets: Tensor, device: Device,
    problem: GroupedProblem, config: Few,
) -> Tensor:  # fmt: skip
    """``(T, N)``: x ``(T, columns)``, rows on 16 bytes; see `tiles.multiply`."""
    (data, scale, zero, n, *_, factor), gemm, t, e = experts, problem.gemm, problem.rows, experts.number
    if data.data_ptr() % 16:  # a view into another tensor
        data = data.clone()
    part = skinny_gemm.layout(experts.first, gemm)
    y = empty((t, n), gemm.out_dtype, x.device)
    one_group = gemm.one_group and y.dtype != torch.float32  # tensor cores cut long sums off
    shape, of_row = WarpShape(*config[1:]), 0 if one_group else part.of_row
    made = skinny_gemm.program(
        device, shape, supports_dynamic_shared(), config.tokens, gemm.bits, gemm.block, 2, of_row
    )
    _, blocks, per, pitch = part.sizes
    launch(
        grouped_gemv, (-(-n // made.rows) * problem.tiles_at_most(config.tokens),),
        x, data, scale, scale if zero is None else zero, scale if factor is None else factor,
        scale if bias is None else bias, scale if row_scale is None else row_scale, offsets, y,
        e, t, n, data.shape[1] if gemm.bits == 4 else data.shape[1] // 16, blocks, per, scale.shape[1],
        x.stride(0) // 8, pitch,
        **decoding(experts.first), HALVES=gemm.halves, SE=expert_slots(e), BITS=gemm.bits, P=gemm.block,
        ZERO=gemm.zero, BIAS=bias is not None, ROW_SCALES=row_scale is not None,
        ONE_GROUP=one_group, BF16=x.dtype == torch.bfloat16, ALIGNED=part.even,
        debug=True, sanitize_overflow=False, **made.meta,
    )  # fmt: skip
    return y
