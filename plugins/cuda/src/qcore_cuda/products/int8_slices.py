"""`INT8_SLICES`: few rows of codes, in plain Triton: warps share the K of a tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from torch import Tensor

from qcore_triton.codes import Codes

from ..costs import Work
from ..kernels.int8_slices import slices
from ..problem import GemmProblem
from ..runtime.device import Device
from ..runtime.launch import launch, options
from .base import Int8Product, Operands
from .quantized import arguments_of


class Slice(NamedTuple):
    """**Fields:** ``bm``, ``bn``: the tile, of tokens and weight rows; ``warps``; ``stages``."""

    bm: int
    bn: int
    warps: int
    stages: int


class Int8Slices(Int8Product[Slice]):
    """See `kernels.int8_slices`."""

    name: ClassVar[str] = "int8_slices"
    config = Slice

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        del device, problem
        return True

    def rule(self, device: Device, problem: GemmProblem) -> Slice | None:
        m, n, bits, step = problem.rows, problem.n, problem.bits, problem.step
        if m > 32:
            return None
        bm = max(16 if device.hip else 8, m)
        bn = 32 if n >= 32 * 4 * device.sms and bm <= 16 else 16
        warps = 8 if problem.k >= 32 * step and n < 16 * 8 * device.sms else 4

        def stages(warps: int) -> int:
            return device.shared // (warps * step * (bn * bits // 8 + bm))

        warps = warps if stages(warps) >= 3 else 4
        return Slice(bm, bn, warps, max(1, min(2 if device.hip else 4, stages(warps))))

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[Slice]:
        m = problem.rows
        if m > 64 or (m <= 16 and device.asm):  # `int8_gemv` is faster
            return
        for bn, warps in ((16, 4), (16, 8), (32, 4), (32, 8)):
            yield from (Slice(max(8, min(32, m)), bn, warps, stages) for stages in (2, 3, 4, 6))

    def work(self, device: Device, problem: GemmProblem, config: Slice) -> Work:
        del device
        return Work(-(-problem.n // config.bn) * -(-problem.rows // config.bm), problem.k / 128)

    def launch(self, codes: Codes, operands: Operands, device: Device, problem: GemmProblem, config: Slice) -> Tensor:
        (m, wide), data, args = codes.q.shape, operands.weight.data, arguments_of(codes, operands, problem)
        launch(
            slices, (-(-problem.n // config.bn), -(-m // config.bm)),
            codes.q, *args.of_x, data, *args.of_w, *args.end.args, args.y, *args.end.numbers,
            m, problem.n, problem.k, args.blocks, wide // 128, 0 if problem.bits == 4 else data.shape[1] // 32,
            BITS=problem.bits, S=config.warps, ASM=device.asm, BN=config.bn, BM=config.bm, STAGES=config.stages,
            **args.form, **options(device, config.warps),
        )  # fmt: skip
        return args.y


INT8_SLICES = Int8Slices()
