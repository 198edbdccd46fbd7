"""`INT8_HOPPER`: many rows of codes and int8 weights per channel on sm_90: one warp copies, two groups multiply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from torch import Tensor

from qcore_triton.codes import Codes

from ..costs import Work
from ..problem import GemmProblem
from ..runtime import hopper
from ..runtime.device import Device
from ..runtime.launch import launch, options
from .aligned import copies_of_result, finished
from .base import Int8Product, Operands
from .quantized import arguments_of, rows_in_memory

_ROWS = 128
"""Tokens of a tile."""
_WAVES = {256: 1.0, 128: 0.54, 64: 0.37}
"""Relative time of a tile by its columns, with all multiprocessors busy."""


class Columns(NamedTuple):
    """**Fields:** ``bn``: weight rows of a tile of 128 tokens; ``group_m``: rows of tiles per band."""

    bn: int
    group_m: int = 8


class Int8Hopper(Int8Product[Columns]):
    """See `kernels.int8_hopper`."""

    name: ClassVar[str] = "int8_hopper"
    config = Columns

    def serves(self, device: Device, problem: GemmProblem) -> bool:
        """No groups, no zero points of the weight, results of one or two bytes, not scaled by tokens."""
        plain = problem.bits == 8 and not (problem.grouped or problem.zero or problem.out_by_token)
        return (
            plain and problem.rows > 64 and problem.out_dtype.itemsize <= 2
            and hopper.fits(device, problem.step)
        )  # fmt: skip

    def rule(self, device: Device, problem: GemmProblem) -> Columns:
        """The tile with which the last wave wastes least."""

        def cost(bn: int) -> float:
            tiles = -(-problem.rows // _ROWS) * -(-problem.n // bn)
            return -(-tiles // device.sms) * _WAVES[bn]

        return Columns(min(_WAVES, key=cost), group_m=16)

    def candidates(self, device: Device, problem: GemmProblem) -> Iterator[Columns]:
        del device, problem
        for bn in _WAVES:
            yield from (Columns(bn, band) for band in (8, 16))

    def work(self, device: Device, problem: GemmProblem, config: Columns) -> Work:
        del device
        return Work(-(-problem.n // config.bn) * -(-problem.rows // _ROWS), problem.k / 128)

    def copies(self, problem: GemmProblem) -> tuple[int, ...]:
        return copies_of_result(problem)

    def launch(self, codes: Codes, operands: Operands, device: Device, problem: GemmProblem, config: Columns) -> Tensor:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from ..kernels.int8_hopper import int8_hopper

        layout, data = gl.NVMMASharedLayout, operands.weight.data
        args = arguments_of(codes, operands, problem, tiles=True)
        (m, wide), n, p, bn, bits = codes.q.shape, problem.n, problem.step, config.bn, args.y.element_size() * 8
        piece = min(64, bn)
        x = TensorDescriptor(codes.q, [rows_in_memory(codes.q), wide], [wide, 1], [_ROWS, p], layout(128, 8, 2))
        w = TensorDescriptor(data, list(data.shape), [data.shape[1], 1], [bn, p], layout(128, 8, 2))
        tiles = layout(min(128, piece * bits // 8), bits, 2)
        y = TensorDescriptor(args.y, [*args.y.shape], [args.y.shape[1], 1], [_ROWS // 2, piece], tiles)
        stages = (hopper.ROOM - 2 * _ROWS * piece * bits // 8) // ((_ROWS + bn) * p)
        launch(
            int8_hopper, (min(-(-n // bn) * -(-m // _ROWS), device.sms),),
            x, *args.of_x, w, args.of_w[0], args.of_w[2], args.end.args[0], args.y, y, *args.end.numbers, m, n,
            args.blocks, P=p, BM=_ROWS, BN=bn, STAGES=min(8, stages), GROUP_M=config.group_m,
            MOVED=args.form["XZERO"], ALIGNED=n % 16 == 0, HAS_BIAS=args.form["HAS_BIAS"], OUT=args.form["OUT"],
            **options(device, 4),
        )  # fmt: skip
        return finished(args.y, n, device)


INT8_HOPPER = Int8Hopper()
