"""`INT8_GEMV`: up to 16 rows of codes on NVIDIA, as `gemv`; a single row is quantized by the kernel that multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor

from qcore_triton import host
from qcore_triton.codes import TENSOR, Codes

from ..costs import Work
from ..kernels.int8_gemv import int8_gemv
from ..kernels.smem_pipeline import STATIC
from ..problem import GemmProblem
from ..runtime.device import Device
from ..runtime.launch import launch, supports_dynamic_shared
from ..runtime.replay import empty
from . import skinny_gemm
from .base import Int8Product, Operands
from .skinny_gemm import WarpShape

_SHAPES = {
    (4, 1): (
        (1, 4, 8, 2), (2, 2, 8, 2), (2, 2, 4, 2), (2, 1, 8, 2), (2, 1, 8, 3), (2, 2, 4, 3), (2, 1, 4, 3), (1, 4, 4, 2),
        (1, 2, 8, 3), (4, 1, 4, 2),
    ),
    (4, 8): ((1, 2, 4, 2), (1, 1, 8, 2), (2, 1, 4, 3), (4, 1, 4, 2), (2, 1, 8, 2), (2, 2, 4, 2)),
    (4, 16): ((2, 1, 8, 2), (2, 1, 8, 3), (2, 2, 4, 2), (4, 1, 8, 2), (4, 1, 4, 3), (4, 1, 2, 3)),
    (8, 1): ((1, 2, 8, 3), (1, 4, 8, 2), (1, 2, 4, 3), (2, 2, 8, 2), (1, 4, 4, 3), (1, 4, 4, 2), (2, 1, 8, 2)),
    (8, 8): ((1, 2, 4, 2), (2, 2, 4, 2), (1, 2, 8, 2), (1, 4, 4, 2), (2, 1, 4, 3)),
    (8, 16): ((1, 2, 4, 2), (1, 2, 8, 2), (2, 2, 4, 2), (2, 2, 8, 2), (4, 1, 4, 2), (1, 4, 4, 2)),
}  # fmt: skip
"""Shapes by bits and `row_class`: each has been the fastest for some size."""

CODES = -1
"""The mode of a kernel that is handed codes."""


class Int8Gemv(Int8Product[WarpShape]):
    """See `kernels.int8_gemv`."""

    name: ClassVar[str] = "int8_gemv"
    config = WarpShape
    wants_totals: ClassVar[bool] = False  # it sums as it goes

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        return device.asm and problem.rows <= skinny_gemm.ROWS

    def rule(self, device: Device, problem: GemmProblem) -> WarpShape:
        return skinny_gemm.rule(device, problem)

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[WarpShape]:
        del device
        return skinny_gemm.candidates(_SHAPES, problem)

    def fuses(self, x: Tensor, device: Device, problem: GemmProblem) -> bool:
        """One row of 16-bit floats that it can read in wide pieces, and hold."""
        whole = x.shape[0] == 1 and x.is_floating_point() and x.dtype.itemsize == 2 and x.shape[1] % 8 == 0
        if not whole or x.stride(1) != 1 or x.data_ptr() % 16:
            return False
        return _capacity(problem.k) <= (device.shared if supports_dynamic_shared() else STATIC) // 2

    def work(self, device: Device, problem: GemmProblem, config: WarpShape) -> Work:
        del device
        return skinny_gemm.work(problem, config)

    def launch(
        self, codes: Codes, operands: Operands, device: Device, problem: GemmProblem, config: WarpShape
    ) -> Tensor:
        return launched(CODES, of_codes(codes), codes.zero is not None, operands, device, problem, config)

    def launch_floats(
        self, x: Tensor, mode: Any, operands: Operands, device: Device, problem: GemmProblem, config: WarpShape
    ) -> Tensor:
        kind, scale, zero = mode
        of_x = (x, None, None, scale, zero) if kind == TENSOR else (x, scale, zero, 0.0, 0.0)
        return launched(kind, of_x, mode.has_zero, operands, device, problem, config)


def of_codes(codes: Codes) -> tuple[Any, ...]:
    """``of_x`` of `launched`."""
    return codes.q, codes.scale, codes.zero, 0.0, 0.0


def launched(
    mode: int,
    of_x: tuple[Any, ...],
    x_zero: bool,
    operands: Operands,
    device: Device,
    problem: GemmProblem,
    config: WarpShape,
    chunk: int = skinny_gemm.ROWS,
) -> Tensor:
    """``of_x``: codes or one row of floats; scales and zero points ``(M,)`` or None; both as numbers.

    ``mode``: `CODES`, or of quantization; ``chunk``: tokens of a program.
    """
    (weight, sums, bias, out), (x, scale, zero, *numbers), fused = operands, of_x, mode != CODES
    m, n, bits, block = x.shape[0], problem.n, problem.bits, problem.block
    y = empty((m, n), problem.out_dtype, x.device)
    end = host.end_of(bias, out, y)
    wide = _capacity(problem.k) if fused else 0
    part = skinny_gemm.layout(weight, problem)
    of_row = part.of_row if problem.grouped else 0
    dynamic = supports_dynamic_shared()
    made = skinny_gemm.program(device, config, dynamic, min(m, chunk), bits, block, 0 if fused else 1, of_row, wide)
    x_scale = y if scale is None else scale
    launch(
        int8_gemv, (-(-n // made.rows), -(-m // chunk)),
        x, part.data, weight.scale, weight.scale if weight.zero is None else weight.zero,
        y if sums is None else sums, x_scale, x_scale if zero is None else zero, *end.args, y, *numbers, *end.numbers,
        m, n, problem.k, *part.sizes[:3], 0 if fused else x.shape[1] // 128, part.sizes[3],
        BITS=bits, P=block, WZERO=problem.zero, XZERO=x_zero, GROUPED=problem.grouped, MODE=mode, WIDE=wide,
        ALIGNED=part.even, **end.meta, **made.meta, CHUNKS=m > chunk,
    )  # fmt: skip
    return y


def _capacity(k: int) -> int:
    """Bytes for the codes of a row: few different ones, each is compiled for itself."""
    return max(4096, 1 << (k - 1).bit_length())


INT8_GEMV = Int8Gemv()
