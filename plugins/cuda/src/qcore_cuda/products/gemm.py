"""`GEMM`: any number of rows on any device: tiles of the result, whose K may be shared by several programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from qcore_triton.weights import FLOAT_ZERO, Weight

from ..costs import Work
from ..kernels.gemm import arrange_columns, gemm
from ..problem import GemmProblem
from ..runtime.counters import counters
from ..runtime.device import Device
from ..runtime.launch import launch, options
from ..runtime.replay import empty, tracked
from ..schedule import spread
from .aligned import aligned, copies_for_sums, copies_of_result, copies_of_x, sums_of
from .base import Choice, FloatProduct, decoding


class Tile(NamedTuple):
    """**Fields:** ``bn``, ``bm``: weight rows and tokens; ``warps``; ``stages``.

    ``unroll``: times 128 columns in a step; ``scaled``: weights are scaled before the product, not sums after it;
    ``split``: programs that share K; ``even``: programs per multiprocessor, over which all tiles are spread evenly
    instead; ``registers``: of a thread, at most.
    """

    bn: int
    bm: int
    warps: int = 4
    stages: int = 1
    unroll: int = 1
    scaled: bool = False
    split: int = 1
    even: int = 0
    registers: int = 0


_TILES = (
    *(Tile(bn, bm, warps, stages, scaled=True) for bn, bm, warps, stages in (
        (64, 32, 4, 4), (128, 32, 8, 5), (64, 64, 4, 4), (256, 64, 8, 3), (64, 128, 4, 3), (128, 128, 8, 3),
        (128, 256, 8, 3),
    )),
    *(Tile(bn, bm, warps, stages, unroll=2, scaled=True) for bn, bm, warps, stages in (
        (64, 32, 4, 4), (64, 64, 4, 3), (128, 64, 8, 3),
    )),
    Tile(128, 32, 8, 4, unroll=2, scaled=True, registers=128),
    Tile(128, 64, 8, 3, scaled=True, registers=128),
    *(Tile(bn, bm, warps, 4) for bn, bm, warps in ((64, 32, 4), (128, 32, 8), (64, 64, 4))),
)  # fmt: skip
"""Each was the fastest for some size, or the fastest of those that do not scale weights."""


_THREE_STAGES = 128 << 10
"""The most bytes of shared memory that Triton takes for three stages of a tile of 128 by 128, of any weight."""


class Gemm(FloatProduct[Tile]):
    """See `kernels.gemm`."""

    name: ClassVar[str] = "gemm"
    config = Tile

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        del device
        return problem.narrow

    def adapted(self, problem: GemmProblem, config: Tile) -> Choice | None:
        return adapted(self, problem, config)

    def rule(self, device: Device, problem: GemmProblem) -> Tile:
        m, n = problem.rows, problem.n
        # AMD's GPUs have neither registers nor shared memory for the large tile, some of NVIDIA's no third stage of it.
        if m >= 256 and not device.hip and (problem.whole or problem.lossless or not problem.exact):
            return Tile(128, 128, warps=8, stages=3 if device.shared >= _THREE_STAGES else 2, scaled=True)
        bm = min(64, max(16, m))
        tiles = math.ceil(n / 64) * math.ceil(m / bm)
        split = max(1, min(8, 2 * device.sms // max(1, tiles), problem.k // 512))
        stages, split = 4 if m <= 32 else 3, 1 << (split.bit_length() - 1)
        return Tile(64, bm, stages=stages, scaled=problem.halves, split=split)

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[Tile]:
        m = problem.rows
        for tile in _TILES if m > 16 else ():
            if tile.bm <= max(32, m) and tile.bm * 4 >= min(m, 1024):
                yield from _ways(device, problem, tile)

    def work(self, device: Device, problem: GemmProblem, config: Tile) -> Work:
        del device
        tiles = -(-problem.n // config.bn) * -(-problem.rows // config.bm)
        return Work(tiles * config.split, problem.k / (128 * config.split))

    def copies(self, problem: GemmProblem) -> tuple[int, ...]:
        # Rows of the result that begin anywhere are stored value by value, which takes as long as copying them.
        return copies_of_x(problem, problem.block) + copies_of_result(problem) + copies_for_sums(problem)

    def launch(
        self, x: Tensor, weight: Weight, bias: Tensor | None, device: Device, problem: GemmProblem, config: Tile
    ) -> Tensor:
        x = aligned(x, weight, device)
        if reads_rows(problem):
            x = arranged(x, device)
        return multiply(x, x.shape[0], weight, bias, device, problem, config)


def _ways(device: Device, problem: GemmProblem, tile: Tile) -> Iterator[Tile]:
    """A tile with the ways to spread the work: K is split while tiles are few, else all is spread evenly."""
    tiles, most = math.ceil(problem.n / tile.bn) * math.ceil(problem.rows / tile.bm), (12 // tile.warps) * device.sms
    for split in (1, 2, 4, 8):
        if split == 1 or device.sms <= 2 * tiles * split <= 2 * most:
            yield tile._replace(split=split)
    if tiles > device.sms:
        yield from (tile._replace(even=even) for even in (1, 2) if tiles % (even * device.sms))


def adapted(product: FloatProduct[Tile], problem: GemmProblem, config: Tile) -> Choice | None:
    """The choice for a tile: weights are scaled if that rounds nothing that must be exact, or if nothing else works.

    If the problem is `whole`, sums are scaled, whatever the tile says.
    """
    if config.scaled and problem.exact and not (problem.whole or problem.lossless):
        return None
    return None if problem.halves and not config.scaled else Choice(product, config)


def reads_rows(problem: GemmProblem) -> bool:
    """Whether x needs its columns in the order in which threads hold codes of rows16 as operands."""
    return problem.bits == 8 and problem.block == 64


def arranged(x: Tensor, device: Device) -> Tensor:
    """X with its columns in the order in which the kernel meets them in rows16."""
    m, columns = x.shape
    out = empty((m, columns), x.dtype, x.device)
    launch(
        arrange_columns, (-(-m * columns // 2048),), x, out, m, columns // 2, x.stride(0) // 8,
        B=1024, **options(device, 4),
    )  # fmt: skip
    return out


class Steps(NamedTuple):
    """How a program goes along K.

    **Fields:** ``unroll``: blocks of a step; ``each``: each of them, or each of their groups, has scales of its own;
    ``total``; ``per``: steps of a group.
    """

    unroll: int
    each: bool
    total: int
    per: int


def steps_of(weight: Weight, device: Device, problem: GemmProblem, config: Tile) -> Steps:
    """Blocks of a step are of one group, or each of another one if scales meet the weight."""
    block = problem.block
    blocks = -(-problem.k // block)
    per = blocks if problem.one_group else max(1, weight.group // block)
    unroll, each = math.gcd(blocks, max(1, (64 if device.hip else 128) * config.unroll // block)), False
    if problem.halves:
        each, per = True, unroll
    elif per > 1 or unroll == 1 or not config.scaled:
        unroll = math.gcd(unroll, per)
    else:
        each, per = True, unroll
    return Steps(unroll, each, blocks // unroll, per // unroll)


def multiply(
    x: Tensor, m: int, weight: Weight, bias: Tensor | None, device: Device, problem: GemmProblem, config: Tile
) -> Tensor:
    """``x @ W^T + bias``: x is one or more matrices of m rows, whose sum is multiplied, columns as the kernel wants."""
    data, scale, zero, factor = weight.data, weight.scale, weight.zero, weight.factor
    n, (bn, bm) = problem.n, config[:2]
    steps = steps_of(weight, device, problem, config)
    tiles = -(-n // bn) * -(-m // bm)
    waves, share, programs = spread(tiles, steps.total, config.split, config.even, device.sms)
    y, sums = empty((m, n), problem.out_dtype, x.device), sums_of(x, problem, device)
    # Tiles that programs share are summed up from their parts by the last program of each.
    left = tiles - waves * programs
    if left:
        parts = empty(((programs + left) * bn * bm,), torch.float32, x.device)
        counts = tracked(counters, left, x.device)
    else:  # never touched
        parts, counts = x[:1, :8].view(torch.float32), x[:1, :8].view(torch.int32)
    limit: dict[str, Any] = {"maxnreg": config.registers} if config.registers and device.asm else {}
    scales = 2 if problem.one_group and (sums is not None or problem.zero != FLOAT_ZERO) else int(config.scaled)
    launch(
        gemm, (programs,),
        x, data, scale, scale if zero is None else zero, scale if factor is None else factor,
        scale if bias is None else bias, scale if sums is None else sums, y, parts, counts,
        m, n, data.shape[0] * (16 if problem.bits == 4 else 1), steps.total, steps.per, x.stride(0) // 8,
        x.shape[1] // 32, waves, share,
        BITS=problem.bits, P=problem.block, U=steps.unroll, ZERO=problem.zero, BIAS=bias is not None, BN=bn, BM=bm,
        NW=min(config.warps, bn // 16), STAGES=config.stages, FRAG=problem.bits == 4 or problem.block == 64,
        SCALES=scales, EACH=steps.each, TERMS=x.shape[0] // m, GROUP_M=16,
        ALIGNED=next((size for size in (16, 8) if n % size == 0), 0),
        ASM=device.asm, HOPPER=device.arch == 90, WIDE=device.interpreted, G=2 if problem.halves else 1,
        **decoding(weight),
        num_stages=config.stages, **limit, **options(device, config.warps),
    )  # fmt: skip
    return y


GEMM = Gemm()
