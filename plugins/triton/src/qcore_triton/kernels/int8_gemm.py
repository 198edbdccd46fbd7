"""``tiles``: int8 activations times an int4 or int8 weight, one tile of the result per program, any M.

The version with pointers, for every device. Rows are clamped, not masked; beyond column K, codes of x are 0.

Grid: one program per tile of BM tokens by BN rows of the weight, in bands of GROUP_M rows of tiles; K in blocks of P.
Inputs: codes x ``(M, 128 * pitch)`` in the weight's order of columns; w planar16 or rows16; scales, zero points and
code sums ``(G, pitch_of(N))``; y ``(M, N)``. Floor: ``2 * M * N * K`` operations at the int8 peak of the matrix units.

Exact: a product of codes (int4 codes times 16) is at most 2**14 in magnitude and is accumulated in int32, over one
block if GROUPED, otherwise over all of K (`host.blocking` limits it). The factor of 16 is removed by a shift, or in
float32 as a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elements import pitch_of
from .int8_common import FLOAT_ZERO, INT_ZERO, chosen_nibble, finish, nibbles, tile_order
from .rounding import begin


@triton.jit
def _product(w, x, d, SWAP: tl.constexpr):
    """``d + x @ w.T`` for w ``(BN, BK)``, x ``(BM, BK)``; transposed if SWAP."""
    if SWAP:
        return tl.dot(w, tl.trans(x), d, out_dtype=tl.int32)
    else:  # noqa: RET505 - Triton compiles code after a constexpr branch
        return tl.dot(x, tl.trans(w), d, out_dtype=tl.int32)


@triton.jit
def _columns(v, SWAP: tl.constexpr):
    """A vector along N, to broadcast against the tile."""
    return v[:, None] if SWAP else v[None, :]


@triton.jit
def _rows(v, SWAP: tl.constexpr):
    """A vector along M, to broadcast against the tile."""
    return v[None, :] if SWAP else v[:, None]


@triton.jit(do_not_specialize=["M", "N", "K", "blocks", "pitch", "w_pitch", "out_scale_number", "out_zero_number"])
def tiles(
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
    out_scale_number,
    out_zero_number,
    M,
    N,
    K,
    blocks,
    pitch,
    w_pitch,
    BITS: tl.constexpr,
    P: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
    GROUPED: tl.constexpr,
    PER: tl.constexpr,
    WZERO: tl.constexpr,
    XZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUT: tl.constexpr,
    ALIGNED: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """y ``(M, N)`` by tiles of BM x BN.

    Arguments as for `int8_slices.slices`, and ``x_sums`` int32: if WZERO, sums of x per block of P ``(blocks, M)``,
    or of whole rows ``(1, M)`` unless GROUPED. SWAP: N is the first dimension of the product. ALIGNED: N is a multiple
    of 16, and y can be written 16 bytes at a time.
    """  # noqa: D403 - y is a name
    if ALIGNED:
        N = N // 16 * 16  # a hint for the compiler
    H: tl.constexpr = P // 2
    WHOLE: tl.constexpr = BITS == 8 or P == 32
    D: tl.constexpr = P if WHOLE else H
    pm, pn = tile_order(tl.program_id(0), (M + BM - 1) // BM, (N + BN - 1) // BN, GROUP_M)
    m0, n0 = pm * BM, pn * BN
    lm = tl.arange(0, BM)
    rm = m0 + lm
    rn = n0 + tl.arange(0, BN)
    rk = tl.arange(0, D)
    x += m0.to(tl.int64) * (pitch * 128)
    # 1. Pointers (BM, D) to x and (BN, D) to w; both advance by one block per iteration.
    xp = x + tl.minimum(lm, M - 1 - m0)[:, None] * (pitch * 128) + rk[None, :]
    NP = (N + 15) // 16 * 16
    # w has NP rows: those beyond N are padding, so a clamped row is always in memory.
    row = tl.minimum(rn, NP - 1)
    if BITS == 4:
        wp = w + ((row // 16).to(tl.int64) * (blocks * (16 * H)) + (row % 16) * H)[:, None] + (rk % H)[None, :]
    else:
        wp = w + row.to(tl.int64)[:, None] * (w_pitch * 32) + rk[None, :]
    # 2. The accumulator: int32 over all of K, or float32 over the scaled sums of blocks.
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32 if GROUPED else tl.int32)
    none = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.int32)
    correction = tl.zeros((BN,), tl.float32)
    in_n = rn < N
    in_m = rm < M
    # 3. x, and its scales and sums, may be the previous kernel's results: load nothing before this.
    begin(PDL)
    for i in tl.range(0, blocks, num_stages=STAGES):
        start = none if GROUPED else acc
        # 3a. Triton issues these loads STAGES - 1 iterations ahead.
        xa = tl.load(xp)
        raw = tl.load(wp) if BITS == 4 else tl.load(wp, mask=(i * P + rk < w_pitch * 32)[None, :], other=0)
        # 3b. One product per block if it is int8 or has 32 columns; else one per nibble plane: the high nibbles are
        #     columns P / 2 and up.
        if WHOLE:
            a = chosen_nibble(raw, (rk >= H)[None, :]) if BITS == 4 else raw
            d = _product(a, xa, start, SWAP)
        else:
            xb = tl.load(xp + H)
            a, b = nibbles(raw, ASM)
            d = _product(b, xb, _product(a, xa, start, SWAP), SWAP)
        if GROUPED:
            # 3c. Scale the exact sum of the block; ``correction`` accumulates the correction for the zero point of x.
            at = (i // PER) * pitch_of(N) + rn
            s = tl.load(scale + at, mask=in_n, other=0.0).to(tl.float32)
            if XZERO:  # noqa: SIM102 - the inner condition is evaluated at run time
                if i % PER == 0:
                    correction += tl.load(sums + at, mask=in_n, other=0).to(tl.float32) * s
            if BITS == 4:
                s *= 0.0625
            if WZERO:
                z = tl.load(zero + at, mask=in_n, other=0)
                xs = _rows(tl.load(x_sums + i * M + rm, mask=in_m, other=0), SWAP)
            if WZERO == INT_ZERO:
                d -= _columns(z.to(tl.int32) * 16 if BITS == 4 else z.to(tl.int32), SWAP) * xs
            acc += d.to(tl.float32) * _columns(s, SWAP)
            if WZERO == FLOAT_ZERO:
                acc += _columns(z.to(tl.float32), SWAP) * xs.to(tl.float32)
                if XZERO:
                    correction += z.to(tl.float32) * tl.minimum(K - i * P, P).to(tl.float32)
        else:
            acc = d
        xp += P
        wp += 16 * H if BITS == 4 else P
    # 4. Parameters applied to the whole sum: zero points first, in int32 and exact, then the scales.
    if XZERO:
        xz = _rows(tl.load(x_zero + rm, mask=in_m, other=0.0), SWAP)
    if GROUPED:
        v = acc
        if XZERO:
            v -= xz * _columns(correction, SWAP)
    else:
        total = acc >> 4 if BITS == 4 else acc
        if WZERO:
            xs = _rows(tl.load(x_sums + rm, mask=in_m, other=0), SWAP)
            wz = _columns(tl.load(zero + rn, mask=in_n, other=0), SWAP)
        if WZERO == INT_ZERO:
            total -= wz.to(tl.int32) * xs
        if XZERO:
            total -= xz.to(tl.int32) * _columns(tl.load(sums + rn, mask=in_n, other=0), SWAP)
        v = total.to(tl.float32) * _columns(tl.load(scale + rn, mask=in_n, other=0.0).to(tl.float32), SWAP)
        if WZERO == FLOAT_ZERO:
            if XZERO:
                xs -= xz.to(tl.int32) * K
            v += wz.to(tl.float32) * xs.to(tl.float32)
    v *= _rows(tl.load(x_scale + rm, mask=in_m, other=0.0), SWAP)
    finish(
        v,
        _rows(lm, SWAP),
        _rows(rm, SWAP),
        _columns(rn, SWAP),
        M,
        N,
        bias,
        out_scale,
        out_zero,
        out_scale_number,
        out_zero_number,
        y + m0.to(tl.int64) * N,
        HAS_BIAS,
        OUT,
    )


@triton.jit(do_not_specialize=["blocks", "pitch"])
def unpack(w, zero, o, N, blocks, pitch, P: tl.constexpr, PER: tl.constexpr, SUBTRACT: tl.constexpr, PDL: tl.constexpr):
    """planar16 to int8 rows of ``128 * pitch``: codes, minus the integer zero point if SUBTRACT.

    One program per 16 rows and block; columns beyond the last block are not written because x is 0 there.
    """
    H: tl.constexpr = P // 2
    plane, block = tl.program_id(0), tl.program_id(1)
    r = tl.arange(0, 16)
    rk = tl.arange(0, H)
    rn = plane * 16 + r
    begin(PDL)
    raw = tl.load(w + (plane.to(tl.int64) * blocks + block) * (16 * H) + r[:, None] * H + rk[None, :])
    low, high = (raw & 15).to(tl.int8), (raw >> 4).to(tl.int8)
    offset = tl.full((16,), 8, tl.int8)
    if SUBTRACT:
        offset += tl.load(zero + (block // PER) * pitch_of(N) + rn, mask=rn < N, other=0)
    at = o + rn.to(tl.int64)[:, None] * (pitch * 128) + block * P + rk[None, :]
    tl.store(at, low - offset[:, None])
    tl.store(at + H, high - offset[:, None])
