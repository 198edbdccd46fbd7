"""Activations to int8 codes in one launch, with parameters computed per token, or given.

Grid: one program per row, which holds BLOCK columns at a time. Floor: the bytes of x and of the codes at memory
bandwidth; rows longer than BLOCK are read twice.

x is ``(M, K)`` of any strides and any float dtype; codes q are int8 ``(M, KQ)`` with KQ = K rounded up to 128 (codes 0
beyond K), scale and zero float32 ``(M,)``, total, the sum of a row's codes, int32 ``(M,)``. A q of 16-bit floats holds
the codes less their zero points, of at most 255 in magnitude, so exactly in float16. Arithmetic as in
``qcore.weights.activations``: float32, division correctly rounded, half to even. A row that holds NaN gets scale NaN,
and with it a result of NaN; so does one that holds infinity, if parameters are computed from the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .order import arranged
from .rounding import (
    asymmetric_scale,
    begin,
    code_of,
    magic_code,
    magic_quotient,
    magic_round,
    magnitude,
    quotient,
    symmetric_scale,
)

SYMMETRIC: tl.constexpr = tl.constexpr(0)
ASYMMETRIC: tl.constexpr = tl.constexpr(1)
TENSOR: tl.constexpr = tl.constexpr(2)
TOKEN: tl.constexpr = tl.constexpr(3)


@triton.jit
def extent(v, MODE: tl.constexpr):
    """Per element, its `magnitude` as (below, above) zero: 0 on the other side; on both sides unless asymmetric."""
    size = magnitude(v)
    if MODE == ASYMMETRIC:
        below, above = tl.where(v > 0, 0, size), tl.where(v < 0, 0, size)
    else:
        below, above = size, size
    return below, above


@triton.jit
def parameters(below, above, row, given_scale, given_zero, MODE: tl.constexpr):
    """Scale and zero point of a row."""
    if MODE == SYMMETRIC:
        s, z = symmetric_scale(above), tl.full((), 0.0, tl.float32)
    elif MODE == ASYMMETRIC:
        s, z = asymmetric_scale(below, above)
    else:
        if MODE == TENSOR:
            s, z = tl.full((), given_scale, tl.float32), tl.full((), given_zero, tl.float32)
        else:
            s, z = tl.load(given_scale + row).to(tl.float32), tl.load(given_zero + row).to(tl.float32)
        poison = tl.full((), 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
        s = tl.where(above > 0x7F800000, poison, s)
    return s, z


@triton.jit
def inverse_of(scale, largest, NARROW: tl.constexpr):
    """``1 / scale`` for `encode`; ``largest``: the row's `magnitude`.

    NARROW, for bfloat16 and symmetric codes: a reciprocal with which one multiplication gives the code. Quotients of
    two numbers of 8 bits differ from ties by at least 2**-16 of their size, unless they are ties: if v is half of the
    largest, or for any v if the scale is a power of two and all is exact. For the former the reciprocal is biased by
    2**-20, toward the side to which the quotient is correctly rounded.
    """
    if NARROW:
        bits, mantissa = scale.to(tl.int32, bitcast=True), (largest >> 16) & 0x7F
        part = mantissa >> 5
        # The mantissas of the largest for which half of it, over the scale, is correctly rounded to less than 63.5.
        below = (mantissa & 31 >= 15) & ((mantissa & 31) + 2 * part <= 21) & (part < 3)
        off = tl.where(below, 0.99999904632568359375, 1.00000095367431640625)
        exact = (254 << 23) - bits  # the inverse of a power of two
        inverse = tl.where(bits & 0x7FFFFF == 0, exact.to(tl.float32, bitcast=True), 1.0 / scale * off)
    else:
        inverse = tl.div_rn(1.0, scale)
    return inverse


@triton.jit
def encode(v, scale, inverse, zero, MODE: tl.constexpr, CODES: tl.constexpr, NARROW: tl.constexpr):
    """Codes of v, which holds codes already if CODES."""
    if CODES:
        c = v.to(tl.int32).to(tl.int8)
    elif NARROW:
        c = centred_codes(v, scale, inverse, zero, MODE, NARROW).to(tl.int8)
    else:
        c = code_of(centred_codes(v, scale, inverse, zero, MODE, NARROW), zero)
    return c


@triton.jit
def centred_codes(v, scale, inverse, zero, MODE: tl.constexpr, NARROW: tl.constexpr):
    """``codes(v) - zero + MAGIC``, int32, see `magic_code`."""
    if NARROW:
        c = magic_round(v * inverse)
    elif MODE == SYMMETRIC or MODE == ASYMMETRIC:
        c = magic_code(quotient(v, scale, inverse), zero)
    else:
        c = magic_quotient(v, scale, inverse, zero)
    return c


@triton.jit(do_not_specialize=["given_scale_number", "given_zero_number"])
def quantize_rows(
    x,
    q,
    scale,
    zero,
    total,
    given_scale,
    given_zero,
    given_scale_number,
    given_zero_number,
    K,
    row_stride,
    column_stride,
    MODE: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOP: tl.constexpr,
    TOTAL: tl.constexpr,
    ORDER: tl.constexpr,
    LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Codes and parameters, one program per row; codes in the order of planar16 with blocks of ORDER (0: column order).

    CODES: x is int8 and used as is. LOOP: K exceeds BLOCK, and x is read twice; else the row stays in registers.
    LATE: the next kernel may read weights immediately, see `rounding.begin`.
    """
    row = tl.program_id(0)
    o = tl.arange(0, BLOCK)
    KQ = (K + 127) // 128 * 128
    NARROW: tl.constexpr = MODE == SYMMETRIC and x.dtype.element_ty == tl.bfloat16
    LESS_ZERO: tl.constexpr = MODE != SYMMETRIC and q.dtype.element_ty != tl.int8
    HELD: tl.constexpr = q.dtype.element_ty if LESS_ZERO else tl.int8
    x += row.to(tl.int64) * row_stride
    q += row.to(tl.int64) * KQ
    begin(PDL, LATE)
    # 1. First pass: the extent of the row, lane by lane; one reduction at the end.
    if LOOP:
        most_below = tl.zeros((BLOCK,), tl.int32)
        most_above = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, K, BLOCK):
            at = start + o
            v = tl.load(x + at.to(tl.int64) * column_stride, mask=at < K, other=0.0).to(tl.float32)
            below, above = extent(v, MODE)
            most_below = tl.maximum(most_below, below)
            most_above = tl.maximum(most_above, above)
    else:
        v = tl.load(x + o.to(tl.int64) * column_stride, mask=o < K, other=0.0).to(tl.float32)
        most_below, most_above = extent(v, MODE)
    # 2. Parameters of the row. TENSOR: numbers passed as arguments; otherwise pointers, read only if given per token.
    below = tl.max(most_below, 0)
    above = tl.max(most_above, 0)
    if MODE == TENSOR:
        s, z = parameters(below, above, row, given_scale_number, given_zero_number, MODE)
    else:
        s, z = parameters(below, above, row, given_scale, given_zero, MODE)
    inverse = inverse_of(s, above, NARROW)
    # 3. Second pass: encode and store. Columns K..KQ get the code 0: products read whole blocks of 128.
    if LOOP:
        sums = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, KQ, BLOCK):
            at = start + o
            v = tl.load(x + at.to(tl.int64) * column_stride, mask=at < K, other=0.0).to(tl.float32)
            c = encode(v, s, inverse, z, MODE, CODES, NARROW)
            c = tl.where(at < K, c.to(tl.float32) - z if LESS_ZERO else c, 0).to(HELD)
            tl.store(q + at, arranged(c, ORDER), mask=at < KQ)
            if TOTAL:
                sums += c.to(tl.int32)
    else:
        c = encode(v, s, inverse, z, MODE, CODES, NARROW)
        # Symmetric codes of the padding, which was loaded as 0, are already 0.
        if MODE != SYMMETRIC:
            c = tl.where(o < K, c.to(tl.float32) - z if LESS_ZERO else c, 0).to(HELD)
        tl.store(q + o, arranged(c, ORDER), mask=o < KQ)
        sums = c.to(tl.int32)
    tl.store(scale + row, s)
    if MODE != SYMMETRIC:
        tl.store(zero + row, z)
    if TOTAL:
        tl.store(total + row, tl.sum(sums, 0))


@triton.jit(do_not_specialize=["M"])
def group_sums(q, sums, M, pitch, B: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr):
    """Sums of codes per block of B along K: q int8 ``(M, pitch)`` to int32 ``(blocks, M)``; 0 beyond the pitch."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    block = tl.program_id(1)
    at = block * B + tl.arange(0, B)
    begin(PDL)
    offset = rows.to(tl.int64)[:, None] * pitch + at[None, :]
    v = tl.load(q + offset, mask=(rows < M)[:, None] & (at < pitch)[None, :], other=0)
    tl.store(sums + block.to(tl.int64) * M + rows, tl.sum(v.to(tl.int32), 1), mask=rows < M)
