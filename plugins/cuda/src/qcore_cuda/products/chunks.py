"""Some dozen rows on NVIDIA by the kernels for few: `GEMV_CHUNKS` and `INT8_GEMV_CHUNKS`, 16 or 32 tokens at a time.

Programs for each chunk of tokens read and unpack the weight anew. A small weight comes from the second-level cache, and
keeps fewer multiprocessors busy than there are: then this is faster than tiles for many rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from torch import Tensor

from qcore_triton.codes import Codes
from qcore_triton.weights import Weight

from ..costs import Work
from ..problem import GemmProblem
from ..runtime.device import Device
from . import int8_gemv, skinny_gemm
from .aligned import copies_of_x, on_lines
from .base import FloatProduct, Int8Product, Operands, Product
from .gemv import GEMV
from .skinny_gemm import ROWS, WarpShape

_MOST = 128
_SHAPES = {
    4: ((1, 1, 8, 2), (2, 1, 4, 3), (2, 1, 8, 2), (4, 1, 4, 2)),
    8: ((1, 2, 8, 2), (2, 2, 4, 2), (2, 2, 8, 2), (4, 1, 4, 2)),
}
"""By bits, those of `WarpShape` that were the fastest for some size."""


class Chunks(NamedTuple):
    """**Fields:** those of `WarpShape`; ``tokens``: of a program, 16 or 32."""

    row_blocks: int = 1
    unroll: int = 1
    warps: int = 4
    stages: int = 1
    late: bool = False
    tokens: int = ROWS

    @property
    def shape(self) -> WarpShape:
        """The shape of a program."""
        return WarpShape(*self[:5])


class _InChunks(Product[Chunks]):
    """What both have in common."""

    config = Chunks
    small: ClassVar[bool] = True

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        return device.asm and problem.narrow and ROWS < problem.rows <= _MOST

    def rule(self, device: Device, problem: GemmProblem) -> Chunks | None:
        """None: which sizes are small has to be measured."""
        del device, problem
        return None

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[Chunks]:
        for shape in _SHAPES[problem.bits] if self.serves(device, problem) else ():
            # Sums of int32 and corrections for 64 rows and 32 tokens do not fit registers.
            full = problem.codes and problem.bits == 4 and shape[0] == 4
            yield from (Chunks(*shape, tokens=tokens) for tokens in ((ROWS,) if full else (ROWS, 2 * ROWS)))

    def work(self, device: Device, problem: GemmProblem, config: Chunks) -> Work:
        del device
        made = skinny_gemm.work(problem, config.shape)
        return made._replace(programs=made.programs * -(-problem.rows // config.tokens))


class GemvChunks(_InChunks, FloatProduct[Chunks]):
    """See `kernels.gemv`."""

    name: ClassVar[str] = "gemv_chunks"

    def copies(self, problem: GemmProblem) -> tuple[int, ...]:
        return copies_of_x(problem, 8)

    def launch(
        self, x: Tensor, weight: Weight, bias: Tensor | None, device: Device, problem: GemmProblem, config: Chunks
    ) -> Tensor:
        x = on_lines(x, weight, device, described=False)
        return self.multiply(x, weight, bias, device, problem, config)

    def multiply(
        self, x: Tensor, weight: Weight, bias: Tensor | None, device: Device, problem: GemmProblem, config: Chunks,
        tokens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As of `GEMV`."""
        return GEMV.multiply(x, weight, bias, device, problem, config.shape, tokens, chunk=config.tokens)


class Int8GemvChunks(_InChunks, Int8Product[Chunks]):
    """See `kernels.int8_gemv`."""

    name: ClassVar[str] = "int8_gemv_chunks"
    wants_totals: ClassVar[bool] = False

    def launch(self, codes: Codes, operands: Operands, device: Device, problem: GemmProblem, config: Chunks) -> Tensor:
        x, chunk = int8_gemv.of_codes(codes), config.tokens
        return int8_gemv.launched(
            int8_gemv.CODES, x, codes.zero is not None, operands, device, problem, config.shape, chunk
        )


GEMV_CHUNKS = GemvChunks()
INT8_GEMV_CHUNKS = Int8GemvChunks()
