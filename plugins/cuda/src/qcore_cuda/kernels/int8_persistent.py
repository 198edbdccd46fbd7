"""``persistent``: int8 times int8 for many rows, bound by the tensor cores; operands come through descriptors (TMA).

Grid: as many programs as stay resident, or one per tile; programs loop over tiles of BM tokens by BN rows of the
weight, K in steps of P columns. Inputs: descriptors of codes x ``(M, 128 * pitch)`` and w (rows16, or int4 unpacked to
int8 rows), for sm_90 and later; y ``(M, N)``. Floor: ``2 * M * N * K`` operations at the int8 peak of the tensor cores.
Exact: int32 sums of one step (GROUPED) or of all of K, as limited by `qcore_triton.host.blocking`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qcore_triton.kernels.elements import pitch_of
from qcore_triton.kernels.int8_common import FLOAT_ZERO, INT_ZERO, ended, store, tile_order
from qcore_triton.kernels.rounding import begin


@triton.jit
def _scaled(
    acc,
    xs,
    xz,
    xt,
    rn,
    N,
    K,
    scale,
    zero,
    sums,
    GROUPED: tl.constexpr,
    WZERO: tl.constexpr,
    XZERO: tl.constexpr,
):
    """The accumulator in float32 with all scales and zero points; xs, xz, xt: scale, zero point and sum per row."""
    if GROUPED:
        v = acc
    else:
        in_n = rn < N
        if WZERO:
            wz = tl.load(zero + rn, mask=in_n, other=0)[None, :]
        if WZERO == INT_ZERO:
            acc -= wz.to(tl.int32) * xt[:, None]
        if XZERO:
            acc -= xz.to(tl.int32)[:, None] * tl.load(sums + rn, mask=in_n, other=0)[None, :]
        v = acc.to(tl.float32) * tl.load(scale + rn, mask=in_n, other=0.0).to(tl.float32)[None, :]
        if WZERO == FLOAT_ZERO:
            if XZERO:
                xt -= xz.to(tl.int32) * K
            v += wz.to(tl.float32) * xt.to(tl.float32)[:, None]
    return v * xs[:, None]


@triton.jit(do_not_specialize=["M", "N", "K", "blocks", "out_scale_number", "out_zero_number"])
def persistent(
    x,
    x_scale,
    x_zero,
    w,
    scale,
    zero,
    sums,
    x_sums,
    bias,
    out_scale,
    out_zero,
    y,
    y_tiles,
    out_scale_number,
    out_zero_number,
    M,
    N,
    K,
    blocks,
    P: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_M: tl.constexpr,
    GROUPED: tl.constexpr,
    PER: tl.constexpr,
    WZERO: tl.constexpr,
    XZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUT: tl.constexpr,
    ALIGNED: tl.constexpr,
    PIECES: tl.constexpr,
    TMA_STORE: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """y ``(M, N)`` by tiles of BM x BN.

    x, w: descriptors of codes with blocks ``(BM, P)`` and ``(BN, P)``; y_tiles: one of y, blocks ``(BM, BN / PIECES)``,
    used if TMA_STORE. A tile is stored in PIECES parts, 1 or 2. GROUPED: no zero points. Other arguments as for
    `int8_gemm.tiles`.
    """  # noqa: D403 - y is a name
    if ALIGNED:
        N = N // 16 * 16  # tells the compiler
    rows = (M + BM - 1) // BM
    columns = (N + BN - 1) // BN
    begin(PDL)
    # FLATTEN: Triton pipelines the loops over tiles and over K as one, across the end of a tile.
    for tile in tl.range(
        tl.program_id(0), rows * columns, tl.num_programs(0), flatten=FLATTEN, warp_specialize=SPECIALIZE
    ):
        pm, pn = tile_order(tile, rows, columns, GROUP_M)
        m0, n0 = pm * BM, pn * BN
        acc = tl.zeros((BM, BN), tl.float32 if GROUPED else tl.int32)
        # 1. The scales of the first step; those of the next one are loaded one step ahead, by hand: they are too narrow
        #    for asynchronous copies.
        if GROUPED:
            rn = n0 + tl.arange(0, BN)
            s = tl.load(scale + rn, mask=rn < N, other=0.0).to(tl.float32)
        for i in tl.range(0, blocks, num_stages=STAGES):
            # 2. Operands. Triton keeps TMA copies STAGES - 1 steps ahead; rows behind M and N come as zeros.
            xt = x.load([m0, i * P])
            wt = w.load([n0, i * P])
            # 3. The product: of this step alone, scaled in float32, while the next scales arrive; or on top of all of K
            #    so far.
            if GROUPED:
                d = tl.dot(xt, tl.trans(wt), out_dtype=tl.int32)
                s2 = tl.load(scale + ((i + 1) // PER) * pitch_of(N) + rn, mask=(rn < N) & (i + 1 < blocks), other=0.0)
                acc += d.to(tl.float32) * s[None, :]
                s = s2.to(tl.float32)
            else:
                acc = tl.dot(xt, tl.trans(wt), acc, out_dtype=tl.int32)
        # 4. Epilogue: in PIECES steps, so that fewer values in float32 are live at a time.
        lm = tl.arange(0, BM)
        rm = m0 + lm
        in_m = rm < M
        xs = tl.load(x_scale + rm, mask=in_m, other=0.0)
        xz = tl.load(x_zero + rm, mask=in_m, other=0.0) if XZERO else xs
        xt = tl.load(x_sums + rm, mask=in_m, other=0) if WZERO else lm
        HALF: tl.constexpr = BN // PIECES
        if PIECES == 2:
            first, second = tl.split(tl.permute(tl.reshape(acc, (BM, 2, HALF)), (0, 2, 1)))
        else:
            first = acc
        for part in tl.static_range(PIECES):
            n1 = n0 + part * HALF
            rn = n1 + tl.arange(0, HALF)
            piece = first if part == 0 else second
            v = _scaled(piece, xs, xz, xt, rn, N, K, scale, zero, sums, GROUPED, WZERO, XZERO)
            c = ended(
                v,
                rm[:, None],
                rn[None, :],
                M,
                N,
                bias,
                out_scale,
                out_zero,
                out_scale_number,
                out_zero_number,
                y,
                HAS_BIAS,
                OUT,
            )
            if TMA_STORE:
                y_tiles.store([m0, n1], c)
            else:
                store(c, lm[:, None], rm[:, None], rn[None, :], M, N, y + m0.to(tl.int64) * N)
