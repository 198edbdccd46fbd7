"""`kernels.grouped` and its launch: any number of rows on any device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qcore_triton.weights import FLOAT_ZERO

from ..kernels.grouped import grouped_tiles
from ..problem import TERMS
from ..products.base import decoding
from ..products.gemm import Tile, reads_rows, steps_of
from ..runtime.device import Device
from ..runtime.launch import launch, options
from ..runtime.replay import empty
from .problem import Experts, GroupedProblem, expert_slots


def multiply(
    x: Tensor, row_scale: Tensor | None, experts: Experts, bias: Tensor | None, offsets: Tensor, device: Device,
    problem: GroupedProblem, config: Tile,
) -> Tensor:  # fmt: skip
    """``(T, N)``: x is one or `TERMS` matrices of T rows, whose sum is multiplied, its columns as `gemm` wants them.

    ``row_scale``: float32 ``(T,)``, multiplied with the sums. ``config.even``: programs per multiprocessor, each of
    which computes several tiles; 0: as many programs as there may be tiles.
    """
    (data, scale, zero, n, *_, factor), gemm, t, e = experts, problem.gemm, problem.rows, experts.number
    steps = steps_of(experts.first, device, gemm, config)
    y = empty((t, n), gemm.out_dtype, x.device)
    programs = -(-n // config.bn) * problem.tiles_at_most(config.bm)
    if config.even:
        programs = min(programs, config.even * device.sms)
    meta: dict[str, Any] = {} if device.interpreted else {"debug": True, "sanitize_overflow": False}
    if config.registers and device.asm:
        meta["maxnreg"] = config.registers
    scales = 2 if gemm.one_group and gemm.zero != FLOAT_ZERO else int(config.scaled)
    launch(
        grouped_tiles, (programs,),
        x, data, scale, scale if zero is None else zero, scale if factor is None else factor,
        scale if bias is None else bias, scale if row_scale is None else row_scale, offsets, y,
        e, t, n, data.shape[1] if gemm.bits == 4 else data.shape[1] // 16, steps.total, steps.per, scale.shape[1],
        x.stride(0) // 8, x.shape[1] // 32,
        SE=expert_slots(e), BITS=gemm.bits, P=gemm.block, U=steps.unroll, ZERO=gemm.zero, BIAS=bias is not None,
        ROW_SCALES=row_scale is not None, BN=config.bn, BM=config.bm, NW=min(config.warps, config.bn // 16),
        STAGES=config.stages, FRAG=gemm.bits == 4 or reads_rows(gemm), SCALES=scales, EACH=steps.each,
        TERMS=TERMS if x.shape[0] > t else 1, ALIGNED=n % 8 == 0, ASM=device.asm, HOPPER=device.arch == 90,
        WIDE=device.interpreted, G=2 if gemm.halves else 1, **decoding(experts.first), num_stages=config.stages,
        **meta, **options(device, config.warps),
    )  # fmt: skip
    return y
