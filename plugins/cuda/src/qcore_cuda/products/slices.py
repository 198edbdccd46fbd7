"""`SLICES`: few rows of 16-bit floats and int8 weights, in plain Triton: warps share the K of a tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from torch import Tensor

from qcore_triton.weights import INTEGER, Weight

from ..costs import Work
from ..kernels.slices import slices
from ..problem import GemmProblem
from ..runtime.device import Device
from ..runtime.launch import launch, options
from ..runtime.replay import empty
from .aligned import aligned, copies_of_x
from .base import FloatProduct


class Slice(NamedTuple):
    """**Fields:** ``bn``, ``bm``: the tile, of weight rows and tokens; ``warps``; ``stages``."""

    bn: int
    bm: int
    warps: int = 4
    stages: int = 1


class Slices(FloatProduct[Slice]):
    """See `kernels.slices`."""

    name: ClassVar[str] = "slices"
    config = Slice

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        del device
        return problem.bits == 8 and problem.narrow and problem.element == INTEGER

    def rule(self, device: Device, problem: GemmProblem) -> Slice | None:
        if problem.rows > 16:
            return None
        return Slice(16 if problem.n <= 64 * device.sms else 32, 16 if problem.rows > 8 or device.hip else 8, stages=4)

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[Slice]:
        if device.asm or problem.rows > 16:  # `gemv` is faster
            return
        for bn in (16, 32):
            for warps in (4, 8):
                yield from (Slice(bn, max(8, min(16, problem.rows)), warps, stages) for stages in (3, 4, 6))

    def work(self, device: Device, problem: GemmProblem, config: Slice) -> Work:
        del device
        return Work(-(-problem.n // config.bn) * -(-problem.rows // config.bm), problem.k / 128)

    def copies(self, problem: GemmProblem) -> tuple[int, ...]:
        return copies_of_x(problem, problem.block)

    def launch(
        self, x: Tensor, weight: Weight, bias: Tensor | None, device: Device, problem: GemmProblem, config: Slice
    ) -> Tensor:
        x, (data, scale, zero, *_) = aligned(x, weight, device), weight
        m, n = x.shape[0], problem.n
        y = empty((m, n), problem.out_dtype, x.device)
        launch(
            slices, (-(-n // config.bn), -(-m // config.bm)),
            x, data, scale, scale if zero is None else zero, scale if weight.factor is None else weight.factor,
            scale if bias is None else bias, y,
            m, n, data.shape[0], problem.k, weight.columns // 32, weight.group, x.stride(0) // 8,
            BK=problem.block, ZERO=problem.zero, FACTOR=weight.factor is not None, BIAS=bias is not None,
            ONE_GROUP=problem.one_group, BN=config.bn, BM=config.bm, NW=config.warps, STAGES=config.stages,
            WIDE=device.interpreted, num_stages=config.stages, **options(device, config.warps),
        )  # fmt: skip
        return y


SLICES = Slices()
