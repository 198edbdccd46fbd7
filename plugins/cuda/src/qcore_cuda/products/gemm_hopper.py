"""`GEMM_HOPPER`: many rows of 16-bit floats on sm_90: one warp copies, others unpack and multiply."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from qcore_triton.weights import NO_ZERO, Weight

from ..costs import Work
from ..problem import GemmProblem
from ..runtime import hopper
from ..runtime.device import Device
from ..runtime.hopper import descriptor, int4_words, room_for
from ..runtime.launch import launch, options
from ..schedule import TILE_TIMES
from .aligned import copies_for_sums, copies_of_result, copies_of_x, finished, on_lines, result, sums_of
from .base import FloatProduct, decoding
from .tails import Tokens, best_tile, tail_apart, tail_of, tail_work, tile_choices

_STAGES = {
    (4, 256): 5, (4, 128): 8, (4, 64): 14, (4, 32): 20, (8, 256): 4, (8, 128): 8, (8, 64): 12, (8, 32): 16,
}  # fmt: skip
"""The most stages of a ring, by bits and tokens of a tile; fewer if parameters of two or four bytes need the room."""


class GemmHopper(FloatProduct[Tokens]):
    """See `kernels.gemm_hopper`. **Fields:** ``rows``: of the weight in a tile; ``sizes``: tokens that it may have."""

    name: ClassVar[str] = "gemm_hopper"
    config = Tokens
    rows: ClassVar[int] = 128
    sizes: ClassVar[Collection[int]] = TILE_TIMES

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        """Sizes fit descriptors; scales are applied to the weight and rounded with it, or to the sum over all of K."""
        if not problem.narrow or not hopper.fits(device, 128):
            return False
        return parameter_rows(problem) > 0 and (problem.whole or problem.half or not problem.exact)

    def rule(self, device: Device, problem: GemmProblem) -> Tokens | None:
        """The tile for which programs have the least to do."""
        return best_tile(problem, TILE_TIMES, 128, device.sms) if problem.rows > 16 else None

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[Tokens]:
        if problem.rows > 16:
            yield from tile_choices(problem, self.sizes, 128, device.sms, self.rows)

    def work(self, device: Device, problem: GemmProblem, config: Tokens) -> Work:
        return tail_work(device, problem, config, 128, self.rows)

    def apart(self, device: Device, problem: GemmProblem, config: Tokens) -> bool:
        return tail_apart(device, problem, config, 128, self.rows)

    def copies(self, problem: GemmProblem) -> tuple[int, ...]:
        return copies_of_x(problem, 8) + copies_of_result(problem) + copies_for_sums(problem)

    def launch(
        self, x: Tensor, weight: Weight, bias: Tensor | None, device: Device, problem: GemmProblem, config: Tokens
    ) -> Tensor:
        return self.multiply(on_lines(x, weight, device), weight, bias, device, problem, config)

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
        """X ``(M, columns)``, K or more, on 16 bytes, times the weight; there are zeros behind K.

        ``tokens``: scales ``(M,)`` of x, if it holds codes in float16, which the units of a weight are for. Tiles have
        ``config.bm`` tokens, or fewer if fewer hold them all.
        """
        from ..kernels.gemm_hopper import UNITS, gemm_hopper
        from ..kernels.operands_hopper import ROWS

        data, scale, zero, *_ = weight
        (m, columns), n, bits, rows = x.shape, problem.n, problem.bits, ROWS.value
        bm = next(size for size in (32, 64, 128, config.bm) if size >= min(m, config.bm))
        blocks, wide = -(-columns // 128), self.rows
        scaled, each, sums = not problem.one_group, parameter_rows(problem), sums_of(x, problem, device)
        # The rows of a tile for each warpgroup, of which there are at least two; whole tiles of results would take the
        # place of a stage.
        groups = wide // rows
        pieces = 2 if bm * groups > 256 else 1
        y = result(m, n, problem.out_dtype, x.device)
        w = int4_words(data) if bits == 4 else descriptor(data.view(torch.int16), (rows, 32))
        tail = tail_of(device, x, n, config._replace(bm=bm), blocks, wide)
        numbers: Any = scale if zero is None else zero
        factor, kind = weight.factor, NO_ZERO if sums is not None else problem.zero
        if kind:
            numbers = descriptor(numbers, (each, 2 * rows), swizzled=False)
        if weight.units is not None:
            factor, kind = weight.units, UNITS.value
            numbers = descriptor(weight.units.view(1, -1), (1, 2 * rows), swizzled=False)
        launch(
            gemm_hopper, (tail.programs,), descriptor(x, (bm, 64)), w,
            descriptor(scale, (each, 2 * rows), swizzled=False) if scaled else scale,
            numbers, scale if factor is None else factor, scale if bias is None else bias,
            scale if tokens is None else tokens, scale if sums is None else sums,
            descriptor(y, (bm // pieces, rows)), *tail.memory(y), m, n, tail.tiles, -(-m // bm), -(-n // wide), blocks,
            blocks if problem.one_group else max(1, weight.group // 128), tail.waves, tail.share,
            BITS=bits, BM=bm, STAGES=stages_of(weight, bm, pieces, each, scaled, wide), GROUP=2048 // bm, EACH=each,
            SCALED=scaled, ZERO=kind, BIAS=bias is not None, PIECES=pieces, **decoding(weight),
            U=blocks_of_a_turn(bm, bits), SPREAD=tail.parts is not None, TOKENS=tokens is not None,
            SUMS=sums is not None, GROUPS=groups, **options(device, 4),
        )  # fmt: skip
        return finished(y, n, device)


def blocks_of_a_turn(bm: int, bits: int) -> int:
    """Blocks of K in a turn of the kernel's loop: no product runs on from one turn to the next."""
    if bits == 8:
        return 4 if bm in {64, 128} else 2
    return 2 if bm <= 128 else 1


def stages_of(weight: Weight, bm: int, pieces: int, each: int, scaled: bool, rows: int = 128) -> int:
    """Stages of a ring that fits shared memory; ``each``: rows of parameters of a block; ``rows``: of the weight."""
    numbers = [weight.scale if scaled else None, weight.zero]
    # Those of 128 rows, or twice as many: copies go to multiples of 128 bytes of shared memory.
    parameters = 128 * each * sum(t.element_size() for t in numbers if t is not None)
    parameters += 0 if weight.units is None else 512
    slot = (64 * rows if weight.bits == 4 else 0) + -(-rows // 128) * parameters
    stage = bm * 128 + (64 * rows if weight.bits == 8 else 0)
    # Results of all warpgroups, or of one and the float32 sums of the other.
    fixed = bm // pieces * 2 * rows if rows > 64 else bm * 128 + bm * 256
    stages = room_for(stage, slot, fixed, _STAGES[weight.bits, bm])
    # If warpgroups take blocks in turn, a stage has to be always of the same one: parity tells a phase of a barrier
    # only from the next, and copies may arrive in any order, so nobody may leave a phase out.
    return stages if rows > 64 else stages // 4 * 4


def parameter_rows(problem: GemmProblem) -> int:
    """Rows of scales that 128 columns have, of which the kernel takes 1, 2, 4 or 8; 0 if it can't take them."""
    if problem.bits == 8:
        return 1 if problem.one_group or problem.group % 128 == 0 else {64: 2, 32: 4}.get(problem.group, 0)
    if problem.block == 128:
        return 1
    if problem.halves:
        return 8
    # A single group of fewer columns than 128, as of a very small K, is packed in blocks of that size, too.
    return 128 // problem.block if problem.group == problem.block and not problem.one_group else 0


class GemmHopper64(GemmHopper):
    """`GemmHopper` for few rows of the weight and long ones: the two warpgroups share the K of tiles of 64.

    So half as many programs share a tile, whose sums they exchange through memory.
    """

    name: ClassVar[str] = "gemm_hopper_64"
    rows: ClassVar[int] = 64
    sizes: ClassVar[Collection[int]] = (128, 64, 32)

    def rule(self, device: Device, problem: GemmProblem) -> Tokens | None:
        """None: `GemmHopper` has one."""
        del device, problem
        return None


class GemmHopper192(GemmHopper):
    """`GemmHopper` with three warpgroups, for tiles of three quarters of the largest, which fill more multiprocessors.

    They copy less of x for each product than tiles of 128 rows by as many tokens.
    """

    name: ClassVar[str] = "gemm_hopper_192"
    rows: ClassVar[int] = 192
    sizes: ClassVar[Collection[int]] = (128,)

    def rule(self, device: Device, problem: GemmProblem) -> Tokens | None:
        """None: `GemmHopper` has one."""
        del device, problem
        return None


GEMM_HOPPER = GemmHopper()
GEMM_HOPPER_64 = GemmHopper64()
GEMM_HOPPER_192 = GemmHopper192()
