"""``slices``: int8 activations times an int4 or int8 weight for few rows, bound by reading the weight once.

The weight is the A operand and the tokens are the columns of the tensor core's product. K is split inside the program:
S slices, one per warp, each with its own accumulator, added in a fixed order at the end: deterministic, one launch, no
workspace. Sums of x, which zero points of the weight multiply, are one more product, with ones: they have the layout of
the result.

Grid: (N / BN, M / BM). Tiles: BN rows of the weight by BM tokens, S blocks of P columns per turn of the loop. Inputs: x
codes in the weight's order of columns; w planar16 or rows16; y ``(M, N)``. Floor: the bytes of the packed weight at the
bandwidth of the memory. Exact: int32 sums as in `int8_gemv`, int4 codes multiplied by 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qcore_triton.kernels.elements import pitch_of
from qcore_triton.kernels.int8_common import FLOAT_ZERO, INT_ZERO, chosen_nibble, finish, nibbles
from qcore_triton.kernels.rounding import begin


@triton.jit
def _parameters(
    scale,
    zero,
    sums,
    block,
    blocks,
    rn,
    N,
    BITS: tl.constexpr,
    PER: tl.constexpr,
    WZERO: tl.constexpr,
    XZERO: tl.constexpr,
):
    """Scale, zero point and code sums of a block's group, each ``(S, BN)``: the scale of int4 carries the 1/16."""
    inside = (block < blocks)[:, None] & (rn < N)[None, :]
    at = (block // PER)[:, None] * pitch_of(N) + rn[None, :]
    s = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
    z = s
    t = s
    if WZERO:
        z = tl.load(zero + at, mask=inside, other=0).to(tl.float32)
    if XZERO:
        first = inside & (block % PER == 0)[:, None]
        t = tl.load(sums + at, mask=first, other=0).to(tl.float32) * s
    return s * 0.0625 if BITS == 4 else s, z, t


@triton.jit(do_not_specialize=["M", "N", "K", "blocks", "pitch", "w_pitch", "out_scale_number", "out_zero_number"])
def slices(
    x,
    x_scale,
    x_zero,
    w,
    scale,
    zero,
    sums,
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
    S: tl.constexpr,
    STAGES: tl.constexpr,
    GROUPED: tl.constexpr,
    PER: tl.constexpr,
    WZERO: tl.constexpr,
    XZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUT: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Y ``(M, N)`` for BM rows and BN columns.

    x: codes ``(M, 128 * pitch)``. w: planar16 with blocks of P (BITS 4), or rows16 with rows of ``32 * w_pitch``.
    ``blocks``: blocks of P along K; a group has PER of them (GROUPED), or one group is all of K.
    WZERO, OUT: see `int8_common`. XZERO: x has zero points, and ``sums`` ``(G, pitch_of(N))`` the weight's code sums.
    """
    H: tl.constexpr = P // 2
    WHOLE: tl.constexpr = BITS == 8 or P == 32  # one product per block; else one for each nibble
    D: tl.constexpr = P if WHOLE else H
    n0 = tl.program_id(0) * BN
    m0 = tl.program_id(1) * BM
    rn = n0 + tl.arange(0, BN)
    lm = tl.arange(0, BM)
    rm = m0 + lm
    rk = tl.arange(0, D)
    rs = tl.arange(0, S)
    # 1. Pointers (S, D, BM) to x and (S, BN, D) to w: slice s starts at block s, and all move on by S blocks per turn.
    x += m0.to(tl.int64) * (pitch * 128)
    xp = x + lm[None, None, :] * (pitch * 128) + rk[None, :, None] + rs[:, None, None] * P
    if BITS == 4:
        planes = (rn // 16).to(tl.int64) * (blocks * (16 * H)) + (rn % 16) * H
        wp = w + planes[None, :, None] + (rk % H)[None, None, :] + rs[:, None, None] * (16 * H)
        step = S * 16 * H
    else:
        row = tl.minimum(rn, (N + 15) // 16 * 16 - 1).to(tl.int64)
        wp = w + row[None, :, None] * (w_pitch * 32) + rk[None, None, :] + rs[:, None, None] * P
        step = S * P
    in_m = (rm < M)[None, None, :]
    in_n = (rn < (N + 15) // 16 * 16)[None, :, None]
    # 2. One accumulator per slice. ones: the operand that turns a product into sums of x.
    acc = tl.zeros((S, BN, BM), tl.float32 if GROUPED else tl.int32)
    xsum = tl.zeros((S, BN, BM), tl.int32)
    correction = tl.zeros((S, BN), tl.float32)
    ones = tl.full((S, BN, D), 1, tl.int8)
    # 3. x, and its scales, may be the previous kernel's results: nothing is loaded before.
    begin(PDL)
    # 4. Parameters of the first block; those of the others are loaded one turn ahead.
    if GROUPED:
        s, z, t = _parameters(scale, zero, sums, rs, blocks, rn, N, BITS, PER, WZERO, XZERO)
    for i in tl.range(0, (blocks + S - 1) // S, num_stages=STAGES):
        block = i * S + rs
        inside = (block < blocks)[:, None, None]
        # 4a. Triton issues these loads STAGES - 1 turns ahead.
        if BITS == 4:
            raw = tl.load(wp, mask=inside & in_n, other=0)  # x is 0 there, so any code will do
        else:
            raw = tl.load(wp, mask=inside & (block[:, None, None] * P + rk[None, None, :] < w_pitch * 32), other=0)
        xa = tl.load(xp, mask=inside & in_m, other=0)
        # 4b. One product per block if it is int8 or has a single k of the instruction (32); else one per nibble plane,
        #     the high nibbles being columns P / 2 and up.
        if WHOLE:
            a = chosen_nibble(raw, (rk >= H)[None, None, :]) if BITS == 4 else raw
            d = tl.dot(a, xa, out_dtype=tl.int32) if GROUPED else tl.dot(a, xa, acc, out_dtype=tl.int32)
            if WZERO:
                o = tl.dot(ones, xa, out_dtype=tl.int32) if GROUPED else tl.dot(ones, xa, xsum, out_dtype=tl.int32)
        else:
            xb = tl.load(xp + H, mask=inside & in_m, other=0)
            a, b = nibbles(raw, ASM)
            d = tl.dot(a, xa, out_dtype=tl.int32) if GROUPED else tl.dot(a, xa, acc, out_dtype=tl.int32)
            d = tl.dot(b, xb, d, out_dtype=tl.int32)
            if WZERO:
                o = tl.dot(ones, xa, out_dtype=tl.int32) if GROUPED else tl.dot(ones, xa, xsum, out_dtype=tl.int32)
                o = tl.dot(ones, xb, o, out_dtype=tl.int32)
        if GROUPED:
            # 4c. Parameters are too narrow for asynchronous copies: the next block's are fetched by hand.
            s2, z2, t2 = _parameters(scale, zero, sums, block + S, blocks, rn, N, BITS, PER, WZERO, XZERO)
            # 4d. Scale the exact sum of the block and add it up in float32; ``correction`` sums up the correction by
            #     the zero point of x.
            if WZERO == INT_ZERO:
                d -= z.to(tl.int32)[:, :, None] * (o * 16 if BITS == 4 else o)
            acc += d.to(tl.float32) * s[:, :, None]
            if WZERO == FLOAT_ZERO:
                acc += o.to(tl.float32) * z[:, :, None]
            if XZERO:
                correction += t
                if WZERO == FLOAT_ZERO:
                    count = tl.minimum(tl.maximum(K - block * P, 0), P)
                    correction += z * count.to(tl.float32)[:, None]
            s, z, t = s2, z2, t2
        else:
            acc = d
            if WZERO:
                xsum = o
        wp += step
        xp += S * P
    # 5. Add up the slices, in a fixed order, then apply the parameters that wait for the whole sum: zero points in
    #    int32 and exact, then the scales.
    total = tl.sum(acc, 0)
    in_row = rm < M
    if XZERO:
        xz = tl.load(x_zero + rm, mask=in_row, other=0.0)[None, :]
    if GROUPED:
        v = total
        if XZERO:
            v -= xz * tl.sum(correction, 0)[:, None]
    else:
        in_column = rn < N
        if BITS == 4:
            total = total >> 4
        if WZERO:
            xs = tl.sum(xsum, 0)
            wz = tl.load(zero + rn, mask=in_column, other=0)[:, None]
        if WZERO == INT_ZERO:
            total -= wz.to(tl.int32) * xs
        if XZERO:
            total -= xz.to(tl.int32) * tl.load(sums + rn, mask=in_column, other=0)[:, None]
        v = total.to(tl.float32) * tl.load(scale + rn, mask=in_column, other=0.0).to(tl.float32)[:, None]
        if WZERO == FLOAT_ZERO:
            if XZERO:
                xs -= xz.to(tl.int32) * K
            v += wz.to(tl.float32) * xs.to(tl.float32)
    v *= tl.load(x_scale + rm, mask=in_row, other=0.0)[None, :]
    finish(
        v,
        lm[None, :],
        rm[None, :],
        rn[:, None],
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
