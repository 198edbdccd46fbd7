"""``grouped_tiles``, ``grouped_gemv``: products of several experts, each with rows of its own, in one launch.

The ends of the experts' rows are read by the kernel: a program finds the tiles that there are and computes every
so-many-th of them. Within an expert, tiles of its rows run next to each other for the same rows of its weight, which is
then read from memory once.

Grid: one-dimensional, any number of programs; `tiles_at_most` many have one tile each, or none. Tiles: BN rows of the
weight by BM of an expert's rows of x, K in steps of U blocks of P columns. Inputs: x ``(T, K)`` 16-bit floats sorted by
expert, zero up to whole steps; w planar16 or rows16 of each expert; scales and zero points ``(E, G, N)``; y ``(T, N)``.
Floor: few rows read the packed weights of the experts that have rows, once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qcore_triton.kernels.elements import factor_of

from .gemm import tile_sum
from .gemv import some_rows

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit
def rows_of(offsets, E, T, SE: tl.constexpr):
    """First row and end of each expert, int32 (SE,), within 0..T whatever the offsets are; empty beyond E."""
    e = tl.arange(0, SE)
    ends = tl.load(offsets + e, mask=e < E, other=0)
    begins = tl.load(offsets + e - 1, mask=(e > 0) & (e < E), other=0)
    tl.device_assert((begins >= 0) & (begins <= ends) & (ends <= T) | (e >= E), "offsets must ascend within 0..T")
    ends = tl.minimum(ends, T)
    begins = tl.minimum(tl.maximum(begins, 0), ends)
    return begins, ends


@triton.jit
def fill_behind(y, offsets, E, T, N, B: tl.constexpr):
    """Write zeros to the rows of y behind the last expert's, which belong to none; programs share them."""
    program = tl.program_id(0).to(tl.int64)
    last = tl.minimum(tl.maximum(tl.load(offsets + E - 1), 0), T).to(tl.int64)
    count = (T - last) * N
    for start in range(program * B, count, tl.num_programs(0).to(tl.int64) * B):
        at = start + tl.arange(0, B)
        tl.store(y + last * N + at, tl.zeros([B], y.dtype.element_ty), mask=at < count)


@triton.jit
def _place(tile, upto, begins, ends, BN: tl.constexpr, BM: tl.constexpr, SE: tl.constexpr):
    """The expert of a tile, first row and number of the expert's rows, and the tile's first row of W and of those.

    upto: the number of tiles of an expert and those before it. The tile's expert is the first that has not all of them
    before the tile.
    """
    before = upto <= tile
    expert = tl.sum(before.to(tl.int32), 0)
    inside = tile - tl.max(tl.where(before, upto, 0), 0)
    mine = tl.arange(0, SE) == expert
    begin = tl.max(tl.where(mine, begins, 0), 0)
    count = tl.max(tl.where(mine, ends, 0), 0) - begin
    height = tl.cdiv(count, BM)
    return expert, begin, count, inside // height * BN, inside % height * BM


@triton.jit(do_not_specialize=["E", "T", "N", "planes", "KB", "PER", "groups", "eighths", "pitch"])
def grouped_tiles(x, w, scale, zero, factor, bias, row_scale, offsets, y, E, T, N, planes, KB, PER, groups, eighths,
                  pitch, SE: tl.constexpr, BITS: tl.constexpr, P: tl.constexpr, U: tl.constexpr, ZERO: tl.constexpr,
                  BIAS: tl.constexpr, ROW_SCALES: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, NW: tl.constexpr,
                  STAGES: tl.constexpr, FRAG: tl.constexpr, SCALES: tl.constexpr, EACH: tl.constexpr,
                  TERMS: tl.constexpr, ALIGNED: tl.constexpr, ASM: tl.constexpr, HOPPER: tl.constexpr,
                  WIDE: tl.constexpr, PDL: tl.constexpr, ELEMENT: tl.constexpr, FACTOR: tl.constexpr,
                  G: tl.constexpr):  # fmt: skip
    """``y[i, n] = row_scale[i] * sum_k x[i, k] * W[e, n, k] + bias[e, n]`` for row i of expert e; 0 for rows of none.

    offsets: int32 (E,), the ends of the experts' rows; SE: E up to a power of two; planes: 16 rows each that a packed
    weight has; groups: of K; row_scale: float32 (T,) if ROW_SCALES; factor: float32 (E,) if FACTOR; the rest as for
    `gemm`.
    """
    if PDL:
        gdc_launch_dependents()
    if ALIGNED:
        N = N // 8 * 8  # tells the compiler
    NP = planes * 16
    BYTES: tl.constexpr = P // 2 if BITS == 4 else P
    # 1. The work that there is. Offsets may be the previous kernel's result, as x may.
    if PDL:
        gdc_wait()
    begins, ends = rows_of(offsets, E, T, SE)
    tiles_n = tl.cdiv(N, BN)
    upto = tl.cumsum((ends - begins + BM - 1) // BM, 0) * tiles_n  # tiles of this expert and those before
    total = tl.max(upto, 0)
    fill_behind(y, offsets, E, T, N, 1024)
    line = (KB * U).to(tl.int64) * BYTES if BITS == 4 else pitch.to(tl.int64) * 32
    tile = tl.program_id(0)
    while tile < total:
        # 2. Its expert, rows and columns.
        expert, begin, count, n0, m0 = _place(tile, upto, begins, ends, BN, BM, SE)
        # 3. The sum over K, as for one weight: behind the last row come this expert's rows again.
        own = expert.to(tl.int64)
        row = begin.to(tl.int64) * (eighths * 8)
        parameters = own * groups * NP
        acc = tile_sum(x + row, w + own * planes * 16 * line, scale + parameters, zero + parameters, n0, m0,
                       expert * 0, KB + expert * 0, count, N, NP, NP, KB, PER, eighths, pitch,
                       T.to(tl.int64) * (eighths * 8), BITS, P, U, ZERO, BN, BM, NW, STAGES, FRAG, SCALES, EACH, TERMS,
                       ASM, HOPPER, WIDE, False, ELEMENT, G)  # fmt: skip
        # 4. Scale, add the bias, round once and store.
        n = n0 + tl.arange(0, BN)
        m = m0 + tl.arange(0, BM)
        if FACTOR:
            acc *= factor_of(factor + own, FACTOR)
        if ROW_SCALES:
            acc *= tl.load(row_scale + begin + tl.minimum(m, count - 1))[None, :]
        if BIAS:
            acc += tl.load(bias + own * N + tl.minimum(n, N - 1)).to(tl.float32)[:, None]
        out = y + (begin + m).to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out, acc.to(y.dtype.element_ty), mask=(n < N)[:, None] & (m < count)[None, :])
        tile += tl.num_programs(0)


@triton.jit(do_not_specialize=["E", "T", "N", "planes", "KB", "PER", "groups", "eighths", "pitch"])
def grouped_gemv(x, w, scale, zero, factor, bias, row_scale, offsets, y, E, T, N, planes, KB, PER, groups, eighths,
                 pitch, ELEMENT: tl.constexpr, FACTOR: tl.constexpr, HALVES: tl.constexpr, SE: tl.constexpr,
                 BITS: tl.constexpr, P: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr,
                 ROW_SCALES: tl.constexpr, ONE_GROUP: tl.constexpr, NB: tl.constexpr, XR: tl.constexpr,
                 R: tl.constexpr, U: tl.constexpr, NW: tl.constexpr, STAGES: tl.constexpr, BF16: tl.constexpr,
                 ALIGNED: tl.constexpr, RING: tl.constexpr, DYNAMIC: tl.constexpr, LATE: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    """`grouped_tiles` by the method of `gemv`: 16 * R rows of a weight by 8 * NB rows of x, one tile per program."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    begins, ends = rows_of(offsets, E, T, SE)
    upto = tl.cumsum((ends - begins + 8 * NB - 1) // (8 * NB), 0) * tl.cdiv(N, 16 * R)
    fill_behind(y, offsets, E, T, N, 1024)
    tile = tl.program_id(0)
    if tile < tl.max(upto, 0):
        expert, begin, count, n0, m0 = _place(tile, upto, begins, ends, 16 * R, 8 * NB, SE)
        first = (begin + m0).to(tl.int64)
        own = expert.to(tl.int64)
        line = KB.to(tl.int64) * (P // 2) if BITS == 4 else pitch.to(tl.int64) * 32
        parameters = own * groups * (planes * 16)
        some_rows(x + first * (eighths * 8), w + own * planes * 16 * line, scale + parameters, zero + parameters,
                  factor + own, bias + own * N, row_scale + first, y + first * N, n0, tl.minimum(count - m0, 8 * NB),
                  N, eighths * 8, planes * 16, KB, PER, eighths * 8, pitch, ELEMENT, FACTOR, HALVES, BITS, P, ZERO,
                  BIAS, ROW_SCALES, ONE_GROUP, NB, XR, R, U, NW, STAGES, BF16, ALIGNED, RING, DYNAMIC, LATE,
                  False)  # fmt: skip
