"""``gemm``: weight-only product in tiles, for any M.

W is the first operand (rows of the tensor core's instruction), so that it can be dequantized in registers; the tokens
are its columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .nibbles import load_early, unpack_nibbles

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit
def _block(low, high, BN: tl.constexpr, P: tl.constexpr, NW: tl.constexpr, FRAG: tl.constexpr):
    """Codes of the low and the high nibbles, each (rows, bytes), as (rows, k).

    FRAG: bytes are stored in the order of the tensor core's registers (see `packing`), and rows were loaded in the
    order that makes this a renaming of registers: nothing moves between threads.
    """
    q = tl.join(low, high)
    if FRAG:
        V: tl.constexpr = P // 32
        q = tl.reshape(q, [BN // (16 * NW), 2, NW, 8, 4, V, 2, 2, 2])
        q = tl.trans(q, 0, 2, 1, 3, 8, 5, 6, 4, 7)
    else:
        q = tl.trans(q, 0, 2, 1)
    return tl.reshape(q, [BN, P])


@triton.jit
def _settled(b, ON: tl.constexpr):
    """Bytes b, once the tensor cores have read the registers that hold W.

    Triton lets products of an iteration run on into the next one, but nothing keeps that one from unpacking into the
    same registers: that has given wrong sums.
    """
    if ON:
        b = tl.inline_asm_elementwise(
            "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;", "=r,r", [b], dtype=b.dtype, is_pure=False, pack=4
        )
    return b


@triton.jit(do_not_specialize=["M", "N", "NP", "KB", "PER", "eighths", "pitch", "split"])
def gemm(x, w, scale, zero, bias, y, M, N, NP, KB, PER, eighths, pitch, split,
         BITS: tl.constexpr, P: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr,
         BN: tl.constexpr, BM: tl.constexpr, NW: tl.constexpr, STAGES: tl.constexpr, FRAG: tl.constexpr,
         ASM: tl.constexpr, PRE: tl.constexpr, HOPPER: tl.constexpr, WIDE: tl.constexpr,
         PDL: tl.constexpr):  # fmt: skip
    """``y[m, n] = sum_k x[m, k] * W[n, k] + bias[n]``.

    x: rows ``8 * eighths`` values apart (said so, because Triton then knows that they are aligned), zero from K to
    ``KB * P``. pitch: 32 times that many bytes are a row of rows16.
    WIDE: products of float32 numbers (Triton's interpreter multiplies no bfloat16). ``split`` > 1: program (.., s)
    writes its part of the sum over K to ``y[s]`` in float32, without bias.
    """
    H: tl.constexpr = P // 2
    DT: tl.constexpr = tl.float32 if WIDE else x.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
    # One axis for both, since only the first may be longer than 65535; tiles of one x are neighbours.
    tile_n = tl.program_id(0) % tl.cdiv(N, BN)
    tile_m = tl.program_id(0) // tl.cdiv(N, BN)
    s = tl.program_id(1)
    i = tl.arange(0, BN)
    if FRAG:
        # Row i of the loaded tile is the row that `_fragments` expects there.
        group: tl.constexpr = 16 * NW
        row = (i // group) * group + 16 * (i // 8 % NW) + 8 * (i % group // (8 * NW)) + i % 8
    else:
        row = i
    row = tile_n * BN + row
    rm = tile_m * BM + tl.arange(0, BM)
    k = tl.arange(0, H if BITS == 4 else P)
    per_split = tl.cdiv(KB, split)
    first = s * per_split
    last = tl.minimum(first + per_split, KB)
    row = tl.minimum(row, NP - 1)
    if BITS == 4:
        wp = (
            w
            + (row // 16).to(tl.int64)[:, None] * (KB * 16 * H)
            + ((row % 16) * H)[:, None]
            + k[None, :]
            + first.to(tl.int64) * (16 * H)
        )
    else:
        wp = w + row.to(tl.int64)[:, None] * (pitch * 32) + k[None, :] + first * P
    kk = tl.arange(0, P)
    # Two ways, each the faster one where it is taken (measured on an H200). Wide tiles: rows beyond M read the last,
    # and scales come by inline assembly, in the order of their use. Others: rows beyond M are masked, since many that
    # read the same one queue up, and scales come in Triton's order, rearranged through shared memory.
    LARGE: tl.constexpr = ASM and BM >= 128
    xm = tl.minimum(rm, M - 1) if LARGE else rm
    xp = x + xm.to(tl.int64)[:, None] * (eighths * 8) + kk[None, :] + first * P
    real = (rm < M)[:, None]
    rn = tl.minimum(tile_n * BN + i, N - 1)
    acc = tl.zeros([BN, BM], tl.float32)
    # Scales are too narrow for asynchronous copies: each iteration loads the next one's by hand.
    at = (tl.minimum(first, KB - 1) // PER) * N + rn  # a program may have no part of K
    sc = load_early(scale + at, LARGE)
    zr = load_early(zero + at, LARGE) if ZERO else sc
    if PDL:
        gdc_wait()
    for b in tl.range(first, last, num_stages=STAGES):
        xt = tl.load(xp).to(DT) if LARGE else tl.load(xp, mask=real, other=0.0).to(DT)
        later = tl.minimum((b + 1) // PER, (KB - 1) // PER) * N + rn
        sc_next = load_early(scale + later, LARGE)
        zr_next = load_early(zero + later, LARGE) if ZERO else sc_next
        data = _settled(tl.load(wp), HOPPER and PRE)
        if BITS == 4:
            low, high = unpack_nibbles(data, DT, ASM)
            q = _block(low, high, BN, P, NW, FRAG)
            wp += 16 * H
        else:
            q = data.to(DT)
            wp += P
        if ZERO == 1 and (BITS == 4 or PRE):  # at most 255: exact
            q -= zr.to(DT)[:, None]
        if PRE:
            acc = tl.dot(q * sc.to(DT)[:, None], tl.trans(xt), acc)
        else:
            d = tl.dot(q, tl.trans(xt))
            if ZERO == 1 and BITS == 8:
                d -= zr.to(tl.float32)[:, None] * tl.sum(xt.to(tl.float32), 1)[None, :]
            acc += d * sc.to(tl.float32)[:, None]
        if ZERO == 2:
            acc += zr.to(tl.float32)[:, None] * tl.sum(xt.to(tl.float32), 1)[None, :]
        xp += P
        sc = sc_next
        zr = zr_next
    n = tile_n * BN + i
    valid = (n < N)[:, None] & (rm < M)[None, :]
    if BIAS:
        acc += tl.load(bias + rn).to(tl.float32)[:, None]
    out = y + s.to(tl.int64) * M * N + rm.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out, acc.to(y.dtype.element_ty), mask=valid)
