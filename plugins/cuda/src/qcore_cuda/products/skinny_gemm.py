"""Products for few rows on NVIDIA, `gemv` and `int8_gemv`: the shape of a program, and the size of its ring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from qcore_triton.weights import Weight

from ..costs import Work
from ..kernels.smem_pipeline import STATIC, scratch
from ..problem import GemmProblem
from ..runtime.device import Device
from ..runtime.launch import options

ROWS = 16
"""The largest M for which these kernels are made; see `chunks` for more."""
_COLUMN_BLOCK = 8


class WarpShape(NamedTuple):
    """The shape of a program.

    **Fields:** ``row_blocks``: of 16 rows of W; ``unroll``: blocks of K that a warp takes at a time, counted as 128
    codes of int4 or 64 of int8; ``warps``; ``stages``: of a warp's ring; ``late``: the next kernel may begin when this
    one has read everything, not already when it begins.
    """

    row_blocks: int = 1
    unroll: int = 1
    warps: int = 4
    stages: int = 1
    late: bool = False


def row_class(m: int) -> int:
    """1, 8 or 16: the classes of M that these kernels distinguish."""
    return 1 if m == 1 else 8 if m <= 8 else 16


def rule(device: Device, problem: GemmProblem) -> WarpShape:
    """A good shape for any device."""
    m, wide = problem.rows, problem.n > 64 * device.sms
    if m == 1:
        return (WarpShape(2 if wide else 1, 2, 4, 3)) if problem.bits == 4 else WarpShape(1, 4, 4, 2)
    if problem.bits == 8:
        return WarpShape(4, 1, 4, 2) if wide and m > 8 else WarpShape(2, 2, 4, 2)
    return WarpShape(4, 1, 4, 3) if wide else WarpShape(2, 1, 8, 2)


def candidates(
    shapes: Mapping[tuple[int, int], tuple[tuple[int, int, int, int], ...]], problem: GemmProblem
) -> Iterator[WarpShape]:
    """``shapes``, by bits and `row_class`, each with an early and a late start of the next kernel."""
    for shape in shapes[problem.bits, row_class(problem.rows)]:
        yield from (WarpShape(*shape, late) for late in (False, True))


def work(problem: GemmProblem, shape: WarpShape) -> Work:
    """The work of a launch; a step is 128 columns of a warp."""
    return Work(-(-problem.n // (16 * shape.row_blocks)), problem.k / (128 * shape.warps))


class Ring(NamedTuple):
    """The content of a ring, in bytes.

    **Fields:** for each block of K: ``block``: 16 rows of W; ``x``: rows of x; ``parameters``: scales and zero points
    of 16 rows; ``blank``: zeros. ``fixed``: memory next to the ring.
    """

    block: int
    x: int
    parameters: int
    blank: int
    fixed: int = 0

    def size(self, shape: WarpShape) -> int:
        """The bytes of all warps together."""
        rows = shape.row_blocks * (self.block + self.parameters)
        return shape.warps * shape.unroll * (shape.stages * (rows + self.x) + self.blank) + self.fixed

    def fitted(self, shape: WarpShape, device: Device, dynamic: bool) -> WarpShape:
        """The shape, reduced until it fits shared memory.

        ``dynamic``: a kernel can have more than Triton's own, see `launch.supports_dynamic_shared`.
        """
        # A dynamic ring follows Triton's own shared memory, which has a name only if warps exchange values.
        most = device.shared if dynamic and shape.warps > 1 else STATIC
        while self.size(shape) + scratch(shape.warps) > most:
            if shape.stages > 2:
                shape = shape._replace(stages=shape.stages - 1)
            elif shape.unroll > 1:
                shape = shape._replace(unroll=shape.unroll // 2)
            elif shape.row_blocks > 1:
                shape = shape._replace(row_blocks=shape.row_blocks // 2)
            else:
                shape = shape._replace(warps=shape.warps // 2)
        return shape


class Program(NamedTuple):
    """**Fields:** ``rows``: of W, of one program; ``meta``: constexprs and options that both kernels have."""

    rows: int
    meta: Mapping[str, Any]


@lru_cache(maxsize=4096)
def program(
    device: Device,
    shape: WarpShape,
    dynamic: bool,
    m: int,
    bits: int,
    block: int,
    x_bytes: int,
    of_row: int,
    fixed: int = 0,
) -> Program:
    """A program for M rows of x, in ``block`` columns at a time.

    ``dynamic``: as for `Ring.fitted`; ``x_bytes``: of a value of x in the ring, 0 if it holds none; ``of_row``: bytes
    of a row's scale and zero point in it; ``fixed``: bytes next to the ring.
    """
    rows_of_x = 1 if m == 1 else -(-m // _COLUMN_BLOCK) * _COLUMN_BLOCK
    blank = block * (x_bytes or 1) if m == 1 else 0
    ring = Ring(2 * block * bits, block * x_bytes * rows_of_x, 16 * of_row, blank, fixed)
    # Configurations count blocks of 128 codes of int4, or 64 of int8: more of smaller ones.
    shape = shape._replace(unroll=shape.unroll * max(1, 512 // (block * bits)))
    shape = ring.fitted(shape, device, dynamic)
    size = ring.size(shape)
    meta = {
        "NB": -(-m // _COLUMN_BLOCK), "XR": rows_of_x, "R": shape.row_blocks, "U": shape.unroll, "NW": shape.warps,
        "STAGES": shape.stages, "LATE": shape.late, "RING": size,
        "DYNAMIC": size if size + scratch(shape.warps) > STATIC else 0,
        **options(device, shape.warps),
    }  # fmt: skip
    return Program(16 * shape.row_blocks, meta)


class Layout(NamedTuple):
    """A packed weight as arguments of the kernels.

    **Fields:** ``data``, on 16 bytes; ``even``: scales and zero points of 16 rows can be copied 16 bytes at a time;
    ``of_row``: bytes of a row's scale and zero point, 0 if they cannot; ``sizes``: rows, blocks of K, blocks per group,
    and the row pitch of rows16 in units of 32.
    """

    data: Any
    even: bool
    of_row: int
    sizes: tuple[int, int, int, int]


def layout(weight: Weight, problem: GemmProblem) -> Layout:
    """The layout of a weight; an unaligned view is copied."""
    data, scale, zero = weight.data, weight.scale, weight.zero
    if data.data_ptr() % 16:  # a view into another tensor
        data = data.clone()
    even = not (scale.data_ptr() % 16 or (zero is not None and zero.data_ptr() % 16))
    of_row = (scale.element_size() + (0 if zero is None else zero.element_size())) * (2 if problem.halves else 1)
    block, shape = problem.block, data.shape
    if problem.bits == 4:
        rows, blocks, pitch = shape[0] * 16, shape[1], 0
    else:
        rows, blocks, pitch = shape[0], shape[1] // block, shape[1] // 32
    per = blocks if problem.one_group else max(1, weight.group // block)
    return Layout(data, even, of_row if even else 0, (rows, blocks, per, pitch))
