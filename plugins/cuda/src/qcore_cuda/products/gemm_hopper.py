"""`GEMM_HOPPER`: many rows of 16-bit floats on sm_90: one warp copies, others unpack and multiply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from qcore_triton.weights import FLOAT_ZERO, Weight

from ..problem import GemmProblem
from ..runtime import hopper
from ..runtime.counters import counters
from ..runtime.device import Device
from ..runtime.hopper import descriptor, int4_words
from ..runtime.launch import launch, options
from ..runtime.replay import empty, tracked
from ..schedule import TILE_TIMES, shares
from .aligned import aligned
from .base import FloatProduct

_STAGES = {(4, 256): 5, (4, 128): 8, (4, 64): 8, (8, 256): 4, (8, 128): 8, (8, 64): 8}
"""Stages that fit shared memory, by bits and tokens of a tile."""


class Tokens(NamedTuple):
    """**Fields:** ``bm``: tokens of a tile, 256, 128 or 64; it has 128 rows of the weight."""

    bm: int


class GemmHopper(FloatProduct[Tokens]):
    """See `kernels.gemm_hopper`."""

    name: ClassVar[str] = "gemm_hopper"
    config = Tokens

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        """Sizes fit descriptors; scales are applied to the weight and rounded with it, or to the sum over all of K."""
        if not problem.narrow or not hopper.fits(device, problem.n, 128):
            return False
        if problem.bits == 4:
            return problem.block == 128 and (problem.whole or not problem.exact)
        return problem.whole

    def rule(self, device: Device, problem: GemmProblem) -> Tokens | None:
        """The tile for which programs have the least to do."""
        if problem.rows < 256:
            return None

        def time(bm: int) -> float:
            tiles = -(-problem.n // 128) * -(-problem.rows // bm)
            return shares(tiles, -(-problem.k // 128), bm, device.sms)[0]

        return Tokens(min(TILE_TIMES, key=time))

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[Tokens]:
        del device
        if problem.rows >= 64:
            yield from (Tokens(bm) for bm in TILE_TIMES if bm <= problem.rows)

    def launch(
        self, x: Tensor, weight: Weight, bias: Tensor | None, device: Device, problem: GemmProblem, config: Tokens
    ) -> Tensor:
        """Tiles have ``config.bm`` tokens, or fewer if fewer hold them all."""
        from ..kernels.gemm_hopper import ROWS, gemm_hopper

        x, (data, scale, zero, *_) = aligned(x, weight, problem), weight
        (m, columns), n, bits, rows = x.shape, problem.n, problem.bits, ROWS.value
        bm = next(size for size in (64, 128, config.bm) if size >= min(m, config.bm))
        blocks = -(-columns // 128)
        scaled = not problem.one_group or problem.zero == FLOAT_ZERO
        pieces = 2 if bm > 128 else 1  # whole tiles of results would take the place of a stage
        y = empty((m, n), x.dtype, x.device)
        w = int4_words(data) if bits == 4 else descriptor(data.view(torch.int16), (rows, 32))
        tiles = -(-n // (2 * rows)) * -(-m // bm)
        waves, share, programs = shares(tiles, blocks, bm, device.sms)[1]
        left = tiles - waves * programs if share else 0
        parts = empty(((programs + left) * 2 * rows * bm,), torch.float32, x.device) if left else y
        launch(
            gemm_hopper, (programs,), descriptor(x, (bm, 64)), w,
            descriptor(scale, (1, 2 * rows), swizzled=False) if scaled else scale,
            scale if zero is None else descriptor(zero, (1, 2 * rows), swizzled=False),
            scale if bias is None else bias, descriptor(y, (bm // pieces, rows)), parts,
            tracked(counters, 2 * left, x.device) if left else y,
            m, n, blocks, blocks if problem.one_group else weight.group // 128, waves, share,
            BITS=bits, BM=bm, STAGES=_STAGES[bits, bm], GROUP=2048 // bm, SCALED=scaled,
            ZERO=problem.zero, BIAS=bias is not None, PIECES=pieces, U=1 if bm > 128 else 2, SPREAD=left > 0,
            **options(device, 4),
        )  # fmt: skip
        return y


GEMM_HOPPER = GemmHopper()
