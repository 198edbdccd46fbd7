"""``int8_gemv``: int8 activations times a weight for few rows (M <= 16), bound by reading the weight once. NVIDIA.

Like `gemv`, with the tensor core's product of int8. A single row is quantized by every program for itself while its
first weights are being copied: that is faster than a separate kernel, which would have to end first. Several rows come
as codes. Sums of x, which zero points of the weight multiply, are one more product, with ones.

Grid, tiles, layouts and floor as in `gemv`; x is codes ``(M, 128 * stride)`` in the weight's order of columns, or one
row of K 16-bit floats. Exact: a product of codes, that of int4 multiplied by 16, is at most 2**14 in size and is added
up in int32, over one block if GROUPED and else over all of K (`qcore_triton.host.blocking` limits it). The factor of 16
leaves by a shift, or in float32 as an exact power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qcore_triton.kernels.int8_common import FLOAT_ZERO, INT_ZERO, finish
from qcore_triton.kernels.order import position_of
from qcore_triton.kernels.quantize import SYMMETRIC, TENSOR, encode, extent, inverse_of, parameters

from . import smem_pipeline as pipeline
from .blocks import copy_stage, group_of, over_warps, pair, places, turn, weights
from .warp import both, load_quad, mma8, nibbles16

# mypy: disable-error-code="no-untyped-def,no-untyped-call,unreachable"

_AHEAD = tl.constexpr(4)
"""Waves of eight values per thread that are on their way at once: 16 words of registers."""


@triton.jit
def _copy_codes(to, x, lane, first, live, M, KB, pitch, XR: tl.constexpr, U: tl.constexpr, P: tl.constexpr):
    """Begin to copy XR rows of codes, U blocks of each: 16 bytes at a time, odd rows rotated by half their banks."""
    C: tl.constexpr = U * P // 16  # chunks of a row
    TURN: tl.constexpr = 4 if C >= 8 else 0
    for q in tl.static_range((XR * C + 31) // 32):
        c = q * 32 + lane
        token = c // C
        k = c % C
        inside = (token < M) & (first * P + k * 16 < KB * P)
        at = x.to(tl.int64, bitcast=True) + (token * (pitch.to(tl.int64) * 128) + (first * P + k * 16))
        at = tl.where(inside, at, x.to(tl.int64, bitcast=True))
        wanted = ((c < XR * C) & live).to(tl.int32)
        pipeline.copy(to + (token * C + (k ^ (token % 2 * TURN))) * 16, at, tl.where(inside, 16, 0), wanted, 16)


@triton.jit
def _quantize(to, x, thread, given_scale, given_zero, given_scale_number, given_zero_number, K, MODE: tl.constexpr,
              ORDER: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Codes of the one row of x into shared memory, in the order of the weight; its scale and zero point."""
    # 1. First pass: the extent of the row, eight values per thread and wave. Several waves are requested before the
    #    first is looked at: a long row would else wait for the second-level cache once a wave.
    WAVES: tl.constexpr = min(_AHEAD, max(1, WIDE // (T * 8)))
    o = tl.arange(0, T * 8)
    below = tl.zeros([T * 8], tl.int32)
    above = tl.zeros([T * 8], tl.int32)
    for start in tl.range(0, K, T * 8 * WAVES, num_stages=1):
        for wave in tl.static_range(WAVES):
            at = start + wave * (T * 8) + o
            b, a = extent(tl.load(x + at, mask=at < K, other=0.0).to(tl.float32), MODE)
            below = tl.maximum(below, b)
            above = tl.maximum(above, a)
    # 2. The reduction over all threads: one scale and zero point for the row.
    if MODE == TENSOR:
        s, z = parameters(tl.max(below, 0), tl.max(above, 0), 0, given_scale_number, given_zero_number, MODE)
    else:
        s, z = parameters(tl.max(below, 0), tl.max(above, 0), 0, given_scale, given_zero, MODE)
    NARROW: tl.constexpr = MODE == SYMMETRIC and x.dtype.element_ty == tl.bfloat16
    inverse = inverse_of(s, tl.max(above, 0), NARROW)
    # 3. Second pass: encode eight values per thread and place pairs of codes; 0 behind K, up to a multiple of 128.
    #    Again several waves are requested first.
    for start in tl.range(0, (K + 127) // 128 * 128, T * 8 * WAVES, num_stages=1):
        quads = ()
        for wave in tl.static_range(WAVES):
            at = start + wave * (T * 8) + thread * 8
            quads = quads + (load_quad(x.to(tl.int64, bitcast=True) + at * 2, (at < K).to(tl.int32)),)
        for wave in tl.static_range(WAVES):
            at = start + wave * (T * 8) + thread * 8
            here = at < (K + 127) // 128 * 128
            for i in tl.static_range(4):  # two columns that are neighbours in x are so in any order
                low, high = both(quads[wave][i], x.dtype.element_ty)
                c0 = encode(low, s, inverse, z, MODE, False, NARROW).to(tl.int32) & 0xFF
                c1 = encode(high, s, inverse, z, MODE, False, NARROW).to(tl.int32) & 0xFF
                codes = tl.where(at < K, c0 | (c1 << 8), 0)
                pipeline.place(to + position_of(at + 2 * i, ORDER), codes, here.to(tl.int32))
    return s, z


@triton.jit
def _x_words(at, lane, n: tl.constexpr, u: tl.constexpr, BITS: tl.constexpr, XR: tl.constexpr, U: tl.constexpr,
             P: tl.constexpr):  # fmt: skip
    """The words of x that meet a lane's words of one block: int4 those of the low nibbles, then of the high ones."""
    C: tl.constexpr = U * P // 16
    B: tl.constexpr = P // 8 if BITS == 4 else P // 4
    row = at
    turn = lane * 0
    if XR > 1:
        token = lane // 4
        row = at + (8 * n + token) * (C * 16)
        turn = token % 2 * (64 if C >= 8 else 0)
    here = u * P + lane % 4 * B
    out = pipeline.words(row + (here ^ turn), B // 4)
    if BITS == 4:
        out = out + pipeline.words(row + ((here + P // 2) ^ turn), B // 4)
    return out


@triton.jit
def _products(words0, words8, x, d, BITS: tl.constexpr, NB: tl.constexpr, V: tl.constexpr):
    """Products of one block: rows r (words0) and r + 8 (words8), added to d; 16 times too large for int4."""
    for j in tl.static_range(V if BITS == 4 else V // 2):
        if BITS == 4:
            p0, p2 = nibbles16(words0[j])
            p1, p3 = nibbles16(words8[j])
        else:
            p0 = words0[2 * j]
            p2 = words0[2 * j + 1]
            p1 = words8[2 * j]
            p3 = words8[2 * j + 1]
        out = ()
        for n in tl.static_range(NB):
            c = d[n]
            x0 = x[n][j if BITS == 4 else 2 * j]
            x1 = x[n][j + V if BITS == 4 else 2 * j + 1]
            out = out + (mma8(p0, p1, p2, p3, x0, x1, c[0], c[1], c[2], c[3]),)
        d = out
    return d


@triton.jit
def _sums(x, zero, c, NB: tl.constexpr, WORDS: tl.constexpr):
    """Add the sums of x over one block, in the layout of the result: of columns 2t and 2t + 1."""
    ones = tl.full(zero.shape, 0x01010101, tl.int32)
    for j in tl.static_range(WORDS // 2):
        out = ()
        for n in tl.static_range(NB):
            e0, e1, _, _ = mma8(ones, ones, ones, ones, x[n][2 * j], x[n][2 * j + 1], c[n][0], c[n][1], zero, zero)
            out = out + ((e0, e1),)
        c = out
    return c


@triton.jit
def _pair(values, row, group, line):
    """The values of rows r and r + 8; ``line``: values of a group."""
    at = group.to(tl.int64) * line
    return tl.load(values + at + tl.minimum(row, line - 1)), tl.load(values + at + tl.minimum(row + 8, line - 1))


@triton.jit(
    do_not_specialize=[
        "M", "N", "K", "NP", "KB", "PER", "stride", "pitch", "given_scale_number", "given_zero_number",
        "out_scale_number", "out_zero_number",
    ]
)  # fmt: skip
def int8_gemv(x, w, scale, zero, sums, x_scale, x_zero, bias, out_scale, out_zero, y,
              given_scale_number, given_zero_number, out_scale_number, out_zero_number,
              M, N, K, NP, KB, PER, stride, pitch,
              BITS: tl.constexpr, P: tl.constexpr, WZERO: tl.constexpr, XZERO: tl.constexpr, GROUPED: tl.constexpr,
              MODE: tl.constexpr, WIDE: tl.constexpr, HAS_BIAS: tl.constexpr, OUT: tl.constexpr,
              NB: tl.constexpr, XR: tl.constexpr, R: tl.constexpr, U: tl.constexpr, NW: tl.constexpr,
              STAGES: tl.constexpr, ALIGNED: tl.constexpr, RING: tl.constexpr, DYNAMIC: tl.constexpr,
              LATE: tl.constexpr, PDL: tl.constexpr, CHUNKS: tl.constexpr = False):  # fmt: skip
    """Y ``(M, N)`` for M <= XR <= 8 * NB; CHUNKS: for any M, see `gemv`.

    MODE < 0: x holds codes in the weight's order, rows of ``128 * stride``, with ``x_scale`` and ``x_zero`` ``(M,)``.
    Else M is 1, x a row of K (a multiple of 8) 16-bit floats on 16 bytes, and MODE as in `quantize`, ``x_scale`` and
    ``x_zero`` being given parameters of the token; WIDE: bytes of shared memory for its codes. w, NP, KB, PER, pitch,
    ALIGNED: see `gemv`. GROUPED: groups are scaled one by one; else one group is all of K. XZERO: x has zero points,
    and ``sums`` ``(G, pitch_of(N))`` the weight's sums of codes.
    """
    T: tl.constexpr = 32 * NW
    FUSED: tl.constexpr = MODE >= 0
    BYTES: tl.constexpr = P // 8 if BITS == 4 else P // 4
    NEXT: tl.constexpr = 8 * P if BITS == 4 else P
    V: tl.constexpr = BYTES // 4
    PAIRS: tl.constexpr = BITS == 8 and P == 64 and U % 2 == 0
    RINGED: tl.constexpr = ALIGNED and GROUPED
    SCALE: tl.constexpr = scale.dtype.element_ty
    POINT: tl.constexpr = zero.dtype.element_ty
    # A stage of a warp: U blocks of R * 16 rows of W, codes of x unless they are made here, scales and zero points.
    W_BYTES: tl.constexpr = U * R * 64 * BYTES
    X_BYTES: tl.constexpr = 0 if FUSED else XR * U * P
    S_BYTES: tl.constexpr = U * R * 2 * SCALE.primitive_bitwidth if RINGED else 0
    Z_BYTES: tl.constexpr = U * R * 2 * POINT.primitive_bitwidth if RINGED and WZERO else 0
    STAGE: tl.constexpr = W_BYTES + X_BYTES + S_BYTES + Z_BYTES
    BLANK: tl.constexpr = U * P if XR == 1 else 0
    OWN: tl.constexpr = STAGES * STAGE + BLANK
    thread = tl.arange(0, T)
    warp = thread // 32
    lane = thread % 32
    tl.static_assert(NW * OWN + (WIDE if FUSED else 0) == RING)
    # 1. Every warp has a ring of its own; the codes of a row that is quantized here follow the rings and are shared.
    buffer = pipeline.allocate(thread, NW, RING, DYNAMIC)
    mine = buffer + warp * OWN
    if XR == 1:  # zeros for the seven tokens that do not exist
        blank = mine + STAGES * STAGE
        for q in tl.static_range((BLANK + 511) // 512):
            pipeline.clear(blank + (q * 512 + lane * 16) % BLANK)
    each = 1.0 / PER
    rows = tl.program_id(0) * (16 * R)
    chunk = 0
    if CHUNKS:
        chunk = tl.program_id(1) * XR
        x += chunk * (tl.cast(stride, tl.int64) * 128)
    row = rows + lane // 4
    at, tiles, step = places(w, lane, rows, NP, KB, pitch, BITS, P, R, PAIRS)
    first = warp * U
    at += first.to(tl.int64) * NEXT
    # 2. Prologue, as in `gemv`: weights before `gdc_wait`, x after it. If the row is quantized here, stages hold
    #    weights only and are committed at once: they are in flight meanwhile.
    for s in tl.static_range(STAGES - 1):
        to = mine + s * STAGE
        ahead = first + s * (U * NW)
        copy_stage(
            to, at + s * (U * NW * NEXT), lane, ahead, s * (U * NW) < KB, tiles, step, scale, zero, rows, NP, KB,
            each, R, U, BYTES, NEXT, PAIRS, W_BYTES + X_BYTES, RINGED, WZERO,
        )  # fmt: skip
        if FUSED:
            pipeline.commit(thread)
    if PDL:
        gdc_wait()
    # 3. The row of x, quantized by this program for itself, or the first stages of its codes.
    if FUSED:
        ORDER: tl.constexpr = P if BITS == 4 else 0
        codes = buffer + NW * OWN
        token_scale, token_zero = _quantize(
            codes, x, thread, x_scale, x_zero, given_scale_number, given_zero_number, K, MODE, ORDER, T, WIDE
        )
        # All warps read the codes that all warps have written.
        tl.debug_barrier()
    else:
        for s in tl.static_range(STAGES - 1):
            ahead = first + s * (U * NW)
            _copy_codes(
                mine + s * STAGE + W_BYTES, x, lane, ahead, s * (U * NW) < KB, M - chunk, KB, stride, XR, U, P
            )  # fmt: skip
            pipeline.commit(thread)

    # 4. Accumulators: int32 over all of K, or float32 if groups are scaled (GROUPED).
    nothing = tl.zeros([T], tl.int32)
    zeros = tl.zeros([T], tl.float32)
    empty = ()
    none = ()
    clean = ()
    for _ in tl.static_range(NB):
        empty = empty + ((nothing, nothing, nothing, nothing),)
        none = none + ((nothing, nothing),)
        clean = clean + ((zeros, zeros, zeros, zeros),)
    acc = ()
    correction = ()
    for _ in tl.static_range(R):
        acc = acc + (clean if GROUPED else empty)
        correction = correction + ((zeros, zeros),)
    total = none
    # The next kernel may be scheduled: early, or (LATE) behind the loop.
    if PDL and not LATE:
        gdc_launch_dependents()
    slot = 0
    at += (STAGES - 1) * (U * NW * NEXT)
    for start in tl.range(0, KB, U * NW, num_stages=1):
        # 5. Wait for the oldest stage and refill the one read in the previous turn, as in `gemv`.
        pipeline.wait(thread, STAGES - 2)
        here = mine + slot
        slot, free = turn(slot, STAGE, STAGES)
        first = start + warp * U
        to = mine + free
        ahead = first + (STAGES - 1) * (U * NW)
        live = start + (STAGES - 1) * (U * NW) < KB
        copy_stage(
            to, at, lane, ahead, live, tiles, step, scale, zero, rows, NP, KB, each,
            R, U, BYTES, NEXT, PAIRS, W_BYTES + X_BYTES, RINGED, WZERO,
        )  # fmt: skip
        if FUSED:
            x_at = codes + first * P
        else:
            _copy_codes(to + W_BYTES, x, lane, ahead, live, M - chunk, KB, stride, XR, U, P)
            x_at = here + W_BYTES
        pipeline.commit(thread)
        at += U * NW * NEXT
        # 6. Compute on the stage that has arrived. Lanes of the seven tokens that do not exist, and blocks behind K,
        #    read zeros.
        if XR == 1:
            x_at = tl.where((lane < 4) & (first < KB), x_at, blank)

        for u in tl.static_range(U):
            if FUSED and U > 1:
                x_at = tl.where(first + u < KB, x_at, blank)
            # 6a. B operands of the block, for all row blocks, and sums of x for zero points of the weight.
            words = ()
            for n in tl.static_range(NB):
                words = words + (_x_words(x_at, lane, n, u, BITS, XR, U, P),)
            xs = none
            if WZERO:
                xs = _sums(words, nothing, none if GROUPED else total, NB, 2 * V if BITS == 4 else V)
            new = ()
            for i in tl.static_range(R):
                w0, w8 = weights(here, lane, u, i, R, BYTES, PAIRS)
                before = empty
                if not GROUPED:
                    before = ()
                    for n in tl.static_range(NB):
                        before = before + (acc[i * NB + n],)
                # 6b. A operands from the stage; exact int32 sums: of this block, to be scaled below, or of K so far.
                d = _products(w0, w8, words, before, BITS, NB, V)
                if GROUPED:
                    # 6c. Scales and zero points of the block's group: from the stage, or from memory if they are not
                    #     ALIGNED.
                    group = group_of(first + u, KB, each)
                    at_scale = here + (W_BYTES + X_BYTES)
                    if RINGED:
                        s0, s8 = pair(at_scale, lane, u, i, R, SCALE)
                    else:
                        s0, s8 = _pair(scale, row + 16 * i, group, NP)
                    s0 = s0.to(tl.float32)
                    s8 = s8.to(tl.float32)
                    if WZERO:
                        if RINGED:
                            z0, z8 = pair(at_scale + S_BYTES, lane, u, i, R, POINT)
                        else:
                            z0, z8 = _pair(zero, row + 16 * i, group, NP)
                    if XZERO:
                        # 6d. The correction by x's zero point: once per group, scale times the sum of the group's
                        #     codes; only the warp that has the group's first block adds it.
                        k0, k8 = correction[i]
                        t0, t8 = _pair(sums, row + 16 * i, group, NP)
                        begins = (first + u < KB) & ((first + u) == group * PER)
                        k0 += tl.where(begins, t0.to(tl.float32) * s0, 0.0)
                        k8 += tl.where(begins, t8.to(tl.float32) * s8, 0.0)
                        if WZERO == FLOAT_ZERO:
                            count = tl.minimum(tl.maximum(K - (first + u) * P, 0), P).to(tl.float32)
                            k0 += z0 * count
                            k8 += z8 * count
                        updated = ()
                        for r in tl.static_range(R):
                            updated = updated + ((k0, k8) if r == i else correction[r],)
                        correction = updated
                    if BITS == 4:
                        # int4 codes were multiplied by 16; a power of two is exact.
                        s0 *= 0.0625
                        s8 *= 0.0625
                    # 6e. Subtract integer zero points in int32, exact; then scale and add in float32, float zero points
                    #     last.
                    for n in tl.static_range(NB):
                        d0, d1, d2, d3 = d[n]
                        a = acc[i * NB + n]
                        x0, x1 = xs[n]
                        if WZERO == INT_ZERO:
                            m0 = z0.to(tl.int32) * (16 if BITS == 4 else 1)
                            m8 = z8.to(tl.int32) * (16 if BITS == 4 else 1)
                            d0 -= m0 * x0
                            d1 -= m0 * x1
                            d2 -= m8 * x0
                            d3 -= m8 * x1
                        a0 = a[0] + s0 * d0.to(tl.float32)
                        a1 = a[1] + s0 * d1.to(tl.float32)
                        a2 = a[2] + s8 * d2.to(tl.float32)
                        a3 = a[3] + s8 * d3.to(tl.float32)
                        if WZERO == FLOAT_ZERO:
                            a0 += z0 * x0.to(tl.float32)
                            a1 += z0 * x1.to(tl.float32)
                            a2 += z8 * x0.to(tl.float32)
                            a3 += z8 * x1.to(tl.float32)
                        new = new + ((a0, a1, a2, a3),)
                else:
                    new = new + d
            acc = new
            if not GROUPED:
                total = xs

    if PDL and LATE:
        gdc_launch_dependents()
    # 7. Epilogue: sum the warps through shared memory, apply the parameters of tokens and of a single group, store.
    e = tl.arange(0, 128)
    for n in tl.static_range(NB):
        token = chunk + 8 * n + 2 * ((e // 4) % 4) + e % 2
        in_row = token < M
        if FUSED:
            xs_scale = token_scale
            xz = token_zero
        else:
            xs_scale = tl.load(x_scale + token, mask=in_row, other=0.0)
            if XZERO:
                xz = tl.load(x_zero + token, mask=in_row, other=0.0)
        if WZERO and not GROUPED:
            t = total[n]
            row_sums = over_warps((t[0], t[1], t[0], t[1]), NW)
        for i in tl.static_range(R):
            out_row = rows + 16 * i + e // 16 + 8 * ((e // 2) % 2)
            in_column = out_row < N
            v = over_warps(acc[i * NB + n], NW)
            if GROUPED:
                if XZERO:
                    k0, k8 = correction[i]
                    v -= xz * over_warps((k0, k0, k8, k8), NW)
            else:
                if BITS == 4:
                    # Every term is a multiple of 16: the shift is exact.
                    v = v >> 4
                if WZERO:
                    wz = tl.load(zero + out_row, mask=in_column, other=0)
                if WZERO == INT_ZERO:
                    v -= wz.to(tl.int32) * row_sums
                if XZERO:
                    v -= xz.to(tl.int32) * tl.load(sums + out_row, mask=in_column, other=0)
                v = v.to(tl.float32) * tl.load(scale + out_row, mask=in_column, other=0.0).to(tl.float32)
                if WZERO == FLOAT_ZERO:
                    if XZERO:
                        v += wz.to(tl.float32) * (row_sums - xz.to(tl.int32) * K).to(tl.float32)
                    else:
                        v += wz.to(tl.float32) * row_sums.to(tl.float32)
            finish(
                v * xs_scale, token, token, out_row, M, N, bias, out_scale, out_zero, out_scale_number,
                out_zero_number, y, HAS_BIAS, OUT,
            )  # fmt: skip
