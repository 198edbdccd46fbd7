"""`W4A8_UNITS_HOPPER`: many rows of codes and symmetric int4 weights in groups of 32 or 64 on sm_90, in float16.

The product of an int4 code and a bfloat16 scale has 11 significant bits: float16 holds it exactly, in units of a power
of two for each row of the weight (`qcore_triton.packing.units_of`). Codes of x, less their zero points if they have
any, are exact in float16, too. So `gemm_hopper` computes the same sums, in float32, that other kernels scale group by
group.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import torch
from torch import Tensor

from qcore_triton.codes import Codes
from qcore_triton.weights import INTEGER, NO_ZERO

from ..problem import GemmProblem
from ..runtime import hopper
from ..runtime.device import Device
from .base import Operands
from .gemm_hopper import GEMM_HOPPER, GEMM_HOPPER_64, GEMM_HOPPER_192, GemmHopper, parameter_rows
from .tails import TiledCodes, Tokens


class W4A8UnitsHopper(TiledCodes):
    """See `kernels.gemm_hopper`. **Fields:** ``floats``: the product that multiplies."""

    name: ClassVar[str] = "w4a8_units_hopper"
    codes = torch.float16
    floats: ClassVar[GemmHopper] = GEMM_HOPPER

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        """Weights with units, without zero points; results of 16-bit floats."""
        plain = problem.zero == NO_ZERO and problem.element == INTEGER and not problem.own_order
        narrow = problem.out_dtype in {torch.bfloat16, torch.float16}
        several = problem.units and parameter_rows(problem) > 1
        return several and plain and narrow and problem.rows > 8 and hopper.fits(device, 128)

    def rule(self, device: Device, problem: GemmProblem) -> None:
        """Another kernel, unless a measurement says otherwise."""
        del device, problem

    def sizes(self, problem: GemmProblem) -> Collection[int]:
        del problem
        return self.floats.sizes

    def launch(self, codes: Codes, operands: Operands, device: Device, problem: GemmProblem, config: Tokens) -> Tensor:
        assert (codes.order, codes.zero) == (0, None), "codes were quantized for another kernel"
        weight, _, bias, _ = operands
        return self.floats.multiply(codes.q, weight, bias, device, problem, config, codes.scale)


class W4A8UnitsHopper64(W4A8UnitsHopper):
    """The same in tiles of 64 rows of the weight, see `GemmHopper64`."""

    name: ClassVar[str] = "w4a8_units_hopper_64"
    floats: ClassVar[GemmHopper] = GEMM_HOPPER_64
    rows: ClassVar[int] = floats.rows


class W4A8UnitsHopper192(W4A8UnitsHopper):
    """The same in tiles of 192 rows of the weight, see `GemmHopper192`."""

    name: ClassVar[str] = "w4a8_units_hopper_192"
    floats: ClassVar[GemmHopper] = GEMM_HOPPER_192
    rows: ClassVar[int] = floats.rows


W4A8_UNITS_HOPPER = W4A8UnitsHopper()
W4A8_UNITS_HOPPER_64 = W4A8UnitsHopper64()
W4A8_UNITS_HOPPER_192 = W4A8UnitsHopper192()
