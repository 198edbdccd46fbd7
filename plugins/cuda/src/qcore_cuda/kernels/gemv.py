"""``gemv``: weight-only product for few rows (M <= 16), bound by reading the weight once. NVIDIA, 16-bit activations.

Weights go from memory straight into fragments of the tensor core (`warp`), W being its A operand and the tokens its
columns. A nibble becomes a 16-bit float by setting its upper byte (bfloat16 128 + u, float16 1024 + u: exact), and the
offset leaves the sum again as what a row of codes 0 would have given: one more product per row block of tokens, in just
the layout of the result, and half an instruction per weight less than subtracting from each one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .warp import load_pair, load_pairs, load_words, mma, spread

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit
def _x_words(x, token, wanted, block, stride, lane, n: tl.constexpr, NB: tl.constexpr, P: tl.constexpr,
             FRAG_X: tl.constexpr):  # fmt: skip
    """The words of x that meet a lane's weights of one block, two per product of 16 k, for column block n.

    With FRAG_X, `arrange_rows` has laid them out so that a warp reads 512 consecutive bytes at a time.
    """
    out = ()
    if FRAG_X:
        line = x + ((block * NB + n).to(tl.int64) * (P * 8) + lane * 8)
        for q in tl.static_range(P // 32):
            out = out + load_pairs(line + q * 256, wanted)
    else:  # stored bytes 4 j + 2 h + e of lane t: k = 16 j + 8 h + 2 t + e, then the same in the upper half
        line = x + (token * tl.cast(stride, tl.int64) + (block * P + 2 * (lane % 4)))
        for j in tl.static_range(P // 8):
            out = out + (load_pair(line + 8 * j, wanted),)
    return out


@triton.jit
def _x_block(x, block, M, KB, stride, lane, NB: tl.constexpr, P: tl.constexpr, FRAG_X: tl.constexpr):
    """`_x_words` of every column block."""
    out = ()
    for n in tl.static_range(NB):
        token = lane // 4 + 8 * n
        wanted = ((token < M) & (block < KB)).to(tl.int32)
        out = out + (_x_words(x, token, wanted, block, stride, lane, n, NB, P, FRAG_X),)
    return out


@triton.jit
def _halves(word):
    """The low and the high nibbles of four bytes."""
    return word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F


@triton.jit
def _tile(words0, words8, x, d, NB: tl.constexpr, V: tl.constexpr, MAGIC: tl.constexpr):
    """Products of one block: rows r (words0) and r + 8 (words8), added to d, four accumulators per column block."""
    BF16: tl.constexpr = MAGIC == 0x43434343
    for j in tl.static_range(V):
        low0, high0 = _halves(words0[j])
        low8, high8 = _halves(words8[j])
        p0, p2 = spread(low0, MAGIC)
        p1, p3 = spread(low8, MAGIC)
        q0, q2 = spread(high0, MAGIC)
        q1, q3 = spread(high8, MAGIC)
        out = ()
        for n in tl.static_range(NB):
            a = x[n]
            c = d[n]
            e0, e1, e2, e3 = mma(p0, p1, p2, p3, a[2 * j], a[2 * j + 1], c[0], c[1], c[2], c[3], BF16)
            e0, e1, e2, e3 = mma(q0, q1, q2, q3, a[2 * (V + j)], a[2 * (V + j) + 1], e0, e1, e2, e3, BF16)
            out = out + ((e0, e1, e2, e3),)
        d = out
    return d


@triton.jit
def _sums(x, zero, c, NB: tl.constexpr, V: tl.constexpr, MAGIC: tl.constexpr):
    """Add what a row of codes 0 would give (in the layout of the result): ``sum(x)`` times the float of code 0.

    Summed in the order of `_tile`, so that such a row comes out as exactly 0.
    """
    BF16: tl.constexpr = MAGIC == 0x43434343
    code0 = tl.full(zero.shape, 0x43084308 if BF16 else 0x64086408, tl.int32)
    for j in tl.static_range(V):
        out = ()
        for n in tl.static_range(NB):
            a = x[n]
            s = c[n]
            e0, e1, e2, e3 = mma(code0, code0, code0, code0, a[2 * j], a[2 * j + 1], s[0], s[1], zero, zero, BF16)

            e0, e1, e2, e3 = mma(
                code0, code0, code0, code0, a[2 * (V + j)], a[2 * (V + j) + 1], e0, e1, zero, zero, BF16
            )
            out = out + ((e0, e1),)
        c = out
    return c


@triton.jit
def _parameters(scale, zero, row, group, N, R: tl.constexpr, ZERO: tl.constexpr):
    """Scales and zero points of rows r and r + 8 of each row block: (s0, s8, z0, z8)."""
    out = ()
    for i in tl.static_range(R):
        at0 = group * N + tl.minimum(row + 16 * i, N - 1)
        at8 = group * N + tl.minimum(row + 16 * i + 8, N - 1)
        s0 = tl.load(scale + at0)
        s8 = tl.load(scale + at8)
        z0 = s0 if ZERO == 0 else tl.load(zero + at0)
        z8 = s8 if ZERO == 0 else tl.load(zero + at8)
        out = out + ((s0, s8, z0, z8),)
    return out


@triton.jit
def _scaled(acc, d, s, parameters, R: tl.constexpr, NB: tl.constexpr, ZERO: tl.constexpr,
            OFFSET: tl.constexpr):  # fmt: skip
    """Add one group's contribution, scales and zero points applied, to the accumulators: 4 per row and column block."""
    out = ()
    for i in tl.static_range(R):
        p = parameters[i]
        s0 = p[0].to(tl.float32)
        s8 = p[1].to(tl.float32)
        if ZERO:
            z0 = p[2].to(tl.float32)
            z8 = p[3].to(tl.float32)
        for n in tl.static_range(NB):
            a = acc[i * NB + n]
            t = d[i * NB + n]
            x0 = s[n][0]
            x1 = s[n][1]
            d0 = t[0] - x0
            d1 = t[1] - x1
            d2 = t[2] - x0
            d3 = t[3] - x1
            if ZERO:
                x0 *= 1.0 / (OFFSET + 8)  # sums of x
                x1 *= 1.0 / (OFFSET + 8)
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
def _weights(base, rows, lane, first, NP, KB, R: tl.constexpr, U: tl.constexpr, V: tl.constexpr):
    """A lane's words of U consecutive blocks from ``first``: per block and row block, those of rows r and r + 8."""
    SEG: tl.constexpr = 16 * V  # bytes of a row in a block
    pitch = tl.cast(KB, tl.int64) * (16 * SEG)
    out = ()
    for u in tl.static_range(U):
        block = first + u
        wanted = (block < KB).to(tl.int32)
        for i in tl.static_range(R):
            tile = tl.minimum(rows // 16 + i, NP // 16 - 1)
            at = base + tile * pitch + block * (16 * SEG) + (lane // 4) * SEG
            out = out + ((load_words(at, wanted, V), load_words(at + 8 * SEG, wanted, V)),)
    return out


@triton.jit(do_not_specialize=["M", "N", "NP", "KB", "PER", "stride"])
def gemv(x, w, scale, zero, bias, y, M, N, NP, KB, PER, stride,
         P: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr, ONE_GROUP: tl.constexpr,
         NB: tl.constexpr, R: tl.constexpr, U: tl.constexpr, NW: tl.constexpr, FRAG_X: tl.constexpr,
         BF16: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """``y[m, n] = sum_k x[m, k] * W[n, k] + bias[n]`` for M <= 8 * NB.

    x: 16-bit floats, rows ``stride`` values apart, on 4 bytes, zero from K to ``KB * P`` (FRAG_X: as `arrange_rows`
    gives them); w: planar16; KB: blocks of P codes along K; PER: blocks per scale group; ZERO: 0 none, 1 integer,
    2 float zero points. A program takes R * 16 rows of W; each of its NW warps takes U blocks of K at a time, and with
    AHEAD loads the next U before it works on these.
    """
    T: tl.constexpr = 32 * NW
    MAGIC: tl.constexpr = 0x43434343 if BF16 else 0x64646464
    OFFSET: tl.constexpr = 128 if BF16 else 1024
    V: tl.constexpr = P // 32  # words of a lane and row in a block
    thread = tl.arange(0, T)
    warp = thread // 32
    lane = thread % 32
    if PDL:
        gdc_launch_dependents()

    rows = tl.program_id(0) * (16 * R)
    row = rows + lane // 4
    base = w.to(tl.int64, bitcast=True) + (lane % 4) * (4 * V)
    zeros = tl.zeros([T], tl.float32)
    blank = ()
    for _ in tl.static_range(NB):
        blank = blank + ((zeros, zeros, zeros, zeros),)
    none = ()
    for _ in tl.static_range(NB):
        none = none + ((zeros, zeros),)
    acc = ()
    for _ in tl.static_range(R):
        acc = acc + blank
    total = none
    if ONE_GROUP:
        whole = _parameters(scale, zero, row, 0, N, R, ZERO)
    if AHEAD:
        words = _weights(base, rows, lane, warp * U, NP, KB, R, U, V)
        if PDL:
            gdc_wait()

    for start in tl.range(0, KB, U * NW, num_stages=1):
        first = start + warp * U
        if not AHEAD:
            words = _weights(base, rows, lane, first, NP, KB, R, U, V)
        parameters = ()
        if not ONE_GROUP:
            for u in tl.static_range(U):
                group = tl.minimum(first + u, KB - 1) // PER
                parameters = parameters + (_parameters(scale, zero, row, group, N, R, ZERO),)
        if PDL and not AHEAD:
            gdc_wait()
        if AHEAD:
            ahead = _weights(base, rows, lane, first + U * NW, NP, KB, R, U, V)
        for u in tl.static_range(U):
            x_block = _x_block(x, first + u, M, KB, stride, lane, NB, P, FRAG_X)
            if ONE_GROUP:
                total = _sums(x_block, zeros, total, NB, V, MAGIC)
                new = ()
                for i in tl.static_range(R):
                    pair = words[u * R + i]
                    mine = ()
                    for n in tl.static_range(NB):
                        mine = mine + (acc[i * NB + n],)
                    new = new + _tile(pair[0], pair[1], x_block, mine, NB, V, MAGIC)
                acc = new
            else:
                s = _sums(x_block, zeros, none, NB, V, MAGIC)
                d = ()
                for i in tl.static_range(R):
                    pair = words[u * R + i]
                    d = d + _tile(pair[0], pair[1], x_block, blank, NB, V, MAGIC)
                acc = _scaled(acc, d, s, parameters[u], R, NB, ZERO, OFFSET)
        if AHEAD:
            words = ahead

    if ONE_GROUP:
        d = acc
        acc = ()
        for _ in tl.static_range(R):
            acc = acc + blank
        acc = _scaled(acc, d, total, whole, R, NB, ZERO, OFFSET)

    for i in tl.static_range(R):
        for n in tl.static_range(NB):
            a = acc[i * NB + n]
            # [warp, lane, row half, column] summed over the warps in one exchange.
            four = tl.join(tl.join(a[0], a[2]), tl.join(a[1], a[3]))
            part = tl.sum(tl.reshape(four, [NW, 128]), 0)
            e = tl.arange(0, 128)
            out_row = rows + 16 * i + e // 16 + 8 * ((e // 2) % 2)
            token = 8 * n + 2 * ((e // 4) % 4) + e % 2
            valid = (out_row < N) & (token < M)
            if BIAS:
                part += tl.load(bias + out_row, mask=valid, other=0.0).to(tl.float32)
            tl.store(y + token * tl.cast(N, tl.int64) + out_row, part.to(y.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["M", "K", "stride", "size"])
def arrange_rows(x, out, M, K, stride, size, P: tl.constexpr, NB: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """Rows of x as `gemv` reads them: for each block of P and 8 rows, quarter warps' words for two products in a row.

    out: 16-bit, ``size`` = ceil(K / P) * NB * 8 * P values; what lies outside of x is zero.
    """
    if PDL:
        gdc_launch_dependents()
    at = tl.program_id(0) * B + tl.arange(0, B)
    inside = at % (P * 8)
    block = at // (P * 8)
    lane = inside % 256 // 8
    value = inside % 8  # two products of 16 k, two words each, two values each
    k = (block // NB) * P + (inside // 256) * 32 + value // 4 * 16 + value // 2 % 2 * 8 + (lane % 4) * 2 + value % 2
    m = block % NB * 8 + lane // 4
    if PDL:
        gdc_wait()
    v = tl.load(x + m.to(tl.int64) * stride + k, mask=(at < size) & (m < M) & (k < K), other=0.0)
    tl.store(out + at, v, mask=at < size)
