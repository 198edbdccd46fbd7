"""``slices``: weight-only product for few rows and int8 weights; each warp of a program sums a slice of K.

Grid: (N / BN, M / BM). Tiles: BN rows of the weight by BM tokens, NW blocks of BK columns per turn of the loop. Inputs:
x ``(M, K)`` floats, w rows16, scales and zero points ``(G, pitch_of(N))``; y ``(M, N)``. Floor: the bytes of the
weight at the bandwidth of the memory. Int8 codes are exact in every float dtype; sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qcore_triton.kernels.elements import factor_of

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit(do_not_specialize=["M", "N", "NP", "K", "pitch", "GROUP", "eighths"])
def slices(x, w, scale, zero, factor, bias, y, M, N, NP, K, pitch, GROUP, eighths,
           BK: tl.constexpr, ZERO: tl.constexpr, FACTOR: tl.constexpr, BIAS: tl.constexpr, ONE_GROUP: tl.constexpr,
           BN: tl.constexpr, BM: tl.constexpr, NW: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
           PDL: tl.constexpr):  # fmt: skip
    """``y[m, n] = sum_k x[m, k] * W[n, k] + bias[n]``: rows16 weights, rows ``32 * pitch`` bytes apart.

    x: rows ``8 * eighths`` values apart, zero from K on; BK divides the row and ``GROUP``, the group size. ZERO:
    0 none, 1 integer, 2 float. FACTOR: see `Weight.factor`. WIDE: see `gemm`.
    """
    DT: tl.constexpr = tl.float32 if WIDE else x.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
    # Pointers (NW, BN, BK) to w and (NW, BK, BM) to x: slice s starts at block s, all move on by NW blocks per turn.
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    s = tl.arange(0, NW)
    rows = tl.minimum(n, NP - 1).to(tl.int64) * (pitch * 32)
    wp = w + rows[None, :, None] + k[None, None, :] + (s * BK)[:, None, None]
    # Masked, not clamped: eight rows that all read the last one would queue up for the same bytes.
    real = (m < M)[None, None, :]
    xp = x + (m.to(tl.int64) * (eighths * 8))[None, None, :] + k[None, :, None] + (s * BK)[:, None, None]
    columns = tl.minimum(n, N - 1)
    acc = tl.zeros([NW, BN, BM], tl.float32)
    total = tl.zeros([NW, BM], tl.float32)
    blocks = tl.cdiv(K, BK)
    # x may be a result of the previous kernel: nothing is loaded before that one has ended.
    if PDL:
        gdc_wait()
    for start in tl.range(0, blocks, NW, num_stages=STAGES):
        inside = (start + s) < blocks
        q = tl.load(wp, mask=inside[:, None, None], other=0).to(DT)
        xv = tl.load(xp, mask=inside[:, None, None] & real, other=0.0).to(DT)
        # One group: sums run over all of K and are scaled at the end. Else each block's sum is scaled by its group.
        if ONE_GROUP:
            acc = tl.dot(q, xv, acc)
            if ZERO:
                total += tl.sum(xv.to(tl.float32), 1)
        else:
            d = tl.dot(q, xv)
            group = tl.minimum(start + s, blocks - 1) * BK // GROUP
            at = group[:, None] * NP + columns[None, :]
            sc = tl.load(scale + at).to(tl.float32)[:, :, None]
            if ZERO:
                z = tl.load(zero + at).to(tl.float32)[:, :, None]
                sums = tl.sum(xv.to(tl.float32), 1)[:, None, :]
            if ZERO == 0:
                acc += d * sc
            elif ZERO == 1:
                acc += (d - z * sums) * sc
            else:
                acc += d * sc + z * sums
        wp += NW * BK
        xp += NW * BK
    # Add up the slices, in a fixed order.
    out = tl.sum(acc, 0)
    if ONE_GROUP:
        sc = tl.load(scale + columns).to(tl.float32)[:, None]
        if ZERO:
            z = tl.load(zero + columns).to(tl.float32)[:, None]
            sums = tl.sum(total, 0)[None, :]
        if ZERO == 0:
            out = out * sc
        elif ZERO == 1:
            out = (out - z * sums) * sc
        else:
            out = out * sc + z * sums
    out *= factor_of(factor, FACTOR)
    if BIAS:
        out += tl.load(bias + columns).to(tl.float32)[:, None]
    valid = (n < N)[:, None] & (m < M)[None, :]
    tl.store(y + m.to(tl.int64)[None, :] * N + n[:, None], out.to(y.dtype.element_ty), mask=valid)
