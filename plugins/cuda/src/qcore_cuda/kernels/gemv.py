"""``gemv``: weight-only product for few rows, bound by reading the weight once. NVIDIA, 16-bit activations.

Each warp takes blocks of K in turn and copies the operands, several stages ahead, into shared memory of its own
(`smem_pipeline`); from there weights go straight into fragments of the tensor core (`warp`), W being its A operand and
the tokens its columns. The warps of a program share its rows and add up their sums at the end.

Grid: one program per 16 * R rows of W, and per chunk of tokens if there are several; each of its NW warps takes every
NW-th run of U blocks of P columns. Inputs: x ``(M, K)`` 16-bit floats, w planar16 or rows16, scales and zero points
``(G, pitch_of(N))``; y ``(M, N)``. Floor: the bytes of the packed weight, ``N * K * BITS / 8`` and its scales, at the
bandwidth of the memory.

A nibble becomes a 16-bit float by setting its upper byte (bfloat16 128 + u, float16 1024 + u: exact), from which the
offset is subtracted at once. Subtracting it from the sum instead would save half an instruction per weight, but a value
of x far above the others, times 136, would take the digits of all others with it, even if its weight is 0. An integer
zero point is part of the offset.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qcore_triton.kernels.elements import factor_of, scale_value

from . import smem_pipeline as pipeline
from .blocks import copy_stage, group_of, over_warps, pair, places, turn, weights
from .warp import codes8, mma, spread, table4, table8, taken_of

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit
def _copy_x(to, x, lane, first, live, M, K, stride, XR: tl.constexpr, U: tl.constexpr, P: tl.constexpr):
    """Begin to copy XR rows of x, U blocks of each, 16 bytes at a time; eight rows meet no bank of memory twice.

    Behind K columns there are zeros.
    """
    C: tl.constexpr = U * P // 8  # chunks of a row
    MASK: tl.constexpr = min(8, C) - 1
    for q in tl.static_range((XR * C + 31) // 32):
        c = q * 32 + lane
        token = c // C
        k = c % C
        left = tl.where(token < M, tl.minimum(K - (first * P + k * 8), 8), 0)
        inside = left > 0
        at = x + (token * tl.cast(stride, tl.int64) + (first * P + k * 8))
        size = tl.maximum(left, 0) * 2
        at = tl.where(inside, at.to(tl.int64, bitcast=True), x.to(tl.int64, bitcast=True))
        wanted = ((c < XR * C) & live).to(tl.int32)
        pipeline.copy(to + (token * C + (k ^ (token & MASK))) * 16, at, size, wanted, 16)


@triton.jit
def _x_places(lane, BITS: tl.constexpr, XR: tl.constexpr, U: tl.constexpr, P: tl.constexpr):
    """Offsets at which a lane reads x in a stage, for even and odd steps, see `_x_words`."""
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
            w = pipeline.fragments(
                at + spots[(u * (P // 32) + c) % 2] + (8 * n * C + (u * (P // 32) + c) // 2 * 8) * 16
            )
        else:
            w = pipeline.words(at + spots[c if P == 64 else u % 2] + (8 * n * C + u * (P // 8) // 8 * 8) * 16, 4)
        out = out + (w[0], w[1], w[2], w[3])
    return out


@triton.jit
def _tile4(words0, words8, taken0, taken8, x, d, NB: tl.constexpr, V: tl.constexpr, BF16: tl.constexpr):
    """Products of one block of int4: rows r (words0) and r + 8 (words8), added to d, four numbers per column block.

    taken0, taken8: `taken_of` their zero points.
    """
    for h in tl.static_range(2):
        for j in tl.static_range(V):
            p0, p2 = spread((words0[j] >> (4 * h)) & 0x0F0F0F0F, taken0, BF16)
            p1, p3 = spread((words8[j] >> (4 * h)) & 0x0F0F0F0F, taken8, BF16)
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
def _planes(words, ELEMENT: tl.constexpr, V: tl.constexpr, BF16: tl.constexpr):
    """Words of nibbles as numbers: for each, low nibbles and high nibbles."""
    out = ()
    for j in tl.static_range(V):
        out = out + (table4(words[j], ELEMENT, BF16),)
    return out


@triton.jit
def _tile_plane(plain0, plain8, x, d, h: tl.constexpr, NB: tl.constexpr, V: tl.constexpr, BF16: tl.constexpr):
    """`_tile4` for the low (h = 0) or high nibbles of `_planes` of rows r and r + 8."""
    for j in tl.static_range(V):
        out = ()
        for n in tl.static_range(NB):
            a = x[n]
            c = d[n]
            x0 = a[2 * (h * V + j)]
            x1 = a[2 * (h * V + j) + 1]
            p0 = plain0[j][2 * h]
            p1 = plain8[j][2 * h]
            p2 = plain0[j][2 * h + 1]
            p3 = plain8[j][2 * h + 1]
            out = out + (mma(p0, p1, p2, p3, x0, x1, c[0], c[1], c[2], c[3], BF16),)
        d = out
    return d


@triton.jit
def _tile8(words0, words8, x, d, NB: tl.constexpr, V: tl.constexpr, BF16: tl.constexpr, ELEMENT: tl.constexpr):
    """`_tile4` for int8, or 8 bits of another element."""
    for j in tl.static_range(V):
        if ELEMENT == "int":
            p0, p2 = codes8(words0[j], BF16)
            p1, p3 = codes8(words8[j], BF16)
        else:
            p0, p2 = table8(words0[j], ELEMENT, BF16)
            p1, p3 = table8(words8[j], ELEMENT, BF16)
        out = ()
        for n in tl.static_range(NB):
            a = x[n]
            c = d[n]
            out = out + (mma(p0, p1, p2, p3, a[2 * j], a[2 * j + 1], c[0], c[1], c[2], c[3], BF16),)
        d = out
    return d


@triton.jit
def _sums(x, zero, c, NB: tl.constexpr, P: tl.constexpr, BF16: tl.constexpr):
    """Add x's sums over one block, in the layout of the result: of columns 2t and 2t + 1.

    Summed in the order of the products, so that a row of codes that equal their zero point comes out as exactly 0.
    """
    of = tl.full(zero.shape, 0x3F803F80 if BF16 else 0x3C003C00, tl.int32)  # 1 twice
    for j in tl.static_range(P // 16):
        out = ()
        for n in tl.static_range(NB):
            e0, e1, _, _ = mma(of, of, of, of, x[n][2 * j], x[n][2 * j + 1], c[n][0], c[n][1], zero, zero, BF16)
            out = out + ((e0, e1),)
        c = out
    return c


@triton.jit
def _loaded(pointer, row, group, line, i: tl.constexpr):
    """Zero points, in float32, int8 as int32, of rows r and r + 8 of row block i; ``line``: parameters of a group."""
    DTYPE: tl.constexpr = tl.int32 if pointer.dtype.element_ty == tl.int8 else tl.float32
    at0 = group * line + tl.minimum(row + 16 * i, line - 1)
    at8 = group * line + tl.minimum(row + 16 * i + 8, line - 1)
    return tl.load(pointer + at0).to(DTYPE), tl.load(pointer + at8).to(DTYPE)


@triton.jit
def _scales(pointer, row, group, line, i: tl.constexpr):
    """Scales in float32 of rows r and r + 8 of row block i; ``line``: parameters of a group."""
    at0 = group * line + tl.minimum(row + 16 * i, line - 1)
    at8 = group * line + tl.minimum(row + 16 * i + 8, line - 1)
    S: tl.constexpr = pointer.dtype.element_ty
    return scale_value(tl.load(pointer + at0), S), scale_value(tl.load(pointer + at8), S)


@triton.jit
def _scaled(acc, d, s, scales, points, NB: tl.constexpr, ZERO: tl.constexpr):
    """One row block's accumulators, four per column block, and a group's products with scales and zero points applied.

    scales, points: of rows r and r + 8; s: sums of x, if ZERO.
    """
    s0, s8 = scales
    z0 = points[0].to(tl.float32)
    z8 = points[1].to(tl.float32)
    out = ()
    for n in tl.static_range(NB):
        a = acc[n]
        d0, d1, d2, d3 = d[n]
        x0, x1 = s[n]
        if ZERO == 1:
            d0 -= z0 * x0
            d1 -= z0 * x1
            d2 -= z8 * x0
            d3 -= z8 * x1
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


@triton.jit
def _scales_of_x(pointer, group, M, lane, NB: tl.constexpr):
    """Scales ``(G, M)`` of the two tokens that a lane has in each column block."""
    out = ()
    for n in tl.static_range(NB):
        token = 8 * n + 2 * (lane % 4)
        line = pointer + group * M
        out = out + ((tl.load(line + tl.minimum(token, M - 1)), tl.load(line + tl.minimum(token + 1, M - 1))),)
    return out


@triton.jit
def _by_x(d, scales, NB: tl.constexpr):
    """Products of a block, or sums of x, times the scales of their tokens."""
    out = ()
    for n in tl.static_range(NB):
        s = scales[n]
        a = d[n]
        if len(a) == 4:
            out = out + ((a[0] * s[0], a[1] * s[1], a[2] * s[0], a[3] * s[1]),)
        else:
            out = out + ((a[0] * s[0], a[1] * s[1]),)
    return out


@triton.jit
def _values(raw, SCALE: tl.constexpr):
    """Two scales as `pair` reads them in float32."""
    if SCALE.primitive_bitwidth == 8:
        raw = (scale_value(raw[0], SCALE), scale_value(raw[1], SCALE))
    return raw


@triton.jit
def _of_block(acc, i: tl.constexpr, NB: tl.constexpr):
    """The accumulators of row block i."""
    out = ()
    for n in tl.static_range(NB):
        out = out + (acc[i * NB + n],)
    return out


@triton.jit
def some_rows(x, w, scale, zero, factor, bias, row_scale, y, rows, M, N, K, NP, KB, PER, stride, pitch,
              ELEMENT: tl.constexpr, FACTOR: tl.constexpr, HALVES: tl.constexpr,
              BITS: tl.constexpr, P: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr, ROW_SCALES: tl.constexpr,
              ONE_GROUP: tl.constexpr, NB: tl.constexpr, XR: tl.constexpr, R: tl.constexpr, U: tl.constexpr,
              NW: tl.constexpr, STAGES: tl.constexpr, BF16: tl.constexpr, ALIGNED: tl.constexpr, RING: tl.constexpr,
              DYNAMIC: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr, XPER: tl.constexpr = 0):  # fmt: skip
    """R * 16 rows of W from ``rows`` on, for `gemv`; row_scale: float32 (M,), multiplied with sums if ROW_SCALES.

    XPER: instead, if not 0, row_scale is ``(G, M)``, and so many blocks share a row of it.
    """
    T: tl.constexpr = 32 * NW
    BYTES: tl.constexpr = P // 8 if BITS == 4 else P // 4  # of a lane, row and block
    NEXT: tl.constexpr = 8 * P if BITS == 4 else P  # bytes from a block to the next
    V: tl.constexpr = BYTES // 4
    PAIRS: tl.constexpr = BITS == 8 and P == 64 and U % 2 == 0
    RINGED: tl.constexpr = ALIGNED and not ONE_GROUP
    G: tl.constexpr = 2 if HALVES else 1  # groups, or shares of groups, in a block
    FILL: tl.constexpr = ELEMENT == "e5m2"  # whose codes may be NaN, unlike those of all others as they are decoded
    FOLDED: tl.constexpr = BITS == 4 and ZERO == 1  # subtracted when nibbles become floats, else from sums
    AFTER: tl.constexpr = 0 if FOLDED else ZERO
    SCALE: tl.constexpr = scale.dtype.element_ty
    POINT: tl.constexpr = zero.dtype.element_ty
    # A stage of a warp: U blocks of R * 16 rows of W, then x, then scales and zero points if groups have their own.
    W_BYTES: tl.constexpr = U * R * 64 * BYTES
    X_BYTES: tl.constexpr = XR * U * P * 2
    S_BYTES: tl.constexpr = U * G * R * 2 * SCALE.primitive_bitwidth if RINGED else 0
    Z_BYTES: tl.constexpr = U * R * 2 * POINT.primitive_bitwidth if RINGED and ZERO else 0
    STAGE: tl.constexpr = W_BYTES + X_BYTES + S_BYTES + Z_BYTES
    thread = tl.arange(0, T)
    warp = thread // 32
    lane = thread % 32
    BLANK: tl.constexpr = U * P * 2 if XR == 1 else 0
    tl.static_assert(RING == NW * (STAGES * STAGE + BLANK))
    # 1. Every warp has a ring of its own: warps wait for each other only in the final sum.
    mine = pipeline.allocate(thread, NW, RING, DYNAMIC) + warp * (STAGES * STAGE + BLANK)
    token, spots = _x_places(lane, BITS, XR, U, P)
    if XR == 1:  # a row of zeros for the seven tokens that do not exist
        blank = mine + STAGES * STAGE
        for q in tl.static_range((BLANK + 511) // 512):
            pipeline.clear(blank + (q * 512 + lane * 16) % BLANK)
    # 2. Addresses. Lane 4 r + t works on rows r and r + 8 of each row block; ``at`` is the lane's address in block 0.
    each = 1.0 / PER
    row = rows + lane // 4
    at, tiles, step = places(w, lane, rows, NP, KB, pitch, BITS, P, R, PAIRS)
    first = warp * U
    at += first.to(tl.int64) * NEXT

    # 3. Prologue: STAGES - 1 stages are requested. Weights and scales do not depend on the previous kernel, so their
    #    copies begin before `gdc_wait`; x may be that kernel's result. The first commit closes a group with all weights
    #    so far and the first stage of x.
    for s in tl.static_range(STAGES - 1):
        to = mine + s * STAGE
        ahead = first + s * (U * NW)
        copy_stage(
            to, at + s * (U * NW * NEXT), lane, ahead, s * (U * NW) < KB, tiles, step, scale, zero, rows, NP, KB,
            each, R, U, BYTES, NEXT, PAIRS, W_BYTES + X_BYTES, RINGED, ZERO, G, FILL,
        )  # fmt: skip
    if PDL:
        gdc_wait()
    for s in tl.static_range(STAGES - 1):
        ahead = first + s * (U * NW)
        _copy_x(mine + s * STAGE + W_BYTES, x, lane, ahead, s * (U * NW) < KB, M, K, stride, XR, U, P)
        pipeline.commit(thread)

    # 4. Accumulators, while the copies are in flight: four floats per lane for each of R row blocks and NB blocks of 8
    #    tokens (fragment C).
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
    whole = tl.zeros([T], tl.int32)
    of_all = ()
    if ONE_GROUP and ZERO:
        for i in tl.static_range(R):
            of_all = of_all + (_loaded(zero, row, 0, NP, i),)
    # The next kernel may be scheduled: early, or (LATE) when this one has read everything.
    if PDL and not LATE:
        gdc_launch_dependents()
    slot = 0
    at += (STAGES - 1) * (U * NW * NEXT)
    for start in tl.range(0, KB, U * NW, num_stages=1):
        # 5. STAGES - 1 groups are in flight: wait for the oldest. Stage ``free`` was read in the previous turn, which
        #    every lane of the warp has left: refill it before computing. Behind the end nothing is copied, but an empty
        #    group is committed, so that the count of groups stays right.
        pipeline.wait(thread, STAGES - 2)
        here = mine + slot
        slot, free = turn(slot, STAGE, STAGES)
        first = start + warp * U
        to = mine + free
        ahead = first + (STAGES - 1) * (U * NW)
        live = start + (STAGES - 1) * (U * NW) < KB
        copy_stage(
            to, at, lane, ahead, live, tiles, step, scale, zero, rows, NP, KB, each,
            R, U, BYTES, NEXT, PAIRS, W_BYTES + X_BYTES, RINGED, ZERO, G, FILL,
        )  # fmt: skip
        _copy_x(to + W_BYTES, x, lane, ahead, live, M, K, stride, XR, U, P)
        pipeline.commit(thread)
        at += U * NW * NEXT

        # 6. Compute on the stage that has arrived, with STAGES - 1 in flight again. With one token, the lanes of the
        #    seven other columns of the product read zeros.
        x_at = here + W_BYTES
        if XR == 1:
            x_at = tl.where(token == 0, x_at, blank)
        for u in tl.static_range(U):
            # 6a. B operands of the block, for all row blocks; sums of x, from a product with ones, for zero points that
            #     are applied to sums.
            words = ()
            for n in tl.static_range(NB):
                words = words + (_x_words(x_at, spots, n, u, BITS, U, P),)
            sums = none
            if AFTER:
                sums = _sums(words, zeros, total if ONE_GROUP else none, NB, P, BF16)
            of_x = none
            if XPER:
                of_x = _scales_of_x(row_scale, tl.minimum(first + u, KB - 1) // XPER, M, lane, NB)
                sums = _by_x(sums, of_x, NB)
            group = group_of(first + u, KB, each)
            now = ()
            for i in tl.static_range(R):
                # 6b. A operands: codes of rows r and r + 8, unpacked in registers. With one group the tensor core adds
                #     to the running sum; else a block is summed by itself, then scaled and added.
                w0, w8 = weights(here, lane, u, i, R, BYTES, PAIRS)
                before = _of_block(acc, i, NB)
                points = (whole, whole)
                if ZERO:
                    if ONE_GROUP:
                        points = of_all[i]
                    elif RINGED:
                        points = pair(here + (W_BYTES + X_BYTES + S_BYTES), lane, u, i, R, POINT)
                    else:
                        points = _loaded(zero, row, group, NP, i)
                if HALVES:
                    # 6c. The low nibbles are one group, the high ones the next.
                    plain0 = _planes(w0, ELEMENT, V, BF16)
                    plain8 = _planes(w8, ELEMENT, V, BF16)
                    d = before
                    for h in tl.static_range(2):
                        part = _tile_plane(plain0, plain8, words, empty, h, NB, V, BF16)
                        if RINGED:
                            raw = pair(here + (W_BYTES + X_BYTES), lane, 2 * u + h, i, R, SCALE)
                            d = _scaled(d, part, sums, _values(raw, SCALE), points, NB, 0)
                        else:
                            at_group = group_of(2 * (first + u) + h, 2 * KB, each)
                            d = _scaled(d, part, sums, _scales(scale, row, at_group, NP, i), points, NB, 0)
                elif BITS == 4 and ELEMENT != "int":
                    plain0 = _planes(w0, ELEMENT, V, BF16)
                    plain8 = _planes(w8, ELEMENT, V, BF16)
                    d = before if ONE_GROUP else empty
                    for h in tl.static_range(2):
                        d = _tile_plane(plain0, plain8, words, d, h, NB, V, BF16)
                elif BITS == 4:
                    taken0 = taken_of(points[0] if FOLDED else whole, BF16)
                    taken8 = taken_of(points[1] if FOLDED else whole, BF16)
                    d = _tile4(w0, w8, taken0, taken8, words, before if ONE_GROUP else empty, NB, V, BF16)
                else:
                    d = _tile8(w0, w8, words, before if ONE_GROUP else empty, NB, V, BF16, ELEMENT)
                if XPER:
                    d = _by_x(d, of_x, NB)
                if RINGED and not HALVES:
                    scales = _values(pair(here + (W_BYTES + X_BYTES), lane, u, i, R, SCALE), SCALE)
                    d = _scaled(before, d, sums, scales, points, NB, AFTER)
                elif not ONE_GROUP and not HALVES:
                    d = _scaled(before, d, sums, _scales(scale, row, group, NP, i), points, NB, AFTER)
                now = now + d
            acc = now
            if ONE_GROUP:
                total = sums

    # 7. One group: scales and zero points come after the whole sum, once.
    if ONE_GROUP:
        now = ()
        for i in tl.static_range(R):
            scales = _scales(scale, row, 0, NP, i)
            points = of_all[i] if ZERO else (whole, whole)
            now = now + _scaled(empty, _of_block(acc, i, NB), total, scales, points, NB, AFTER)
        acc = now

    if PDL and LATE:
        gdc_launch_dependents()
    by = factor_of(factor, FACTOR)
    for i in tl.static_range(R):
        for n in tl.static_range(NB):
            a = acc[i * NB + n]
            # 8. Sum the warps' fragments through shared memory; e counts 4 values per lane: (row half, token of a
            #    pair).
            part = over_warps(a, NW)
            e = tl.arange(0, 128)
            out_row = rows + 16 * i + e // 16 + 8 * ((e // 2) % 2)
            token = 8 * n + 2 * ((e // 4) % 4) + e % 2
            valid = (out_row < N) & (token < M)
            if ROW_SCALES:
                part *= tl.load(row_scale + token, mask=valid, other=0.0)
            if FACTOR:
                part *= by
            if BIAS:
                part += tl.load(bias + out_row, mask=valid, other=0.0).to(tl.float32)
            tl.store(y + token * tl.cast(N, tl.int64) + out_row, part.to(y.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["M", "N", "K", "NP", "KB", "PER", "stride", "pitch"])
def gemv(x, w, scale, zero, factor, bias, tokens, y, M, N, K, NP, KB, PER, stride, pitch,
         ELEMENT: tl.constexpr, FACTOR: tl.constexpr, HALVES: tl.constexpr, BITS: tl.constexpr, P: tl.constexpr,
         ZERO: tl.constexpr, BIAS: tl.constexpr, TOKENS: tl.constexpr, XPER: tl.constexpr, ONE_GROUP: tl.constexpr,
         NB: tl.constexpr, XR: tl.constexpr, R: tl.constexpr, U: tl.constexpr, NW: tl.constexpr, STAGES: tl.constexpr,
         BF16: tl.constexpr, ALIGNED: tl.constexpr, RING: tl.constexpr,
         DYNAMIC: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr, CHUNKS: tl.constexpr = False):  # fmt: skip
    """``y[m, n] = sum_k x[m, k] * W[n, k] + bias[n]`` for M <= XR <= 8 * NB.

    x: 16-bit floats, rows ``stride`` values apart, on 16 bytes; w: planar16 or rows16 (rows
    of ``32 * pitch`` bytes); KB: blocks of P codes along K; PER: blocks per scale group; HALVES: a block has two groups
    instead, of 16 columns each, PER is 1, and there are no zero points; ELEMENT, FACTOR: see `Weight`; ZERO: 0 none,
    1 integer, 2 float zero points; TOKENS: sums are multiplied by tokens, float32 (M,); XPER: so many blocks of a token
    have a scale, tokens are (G, M); XR: 1, or 8 * NB; ALIGNED: scales and zero points begin on 16 bytes. A program
    takes R * 16 rows of W; each of its NW warps takes U blocks of K at a time. CHUNKS: the grid's second dimension
    counts chunks of XR tokens, of which there are any number; XPER is 0.
    """
    if CHUNKS:
        chunk = tl.program_id(1) * XR
        x += chunk * tl.cast(stride, tl.int64)
        y += chunk * tl.cast(N, tl.int64)
        tokens += chunk if TOKENS else 0
        M -= chunk
    some_rows(x, w, scale, zero, factor, bias, tokens, y, tl.program_id(0) * (16 * R), M, N, K, NP, KB, PER, stride,
              pitch, ELEMENT, FACTOR, HALVES, BITS, P, ZERO, BIAS, TOKENS, ONE_GROUP, NB, XR, R, U, NW, STAGES, BF16,
              ALIGNED, RING, DYNAMIC, LATE, PDL, XPER)  # fmt: skip
