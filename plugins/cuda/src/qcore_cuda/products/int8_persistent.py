"""`INT8_PERSISTENT`: many rows of codes by tensor descriptors, on sm_90 and later; int4 is unpacked to int8 first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from torch import Tensor

from qcore_triton.codes import Codes
from qcore_triton.weights import INT_ZERO, NO_ZERO

from ..costs import Work
from ..kernels.int8_persistent import persistent
from ..problem import GemmProblem
from ..runtime.device import Device
from ..runtime.launch import launch, options
from .base import Choice, Int8Product, Operands
from .int8_tiles import INT8_TILES, Tile, unpacked
from .quantized import arguments_of, x_sums


class Band(NamedTuple):
    """**Fields:** ``bm``, ``bn``: the tile; ``warps``; ``stages``; ``group_m``: rows of tiles per band.

    ``pieces``: in which a tile is stored; ``tma_store``, ``flatten``, ``specialize``: as the kernel takes them;
    ``per_sm``: programs per multiprocessor, 0 = one per tile.
    """

    bm: int
    bn: int
    warps: int
    stages: int
    group_m: int = 8
    pieces: int = 1
    tma_store: bool = False
    flatten: bool = False
    specialize: bool = False
    per_sm: int = 0


_BANDS = (
    (128, 64, 4, 4, 1, 0, 8), (64, 128, 4, 4, 1, 0, 8), (128, 128, 4, 3, 2, 0, 8), (128, 128, 4, 4, 1, 0, 8),
    (128, 128, 8, 4, 1, 0, 8), (128, 256, 8, 3, 2, 0, 8), (128, 256, 8, 3, 2, 1, 8), (128, 256, 8, 4, 2, 1, 8),
    (128, 128, 4, 4, 2, 0, 8), (128, 128, 4, 3, 2, 2, 8), (128, 128, 4, 3, 2, 0, 16), (128, 128, 4, 3, 1, 0, 8),
    (128, 256, 8, 3, 2, 1, 16), (128, 256, 8, 4, 2, 1, 16), (256, 128, 8, 3, 2, 1, 8), (256, 128, 8, 4, 2, 1, 16),
)  # fmt: skip
"""Tile, warps, stages, pieces, programs per multiprocessor, rows per band; each has been the fastest for some size."""


class Int8Persistent(Int8Product[Band]):
    """See `kernels.int8_persistent`."""

    name: ClassVar[str] = "int8_persistent"
    config = Band
    unaligned: ClassVar[int | None] = INT8_TILES.unaligned

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        del problem
        return device.descriptors

    def adapted(self, problem: GemmProblem, config: Band) -> Choice:
        """Zero points of groups, but for those that unpacking int4 subtracts, are for tiles of half the size."""
        left = problem.zero not in ((NO_ZERO, INT_ZERO) if problem.bits == 4 else (NO_ZERO,))
        if problem.grouped and (left or problem.x_zero):
            return Choice(INT8_TILES, Tile(128, 64, 4, 3, unpack=problem.bits == 4))
        return Choice(self, config)

    def rule(self, device: Device, problem: GemmProblem) -> Band | None:
        if problem.rows <= 128:
            return None
        if problem.grouped:
            return Band(128, 128, 8, 3, tma_store=True)
        if problem.rows * problem.n <= 128 * 128 * device.sms:
            bn = 64 if problem.rows <= 256 else 128
            warps = 8 if bn == 128 and device.arch >= 100 else 4  # what fits the registers
            return Band(128, bn, warps, 4, tma_store=True)
        return Band(128, 256, 8, 3, pieces=2, tma_store=True, per_sm=1)

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[Band]:
        del device
        for bm, bn, warps, stages, pieces, per_sm, band in _BANDS if problem.rows >= 128 else ():
            if bm <= 2 * problem.rows:
                yield Band(bm, bn, warps, stages, band, pieces, tma_store=True, per_sm=per_sm)

    def work(self, device: Device, problem: GemmProblem, config: Band) -> Work:
        del device
        return Work(-(-problem.n // config.bn) * -(-problem.rows // config.bm), problem.k / 128)

    def launch(self, codes: Codes, operands: Operands, device: Device, problem: GemmProblem, config: Band) -> Tensor:
        from triton.tools.tensor_descriptor import TensorDescriptor

        if operands.weight.bits == 4:
            operands = operands._replace(weight=unpacked(operands.weight, codes.q.shape[1], problem, device))
        (m, wide), data, args = codes.q.shape, operands.weight.data, arguments_of(codes, operands, problem)
        n, (rows, pitch), p, (bm, bn) = problem.n, data.shape, problem.step, config[:2]
        pitch = pitch // 32 * 32
        count = -(-n // bn) * -(-m // bm)
        tma_store = config.tma_store and n % 16 == 0
        launch(
            persistent, (min(count, config.per_sm * device.sms) if config.per_sm else count,),
            TensorDescriptor(codes.q, [m, wide], [wide, 1], [bm, p]), *args.of_x,
            TensorDescriptor(data, [rows, pitch], [pitch, 1], [bn, p]), *args.of_w,
            x_sums(codes, args, device), *args.end.args, args.y,
            TensorDescriptor(args.y, [m, n], [n, 1], [bm, bn // config.pieces]) if tma_store else args.y,
            *args.end.numbers, m, n, problem.k, args.blocks,
            GROUP_M=config.group_m, ALIGNED=n % 16 == 0, PIECES=config.pieces, TMA_STORE=tma_store,
            FLATTEN=config.flatten, SPECIALIZE=config.specialize, BN=bn, BM=bm, STAGES=config.stages,
            **args.form, **options(device, config.warps),
        )  # fmt: skip
        return args.y


INT8_PERSISTENT = Int8Persistent()
