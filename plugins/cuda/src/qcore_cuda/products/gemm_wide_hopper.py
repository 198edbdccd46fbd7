"""`GEMM_WIDE_HOPPER`: many rows of 16-bit floats on sm_90, as `gemm_hopper`, in tiles of 256 rows of the weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from qcore_triton.weights import FLOAT_ZERO, Weight

from ..costs import Work
from ..problem import GemmProblem
from ..runtime import hopper
from ..runtime.counters import counters
from ..runtime.device import Device
from ..runtime.hopper import descriptor, int4_words
from ..runtime.launch import launch, options
from ..runtime.replay import empty, tracked
from ..schedule import tail_spread
from .aligned import aligned
from .base import FloatProduct, decoding
from .gemm_hopper import Tokens, parameter_rows, stages_of, tail_work, tile_choices, tiles_of

_ROWS = 256
"""Rows of the weight in a tile."""
_SIZES = (128, 64)
"""Tokens of a tile."""


class GemmWideHopper(FloatProduct[Tokens]):
    """See `kernels.gemm_wide_hopper`."""

    name: ClassVar[str] = "gemm_wide_hopper"
    config = Tokens

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        """What `gemm_hopper` serves."""
        if not problem.narrow or not hopper.fits(device, problem.n, 128):
            return False
        return parameter_rows(problem) > 0 and (problem.whole or not problem.exact)

    def rule(self, device: Device, problem: GemmProblem) -> None:
        """`gemm_hopper` is better without a measurement."""
        del device, problem

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[Tokens]:
        if problem.rows > 32 and problem.n > _ROWS // 2:
            yield from tile_choices(problem, _SIZES, 128, device.sms, _ROWS)

    def work(self, device: Device, problem: GemmProblem, config: Tokens) -> Work:
        return tail_work(device, problem, config, 128, _ROWS)

    def launch(
        self, x: Tensor, weight: Weight, bias: Tensor | None, device: Device, problem: GemmProblem, config: Tokens
    ) -> Tensor:
        return self.multiply(aligned(x, weight, problem), weight, bias, device, problem, config)

    def multiply(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        device: Device,
        problem: GemmProblem,
        config: Tokens,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """X ``(M, columns)`` times the weight, which has as many columns when packed.

        ``tokens``: scales ``(M,)`` of x, if it holds codes in float16; the weight has units. Tiles have ``config.bm``
        tokens, or 64 if these hold them all.
        """
        from ..kernels.gemm_hopper import UNITS
        from ..kernels.gemm_wide_hopper import GROUPS, gemm_wide_hopper
        from ..kernels.operands_hopper import ROWS

        data, scale, zero, *_ = weight
        (m, columns), n, bits, rows = x.shape, problem.n, problem.bits, ROWS.value
        bm = 64 if m <= 64 else min(config.bm, max(_SIZES))
        blocks = -(-columns // 128)
        scaled, each = not problem.one_group or problem.zero == FLOAT_ZERO, parameter_rows(problem)
        y = empty((m, n), problem.out_dtype, x.device)
        w = int4_words(data) if bits == 4 else descriptor(data.view(torch.int16), (rows, 32))
        tiles = tiles_of(n, m, bm, _ROWS)
        waves, share, programs = tail_spread(tiles, blocks, config.split, device.sms)
        left = tiles - waves * programs if share else 0
        parts = empty(((programs + left) * _ROWS * bm,), torch.float32, x.device) if left else y
        numbers: Any = scale if zero is None else descriptor(zero, (each, _ROWS), swizzled=False)
        factor, kind = weight.factor, problem.zero
        if tokens is not None:
            assert weight.units is not None
            factor, kind = weight.units, UNITS.value
            numbers = descriptor(weight.units.view(1, -1), (1, _ROWS), swizzled=False)
        launch(
            gemm_wide_hopper, (programs,), descriptor(x, (bm, 64)), w,
            descriptor(scale, (each, _ROWS), swizzled=False) if scaled else scale,
            numbers, scale if factor is None else factor, scale if bias is None else bias,
            scale if tokens is None else tokens,
            descriptor(y, (bm, rows)), parts,
            tracked(counters, GROUPS.value * left, x.device) if left else y,
            m, n, blocks, blocks if problem.one_group else max(1, weight.group // 128), waves, share,
            BITS=bits, BM=bm, STAGES=stages_of(weight, bm, 1, each, scaled, _ROWS), BAND=2048 // bm, EACH=each,
            SCALED=scaled, ZERO=kind, BIAS=bias is not None, **decoding(weight), SPREAD=left > 0,
            **options(device, 4),
        )  # fmt: skip
        return y


GEMM_WIDE_HOPPER = GemmWideHopper()
