"""``gemv``: weight-only product for few rows (M <= 16), bound by reading the weight once. NVIDIA, 16-bit activations.

Each warp takes blocks of K in turn and copies what it needs of them, several stages ahead, into a `ring` of its own;
from there weights go straight into fragments of the tensor core (`warp`), W being its A operand and the tokens its
columns. The warps of a program share its rows, and add up at the end.

A nibble becomes a 16-bit float by setting its upper byte (bfloat16 128 + u, float16 1024 + u: exact), and the offset
leaves the sum again as what a row of codes 0 would have given: one more product per row block of tokens, in just the
layout of the result, and half an instruction per weight less than subtracting from each one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import ring
from .blocks import copy_stage, group_of, over_warps, pair, places, turn, weights
from .warp import codes8, mma, spread

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit
def _copy_x(to, x, lane, first, live, M, KB, stride, XR: tl.constexpr, U: tl.constexpr, P: tl.constexpr):
    """Begin to copy XR rows of x, U blocks of each, 16 bytes at a time; eight rows meet no bank of memory twice."""
    C: tl.constexpr = U * P // 8  # chunks of a row
    MASK: tl.constexpr = min(8, C) - 1
    for q in tl.static_range((XR * C + 31) // 32):
        c = q * 32 + lane
        token = c // C
        k = c % C
        inside = (token < M) & (first * P + k * 8 < KB * P)
        at = x + (token * tl.cast(stride, tl.int64) + (first * P + k * 8))
        size = tl.where(inside, 16, 0)
        at = tl.where(inside, at.to(tl.int64, bitcast=True), x.to(tl.int64, bitcast=True))
        wanted = ((c < XR * C) & live).to(tl.int32)
        ring.copy(to + (token * C + (k ^ (token & MASK))) * 16, at, size, wanted, 16)


@triton.jit
def _x_places(lane, BITS: tl.constexpr, XR: tl.constexpr, U: tl.constexpr, P: tl.constexpr):
    """Where a lane reads x in a stage: offsets for even and odd steps, see `_x_words`."""
    C: tl.constexpr = U * P // 8
    MASK: tl.constexpr = min(8, C) - 1
    if BITS == 4:  # lane t holds k = 16 j + 8 h + 2 t + e: `fragments` of x, four chunks of 8 at a time
        token = lane % 8
        even = lane // 8
        odd = even + 4
    else:  # lane t holds P / 4 columns one after the other
        token = lane // 4
        even = lane % 4 * (P // 32)
        odd = even + (1 if P == 64 else 4)
    if XR == 1:
        spots = (even * 16, odd * 16)
    else:
        spots = ((token * C + (even ^ (token & MASK))) * 16, (token * C + (odd ^ (token & MASK))) * 16)
    return token, spots


@triton.jit
def _x_words(at, spots, n: tl.constexpr, u: tl.constexpr, BITS: tl.constexpr, U: tl.constexpr, P: tl.constexpr):
    """The words of x that meet a lane's weights of one block, two per product of 16 k, for column block n."""
    C: tl.constexpr = U * P // 8
    out = ()
    for c in tl.static_range(P // 32):
        if BITS == 4:
            w = ring.fragments(at + spots[(u * (P // 32) + c) % 2] + (8 * n * C + (u * (P // 32) + c) // 2 * 8) * 16)
        else:
            w = ring.words(at + spots[c if P == 64 else u % 2] + (8 * n * C + u * (P // 8) // 8 * 8) * 16, 4)
        out = out + (w[0], w[1], w[2], w[3])
    return out


@triton.jit
def _tile4(words0, words8, x, d, NB: tl.constexpr, V: tl.constexpr, BF16: tl.constexpr, CENTERED: tl.constexpr):
    """Products of one block of int4: rows r (words0) and r + 8 (words8), added to d, four numbers per column block."""
    for h in tl.static_range(2):
        for j in tl.static_range(V):
            p0, p2 = spread((words0[j] >> (4 * h)) & 0x0F0F0F0F, BF16, CENTERED)
            p1, p3 = spread((words8[j] >> (4 * h)) & 0x0F0F0F0F, BF16, CENTERED)
            out = ()
            for n in tl.static_range(NB):
                a = x[n]
                c = d[n]
                x0 = a[2 * (h * V + j)]
                x1 = a[2 * (h * V + j) + 1]
                out = out + (mma(p0, p1, p2, p3, x0, x1, c[0], c[1], c[2], c[3], BF16),)
            d = out
    return d


@triton.jit
def _tile8(words0, words8, x, d, NB: tl.constexpr, V: tl.constexpr, BF16: tl.constexpr):
    """`_tile4` for int8."""
    for j in tl.static_range(V):
        p0, p2 = codes8(words0[j], BF16)
        p1, p3 = codes8(words8[j], BF16)
        out = ()
        for n in tl.static_range(NB):
            a = x[n]
            c = d[n]
            out = out + (mma(p0, p1, p2, p3, a[2 * j], a[2 * j + 1], c[0], c[1], c[2], c[3], BF16),)
        d = out
    return d


@triton.jit
def _sums(x, zero, c, OF: tl.constexpr, NB: tl.constexpr, P: tl.constexpr, BF16: tl.constexpr):
    """Add OF (two equal floats) times x's sums over one block, in the layout of the result: of columns 2t and 2t + 1.

    Summed in the order of the products, so that a row of codes 0 comes out as exactly 0.
    """
    of = tl.full(zero.shape, OF, tl.int32)
    for j in tl.static_range(P // 16):
        out = ()
        for n in tl.static_range(NB):
            e0, e1, _, _ = mma(of, of, of, of, x[n][2 * j], x[n][2 * j + 1], c[n][0], c[n][1], zero, zero, BF16)
            out = out + ((e0, e1),)
        c = out
    return c


@triton.jit
def _parameters(scale, zero, row, group, N, R: tl.constexpr, ZERO: tl.constexpr):
    """Scales and zero points of rows r and r + 8 of each row block, from memory: (s0, s8, z0, z8)."""
    out = ()
    for i in tl.static_range(R):
        at0 = group * N + tl.minimum(row + 16 * i, N - 1)
        at8 = group * N + tl.minimum(row + 16 * i + 8, N - 1)
        s0 = tl.load(scale + at0).to(tl.float32)
        s8 = tl.load(scale + at8).to(tl.float32)
        if ZERO:
            z0 = tl.load(zero + at0).to(tl.float32)
            z8 = tl.load(zero + at8).to(tl.float32)
        else:
            z0 = s0
            z8 = s8
        out = out + ((s0, s8, z0, z8),)
    return out


@triton.jit
def _copied(at_scale, at_zero, lane, u: tl.constexpr, R: tl.constexpr, ZERO: tl.constexpr, SCALE: tl.constexpr,
            POINT: tl.constexpr):  # fmt: skip
    """`_parameters` from the ring."""
    out = ()
    for i in tl.static_range(R):
        s0, s8 = pair(at_scale, lane, u, i, R, SCALE)
        z0 = s0
        z8 = s8
        if ZERO:
            z0, z8 = pair(at_zero, lane, u, i, R, POINT)
            z0 = z0.to(tl.float32)
            z8 = z8.to(tl.float32)
        out = out + ((s0, s8, z0, z8),)
    return out


@triton.jit
def _scaled(acc, d, s, parameters, R: tl.constexpr, NB: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr):
    """Add one group's contribution, scales and zero points applied, to the accumulators: 4 per row and column block.

    s: sums of x, times OFFSET where the codes have that offset.
    """
    out = ()
    for i in tl.static_range(R):
        s0, s8, z0, z8 = parameters[i]
        if ZERO == 1 and OFFSET:
            f0 = 1.0 + z0 * (1.0 / OFFSET)
            f8 = 1.0 + z8 * (1.0 / OFFSET)
        for n in tl.static_range(NB):
            a = acc[i * NB + n]
            d0, d1, d2, d3 = d[i * NB + n]
            x0, x1 = s[n]
            if ZERO == 1 and OFFSET:  # both at once; a zero point of 0 gives what there is without
                d0 -= f0 * x0
                d1 -= f0 * x1
                d2 -= f8 * x0
                d3 -= f8 * x1
            elif ZERO == 1:
                d0 -= z0 * x0
                d1 -= z0 * x1
                d2 -= z8 * x0
                d3 -= z8 * x1
            elif OFFSET:
                d0 -= x0
                d1 -= x1
                d2 -= x0
                d3 -= x1
            if ZERO == 2 and OFFSET:
                x0 *= 1.0 / OFFSET
                x1 *= 1.0 / OFFSET
            a0 = a[0] + s0 * d0
            a1 = a[1] + s0 * d1
            a2 = a[2] + s8 * d2
            a3 = a[3] + s8 * d3
            if ZERO == 2:
                a0 += z0 * x0
                a1 += z0 * x1
                a2 += z8 * x0
                a3 += z8 * x1
            out = out + ((a0, a1, a2, a3),)
    return out


@triton.jit(do_not_specialize=["M", "N", "NP", "KB", "PER", "stride", "pitch"])
def gemv(x, w, scale, zero, bias, y, M, N, NP, KB, PER, stride, pitch,
         BITS: tl.constexpr, P: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr, ONE_GROUP: tl.constexpr,
         NB: tl.constexpr, XR: tl.constexpr, R: tl.constexpr, U: tl.constexpr, NW: tl.constexpr, STAGES: tl.constexpr,
         BF16: tl.constexpr, CENTERED: tl.constexpr, ALIGNED: tl.constexpr, RING: tl.constexpr,
         DYNAMIC: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """``y[m, n] = sum_k x[m, k] * W[n, k] + bias[n]`` for M <= XR <= 8 * NB.

    x: 16-bit floats, rows ``stride`` values apart, on 16 bytes, zero from K to ``KB * P``; w: planar16 or rows16 (rows
    of ``32 * pitch`` bytes); KB: blocks of P codes along K; PER: blocks per scale group; ZERO: 0 none, 1 integer,
    2 float zero points; XR: 1, or 8 * NB; CENTERED: sums never hold the offset of int4's codes, which would take four
    of float32's binary digits; ALIGNED: N is a multiple of 16. A program takes R * 16 rows of W; each of its NW warps
    takes U blocks of K at a time.
    """
    T: tl.constexpr = 32 * NW
    BYTES: tl.constexpr = P // 8 if BITS == 4 else P // 4  # of a lane, row and block
    NEXT: tl.constexpr = 8 * P if BITS == 4 else P  # bytes from a block to the next
    V: tl.constexpr = BYTES // 4
    PAIRS: tl.constexpr = BITS == 8 and P == 64 and U % 2 == 0
    RINGED: tl.constexpr = ALIGNED and not ONE_GROUP
    # What the codes of int4 are too large by, after `spread`; and a 16-bit float of it, twice, or of 1.
    SHIFTED: tl.constexpr = BITS == 4 and not CENTERED
    OFFSET: tl.constexpr = (136 if BF16 else 1032) if SHIFTED else 0
    OF: tl.constexpr = (0x43084308 if BF16 else 0x64086408) if SHIFTED else (0x3F803F80 if BF16 else 0x3C003C00)
    SCALE: tl.constexpr = scale.dtype.element_ty
    POINT: tl.constexpr = zero.dtype.element_ty
    W_BYTES: tl.constexpr = U * R * 64 * BYTES
    X_BYTES: tl.constexpr = XR * U * P * 2
    S_BYTES: tl.constexpr = U * R * 2 * SCALE.primitive_bitwidth if RINGED else 0
    Z_BYTES: tl.constexpr = U * R * 2 * POINT.primitive_bitwidth if RINGED and ZERO else 0
    STAGE: tl.constexpr = W_BYTES + X_BYTES + S_BYTES + Z_BYTES
    thread = tl.arange(0, T)
    warp = thread // 32
    lane = thread % 32
    BLANK: tl.constexpr = U * P * 2 if XR == 1 else 0
    tl.static_assert(RING == NW * (STAGES * STAGE + BLANK))
    mine = ring.allocate(thread, NW, RING, DYNAMIC) + warp * (STAGES * STAGE + BLANK)
    token, spots = _x_places(lane, BITS, XR, U, P)
    if XR == 1:  # a row of zeros for the tokens that there are not
        blank = mine + STAGES * STAGE
        for q in tl.static_range((BLANK + 511) // 512):
            ring.clear(blank + (q * 512 + lane * 16) % BLANK)
    each = 1.0 / PER
    rows = tl.program_id(0) * (16 * R)
    row = rows + lane // 4
    at, tiles, step = places(w, lane, rows, NP, KB, pitch, BITS, P, R, PAIRS)
    first = warp * U
    at += first.to(tl.int64) * NEXT

    for s in tl.static_range(STAGES - 1):
        to = mine + s * STAGE
        ahead = first + s * (U * NW)
        copy_stage(
            to, at + s * (U * NW * NEXT), lane, ahead, s * (U * NW) < KB, tiles, step, scale, zero, rows, N, KB, each,
            R, U, BYTES, NEXT, PAIRS, W_BYTES + X_BYTES, RINGED, ZERO,
        )  # fmt: skip
    if PDL:
        gdc_wait()
    for s in tl.static_range(STAGES - 1):
        ahead = first + s * (U * NW)
        _copy_x(mine + s * STAGE + W_BYTES, x, lane, ahead, s * (U * NW) < KB, M, KB, stride, XR, U, P)
        ring.commit(thread)

    zeros = tl.zeros([T], tl.float32)
    empty = ()
    none = ()
    for _ in tl.static_range(NB):
        empty = empty + ((zeros, zeros, zeros, zeros),)
        none = none + ((zeros, zeros),)
    acc = ()
    for _ in tl.static_range(R):
        acc = acc + empty
    total = none
    if PDL and not LATE:
        gdc_launch_dependents()
    slot = 0
    at += (STAGES - 1) * (U * NW * NEXT)
    for start in tl.range(0, KB, U * NW, num_stages=1):
        ring.wait(thread, STAGES - 2)
        here = mine + slot
        slot, free = turn(slot, STAGE, STAGES)
        first = start + warp * U
        to = mine + free
        ahead = first + (STAGES - 1) * (U * NW)
        live = start + (STAGES - 1) * (U * NW) < KB
        copy_stage(
            to, at, lane, ahead, live, tiles, step, scale, zero, rows, N, KB, each,
            R, U, BYTES, NEXT, PAIRS, W_BYTES + X_BYTES, RINGED, ZERO,
        )  # fmt: skip
        _copy_x(to + W_BYTES, x, lane, ahead, live, M, KB, stride, XR, U, P)
        ring.commit(thread)
        at += U * NW * NEXT

        x_at = here + W_BYTES
        if XR == 1:
            x_at = tl.where(token == 0, x_at, blank)
        for u in tl.static_range(U):
            words = ()
            for n in tl.static_range(NB):
                words = words + (_x_words(x_at, spots, n, u, BITS, U, P),)
            sums = none
            if ZERO or OFFSET:
                sums = _sums(words, zeros, total if ONE_GROUP else none, OF, NB, P, BF16)
            d = ()
            for i in tl.static_range(R):
                w0, w8 = weights(here, lane, u, i, R, BYTES, PAIRS)
                before = empty
                if ONE_GROUP:
                    before = ()
                    for n in tl.static_range(NB):
                        before = before + (acc[i * NB + n],)
                if BITS == 4:
                    d = d + _tile4(w0, w8, words, before, NB, V, BF16, CENTERED)
                else:
                    d = d + _tile8(w0, w8, words, before, NB, V, BF16)
            if ONE_GROUP:
                acc = d
                total = sums
            else:
                if RINGED:
                    at_scale = here + (W_BYTES + X_BYTES)
                    p = _copied(at_scale, at_scale + S_BYTES, lane, u, R, ZERO, SCALE, POINT)
                else:
                    p = _parameters(scale, zero, row, group_of(first + u, KB, each), N, R, ZERO)
                acc = _scaled(acc, d, sums, p, R, NB, ZERO, OFFSET)

    if ONE_GROUP:
        d = acc
        acc = ()
        for _ in tl.static_range(R):
            acc = acc + empty
        acc = _scaled(acc, d, total, _parameters(scale, zero, row, 0, N, R, ZERO), R, NB, ZERO, OFFSET)

    if PDL and LATE:
        gdc_launch_dependents()
    for i in tl.static_range(R):
        for n in tl.static_range(NB):
            a = acc[i * NB + n]
            part = over_warps(a, NW)
            e = tl.arange(0, 128)
            out_row = rows + 16 * i + e // 16 + 8 * ((e // 2) % 2)
            token = 8 * n + 2 * ((e // 4) % 4) + e % 2
            valid = (out_row < N) & (token < M)
            if BIAS:
                part += tl.load(bias + out_row, mask=valid, other=0.0).to(tl.float32)
            tl.store(y + token * tl.cast(N, tl.int64) + out_row, part.to(y.dtype.element_ty), mask=valid)
