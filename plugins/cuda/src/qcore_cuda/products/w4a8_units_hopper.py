"""`W4A8_UNITS_HOPPER`: many rows of codes and symmetric int4 weights in groups of 32 or 64 on sm_90, in float16.

The product of an int4 code and a bfloat16 scale has 11 significant bits: float16 holds it exactly, in units of a power
of two for each row of the weight (`qcore_triton.packing.units_of`). Codes of x are exact in float16, too. So the
kernels for float activations compute the same sums, in float32, that others scale group by group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from qcore_triton.codes import Codes
from qcore_triton.weights import INTEGER, NO_ZERO, Weight

from ..costs import Work
from ..problem import GemmProblem
from ..runtime import hopper
from ..runtime.device import Device
from .base import Int8Product, Operands
from .gemm_hopper import GEMM_HOPPER, Tokens, parameter_rows, tail_work, tile_choices
from .gemm_wide_hopper import GEMM_WIDE_HOPPER

_SIZES = {128: (256, 128, 64, 32), 256: (64,)}
"""Tokens of a tile by its rows of the weight: as many as registers have room for."""


class Units(NamedTuple):
    """**Fields:** ``bm``, ``split``: as of `gemm_hopper`; ``rows``: of the weight in a tile, 128 or 256."""

    bm: int
    split: int = 1
    rows: int = 128


class W4A8UnitsHopper(Int8Product[Units]):
    """See above."""

    name: ClassVar[str] = "w4a8_units_hopper"
    config = Units
    wants_totals: ClassVar[bool] = False
    codes = torch.float16

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        """Weights with units; codes without zero points, results of 16-bit floats."""
        plain = problem.zero == NO_ZERO and problem.element == INTEGER and not (problem.x_zero or problem.own_order)
        floats = problem.out_dtype in {torch.bfloat16, torch.float16}
        several = problem.units and parameter_rows(problem) > 1
        return several and plain and floats and problem.rows > 16 and hopper.fits(device, problem.n, 128)

    def rule(self, device: Device, problem: GemmProblem) -> None:
        """Another kernel, unless a measurement says otherwise."""
        del device, problem

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[Units]:
        for rows, sizes in _SIZES.items():
            for tile in tile_choices(problem, sizes, 128, device.sms, rows):
                yield Units(*tile, rows)

    def order(self, weight: Weight) -> int:
        del weight
        return 0

    def work(self, device: Device, problem: GemmProblem, config: Units) -> Work:
        return tail_work(device, problem, Tokens(config.bm, config.split), 128, config.rows)

    def launch(self, codes: Codes, operands: Operands, device: Device, problem: GemmProblem, config: Units) -> Tensor:
        assert codes.order == 0, "codes were quantized for another kernel"
        product, bm = GEMM_WIDE_HOPPER if config.rows > 128 else GEMM_HOPPER, min(config.bm, _SIZES[config.rows][0])
        weight, _, bias, _ = operands
        return product.multiply(codes.q, weight, bias, device, problem, Tokens(bm, config.split), codes.scale)


W4A8_UNITS_HOPPER = W4A8UnitsHopper()
