"""``gemm``: weight-only product in tiles, for any M. W is the first operand (rows of the tensor core's instruction), so
that it can be dequantized in registers; the tokens are its columns."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .nibbles import unpack_nibbles

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit
def _fragments(q, BN: tl.constexpr, H: tl.constexpr, NW: tl.constexpr):
    """Give (rows, stored bytes) the order of logical (rows, k), moving nothing between threads: see `packing`."""
    V: tl.constexpr = H // 16
    q = tl.reshape(q, [BN // (16 * NW), 2, NW, 8, 4, V, 2, 2])
    q = tl.trans(q, 0, 2, 1, 3, 5, 6, 4, 7)
    return tl.reshape(q, [BN, H])


@triton.jit(do_not_specialize=["M", "N", "NP", "KB", "PER", "stride", "split"])
def gemm(x, w, scale, zero, bias, y, M, N, NP, KB, PER, stride, split,
         BITS: tl.constexpr, P: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr,
         BN: tl.constexpr, BM: tl.constexpr, NW: tl.constexpr, STAGES: tl.constexpr, FRAG: tl.constexpr,
         ASM: tl.constexpr, PRE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """``y[m, n] = sum_k x[m, k] * W[n, k] + bias[n]``; x: rows ``stride`` apart, zero from K to ``KB * P``.

    ``split`` > 1: program (.., .., s) writes its part of the sum over K to ``y[s]`` in float32, without bias.
    """
    H: tl.constexpr = P // 2
    DT: tl.constexpr = x.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
    tile_n = tl.program_id(0)
    tile_m = tl.program_id(1)
    s = tl.program_id(2)
    i = tl.arange(0, BN)
    if FRAG:
        # Row i of the loaded tile is the row that `_fragments` expects there.
        group: tl.constexpr = 16 * NW
        row = (i // group) * group + 16 * (i // 8 % NW) + 8 * (i % group // (8 * NW)) + i % 8
    else:
        row = i
    row = tile_n * BN + row
    rm = tile_m * BM + tl.arange(0, BM)
    k = tl.arange(0, H)
    per_split = tl.cdiv(KB, split)
    first = s * per_split
    last = tl.minimum(first + per_split, KB)
    row = tl.minimum(row, NP - 1)
    if BITS == 4:
        wp = w + (row // 16).to(tl.int64)[:, None] * (KB * 16 * H) + ((row % 16) * H)[:, None] + k[None, :] + first.to(tl.int64) * (16 * H)
    else:
        wp = w + row.to(tl.int64)[:, None] * (KB * P) + k[None, :] + first * P
    xp = x + rm.to(tl.int64)[:, None] * stride + k[None, :] + first * P
    inside = (rm < M)[:, None]
    rn = tl.minimum(tile_n * BN + i, N - 1)
    acc = tl.zeros([BN, BM], tl.float32)
    if PDL:
        gdc_wait()
    for b in tl.range(first, last, num_stages=STAGES):
        xl = tl.load(xp, mask=inside, other=0.0)
        xh = tl.load(xp + H, mask=inside, other=0.0)
        at = (b // PER) * N + rn
        sc = tl.load(scale + at).to(tl.float32)
        if BITS == 4:
            low, high = unpack_nibbles(tl.load(wp), DT, ASM)
            wp += 16 * H
        else:
            low = tl.load(wp).to(DT)
            high = tl.load(wp + H).to(DT)
            wp += P
        if ZERO == 1:
            z = tl.load(zero + at).to(DT)[:, None]
        if FRAG:
            low = _fragments(low, BN, H, NW)
            high = _fragments(high, BN, H, NW)
        if ZERO == 1 and BITS == 4:
            low -= z
            high -= z
        if PRE:
            low = low * sc.to(DT)[:, None]
            high = high * sc.to(DT)[:, None]
            acc = tl.dot(low, tl.trans(xl), acc)
            acc = tl.dot(high, tl.trans(xh), acc)
        else:
            d = tl.dot(low, tl.trans(xl))
            d = tl.dot(high, tl.trans(xh), d)
            if ZERO == 1 and BITS == 8:
                d -= z.to(tl.float32) * (tl.sum(xl.to(tl.float32), 1) + tl.sum(xh.to(tl.float32), 1))[None, :]
            acc += d * sc[:, None]
        if ZERO == 2:
            f = tl.load(zero + at).to(tl.float32)
            acc += f[:, None] * (tl.sum(xl.to(tl.float32), 1) + tl.sum(xh.to(tl.float32), 1))[None, :]
        xp += P
    n = tile_n * BN + i
    valid = (n < N)[:, None] & (rm < M)[None, :]
    if BIAS:
        acc += tl.load(bias + rn).to(tl.float32)[:, None]
    out = y + s.to(tl.int64) * (M * N) + rm.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out, acc.to(y.dtype.element_ty), mask=valid)
