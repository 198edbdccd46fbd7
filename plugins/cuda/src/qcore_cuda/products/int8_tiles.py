"""`INT8_TILES`: any number of rows of codes on any device, by tiles of the result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from qcore_triton.codes import Codes
from qcore_triton.kernels.int8_gemm import tiles, unpack
from qcore_triton.weights import INT_ZERO, Weight

from ..costs import Work
from ..problem import GemmProblem
from ..runtime.device import Device
from ..runtime.launch import launch, options
from ..runtime.replay import empty
from .base import Int8Product, Operands
from .quantized import arguments_of, x_sums


class Tile(NamedTuple):
    """**Fields:** ``bm``, ``bn``: the tile; ``warps``; ``stages``; ``group_m``: rows of tiles per band.

    ``swap``: N is the first dimension of the product; ``unpack``: int4 is unpacked to int8 first.
    """

    bm: int
    bn: int
    warps: int
    stages: int
    group_m: int = 8
    swap: bool = False
    unpack: bool = False


class Int8Tiles(Int8Product[Tile]):
    """See `qcore_triton.kernels.int8_gemm`."""

    name: ClassVar[str] = "int8_tiles"
    config = Tile
    unaligned: ClassVar[int | None] = 64

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        del device, problem
        return True

    def rule(self, device: Device, problem: GemmProblem) -> Tile:
        if problem.rows <= 128:
            return Tile(64, 64, 4, 2 if device.hip else 4, swap=True)
        small = problem.grouped
        stages = 2 if device.hip else 3
        return Tile(128, 64 if small else 128, 4 if small else 8, stages, swap=problem.bits == 4)

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[Tile]:
        del device
        m = problem.rows
        if m > 16:
            for bm in (32, 64) if m <= 128 else (64, 128):
                yield from (Tile(bm, bn, 4, stages, swap=True) for bn in (64, 128) for stages in (3, 4))
        if m >= 128:
            shapes = ((128, 128, 8, 3), (128, 256, 8, 3), (64, 128, 4, 4))
            yield from (Tile(*shape, swap=problem.bits == 4) for shape in shapes)

    def work(self, device: Device, problem: GemmProblem, config: Tile) -> Work:
        del device
        return Work(-(-problem.n // config.bn) * -(-problem.rows // config.bm), problem.k / 128)

    def launch(self, codes: Codes, operands: Operands, device: Device, problem: GemmProblem, config: Tile) -> Tensor:
        if config.unpack and operands.weight.bits == 4:
            operands = operands._replace(weight=unpacked(operands.weight, codes.q.shape[1], problem, device))
        (m, wide), weight, args = codes.q.shape, operands.weight, arguments_of(codes, operands, problem)
        n = problem.n
        launch(
            tiles, (-(-n // config.bn) * -(-m // config.bm),),
            codes.q, *args.of_x, weight.data, *args.of_w, x_sums(codes, args, device), *args.end.args, args.y,
            *args.end.numbers, m, n, problem.k, args.blocks, wide // 128,
            0 if weight.bits == 4 else weight.data.shape[1] // 32,
            BITS=weight.bits, GROUP_M=config.group_m, SWAP=config.swap, ALIGNED=n % 16 == 0, ASM=device.asm,
            BN=config.bn, BM=config.bm, STAGES=config.stages, **args.form, **options(device, config.warps),
        )  # fmt: skip
        return args.y


def unpacked(weight: Weight, wide: int, problem: GemmProblem, device: Device) -> Weight:
    """An int4 weight as int8 rows of ``wide`` codes, its integer zero points subtracted."""
    planes, blocks = weight.data.shape[:2]
    data = empty((planes * 16, wide), torch.int8, weight.data.device)
    subtract = problem.zero == INT_ZERO
    zero = weight.scale if weight.zero is None else weight.zero
    launch(
        unpack, (planes, blocks), weight.data, zero, data, weight.n, blocks, wide // 128,
        P=problem.step, PER=problem.per, SUBTRACT=subtract, **options(device, 4),
    )  # fmt: skip
    return weight._replace(data=data, bits=8, zero=None if subtract else weight.zero)


INT8_TILES = Int8Tiles()
