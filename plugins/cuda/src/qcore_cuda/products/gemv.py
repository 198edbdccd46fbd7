"""`GEMV`: up to 16 rows of 16-bit floats on NVIDIA; each warp streams the weight through shared memory of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from qcore_triton.weights import Weight

from ..costs import Work
from ..kernels.gemv import gemv
from ..problem import GemmProblem
from ..runtime.device import Device
from ..runtime.launch import launch, supports_dynamic_shared
from ..runtime.replay import empty
from . import skinny_gemm
from .aligned import copies_of_x, on_lines
from .base import FloatProduct, decoding
from .skinny_gemm import WarpShape

_SHAPES = {
    (4, 1): (
        (2, 1, 8, 3), (2, 1, 8, 2), (2, 1, 4, 4), (2, 2, 4, 2), (2, 2, 4, 3), (2, 2, 8, 2), (4, 1, 8, 2), (4, 1, 4, 2),
        (1, 2, 4, 3), (1, 2, 4, 4), (1, 4, 4, 2), (1, 4, 8, 2),
    ),
    (4, 8): ((1, 1, 8, 3), (2, 1, 8, 2), (2, 1, 8, 3), (2, 2, 4, 2), (4, 1, 4, 2), (4, 1, 4, 3), (4, 1, 8, 2)),
    (4, 16): (
        (2, 1, 8, 2), (2, 2, 8, 2), (4, 1, 2, 2), (4, 1, 4, 2), (4, 1, 4, 3), (4, 1, 8, 2), (4, 2, 4, 2),
    ),
    (8, 1): (
        (1, 8, 4, 2), (1, 4, 2, 4), (1, 4, 4, 2), (1, 4, 4, 4), (1, 4, 4, 3), (1, 2, 4, 3), (1, 2, 4, 4), (1, 2, 8, 3),
        (1, 4, 8, 2), (2, 2, 4, 3),
    ),
    (8, 8): ((1, 2, 8, 2), (1, 4, 4, 2), (2, 2, 4, 2), (2, 2, 4, 3), (2, 2, 8, 2), (4, 2, 4, 2)),
    (8, 16): ((2, 2, 4, 2), (2, 2, 8, 2), (4, 1, 4, 2), (4, 1, 8, 3), (4, 2, 4, 2), (8, 1, 4, 2)),
}  # fmt: skip
"""Shapes by bits and `row_class`: each has been the fastest for some size."""


class Gemv(FloatProduct[WarpShape]):
    """See `kernels.gemv`."""

    name: ClassVar[str] = "gemv"
    config = WarpShape

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        return device.asm and problem.narrow and problem.rows <= skinny_gemm.ROWS

    def rule(self, device: Device, problem: GemmProblem) -> WarpShape:
        return skinny_gemm.rule(device, problem)

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[WarpShape]:
        del device
        return skinny_gemm.candidates(_SHAPES, problem)

    def work(self, device: Device, problem: GemmProblem, config: WarpShape) -> Work:
        del device
        return skinny_gemm.work(problem, config)

    def copies(self, problem: GemmProblem) -> tuple[int, ...]:
        return copies_of_x(problem, 8) if problem.rows > 1 else ()

    def launch(
        self, x: Tensor, weight: Weight, bias: Tensor | None, device: Device, problem: GemmProblem, config: WarpShape
    ) -> Tensor:
        return self.multiply(on_lines(x, weight, device, described=False), weight, bias, device, problem, config)

    def multiply(
        self, x: Tensor, weight: Weight, bias: Tensor | None, device: Device, problem: GemmProblem, config: WarpShape,
        tokens: Tensor | None = None, x_group: int = 0, chunk: int = skinny_gemm.ROWS,
    ) -> Tensor:  # fmt: skip
        """`launch` for x on 16 bytes; ``tokens``: float32 ``(M,)`` that sums are multiplied by before the bias.

        With ``x_group``, ``(G, M)``: for each group of so many columns, a multiple of a block; blocks are of one group.
        ``chunk``: tokens of a program.
        """
        part, scale, zero = skinny_gemm.layout(weight, problem), weight.scale, weight.zero
        m, n, bits, block = x.shape[0], problem.n, problem.bits, problem.block
        y = empty((m, n), problem.out_dtype, x.device)
        # Tensor cores cut long sums off, which shows in float32. Of several rows, sums that wait for each other are
        # slower than scaling each block's.
        several = m > 1 or bits == 4 or x_group
        one_group = problem.one_group and not several and y.dtype != torch.float32
        of_row = 0 if one_group else part.of_row
        made = skinny_gemm.program(device, config, supports_dynamic_shared(), min(m, chunk), bits, block, 2, of_row, 0)
        launch(
            gemv, (-(-n // made.rows), -(-m // chunk)),
            x, part.data, scale, scale if zero is None else zero, scale if weight.factor is None else weight.factor,
            scale if bias is None else bias, scale if tokens is None else tokens, y,
            m, n, x.shape[1], *part.sizes[:3], x.stride(0), part.sizes[3],
            **decoding(weight), HALVES=problem.halves,
            BITS=bits, P=block, ZERO=problem.zero, BIAS=bias is not None,
            TOKENS=tokens is not None and not x_group, XPER=x_group // block, ONE_GROUP=one_group,
            BF16=x.dtype == torch.bfloat16, ALIGNED=part.even, **made.meta, CHUNKS=m > chunk,
        )  # fmt: skip
        return y


GEMV = Gemv()
