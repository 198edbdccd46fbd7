"""Activations to e4m3 with a scale per token, per group of columns or for all, and the end of a product of their codes.

Grids: ``quantize_rows`` and ``quantize_numbers``: one program per row, which is read twice; ``quantize_groups``: (rows,
groups / R); ``finish``: tiles of the result. Floor: the bytes of x and of the codes at memory bandwidth.

Arithmetic as in ``qcore.weights.activations``: float32, half to even, saturating at 448. A row or group that holds NaN
or infinity gets such a scale, and with it results of NaN. HARDWARE: the device converts to e4m3, sm_89 and later do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit
def _scale(largest):
    """The scale of a row or group from the bits of its largest magnitude; 1 for zeros, never subnormal."""
    largest = largest.to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    return tl.where(largest == 0.0, 1.0, scale)


@triton.jit
def _bits(v):
    """The bits of magnitudes: an order in which NaN is above infinity."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _code(v, q, HARDWARE: tl.constexpr):
    """``e4m3(clamp(v))``: its byte if q points to bytes, else the number in float32."""
    if HARDWARE:  # saturates, and keeps NaN
        code = v.to(tl.float8e4nv)
        value = code.to(tl.uint8, bitcast=True) if q.dtype.element_ty == tl.uint8 else code.to(tl.float32)
    else:
        value = _rounded(v, q)
    return value


@triton.jit
def _rounded(v, q):
    """`_code` in integer arithmetic."""
    sign = v.to(tl.int32, bitcast=True) & -2147483648
    bits = _bits(v)
    nan = bits > 0x7F800000
    bits = tl.minimum(bits, 0x43E00000)  # 448
    size = bits.to(tl.float32, bitcast=True)
    # Below 2**-6 numbers are multiples of 2**-9, as are float32 ones from 2**14 on; above they have 3 bits.
    small = bits < 0x3C800000
    low = (size + 16384.0) - 16384.0
    rounded = (bits + (0x7FFFF + ((bits >> 20) & 1))) & -1048576
    if q.dtype.element_ty == tl.uint8:
        byte = tl.where(small, (low * 512.0).to(tl.int32), (rounded >> 20) - 960)
        byte = tl.where(nan, 0x7F, byte)
        value = (byte | ((sign >> 24) & 0x80)).to(tl.uint8)
    else:
        rounded = tl.where(small, low.to(tl.int32, bitcast=True), rounded)
        rounded = tl.where(nan, 0x7FC00000, rounded)
        value = (rounded | sign).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _divided(v, s, inverse, STATIC: tl.constexpr):
    """Quotients; by the reciprocal unless a given scale may have none that is normal."""
    return tl.div_rn(v, tl.zeros_like(v) + s) if STATIC else v * inverse


@triton.jit(do_not_specialize=["given", "M"])
def quantize_rows(x, q, scale, given, copies, M, K, KQ, row_stride, column_stride, STATIC: tl.constexpr,
                  BLOCK: tl.constexpr, LOOP: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Codes ``(M, KQ)``, 0 from K on, as bytes or numbers, and scales ``(copies, M)``; STATIC: the scale is ``given``.

    LOOP: KQ exceeds BLOCK, and x is read twice; else the row stays in registers.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    o = tl.arange(0, BLOCK)
    x += row.to(tl.int64) * row_stride
    q += row.to(tl.int64) * KQ
    v = tl.load(x + o.to(tl.int64) * column_stride, mask=o < K, other=0.0).to(tl.float32)
    if STATIC:
        s = tl.full((), given, tl.float32)
    else:
        most = _bits(v)
        if LOOP:
            for start in range(BLOCK, K, BLOCK):
                at = start + o
                more = tl.load(x + at.to(tl.int64) * column_stride, mask=at < K, other=0.0).to(tl.float32)
                most = tl.maximum(most, _bits(more))
        s = _scale(tl.max(most, 0))
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), s)
    tl.store(q + o, _code(_divided(v, s, inverse, STATIC), q, HARDWARE).to(q.dtype.element_ty), mask=o < KQ)
    if LOOP:
        for start in range(BLOCK, KQ, BLOCK):
            at = start + o
            v = tl.load(x + at.to(tl.int64) * column_stride, mask=at < K, other=0.0).to(tl.float32)
            c = _code(_divided(v, s, inverse, STATIC), q, HARDWARE)
            tl.store(q + at, c.to(q.dtype.element_ty), mask=at < KQ)
    for i in range(copies):
        tl.store(scale + i * M + row, s)


@triton.jit(do_not_specialize=["M"])
def quantize_groups(x, q, scale, M, K, KQ, G, group, row_stride, column_stride, R: tl.constexpr, BLOCK: tl.constexpr,
                    HARDWARE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """R of the G groups of a row: bytes or float16 ``(M, KQ)`` and scales ``(G, M)``; float32 is scaled already."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    g = tl.program_id(1) * R + tl.arange(0, R)
    inside = tl.arange(0, BLOCK)
    at = g[:, None] * group + inside[None, :]
    there = (inside < group)[None, :] & (at < K)
    v = tl.load(x + row.to(tl.int64) * row_stride + at.to(tl.int64) * column_stride, mask=there, other=0.0)
    v = v.to(tl.float32)
    s = _scale(tl.max(_bits(v), 1))
    inverse = tl.div_rn(tl.full((R,), 1.0, tl.float32), s)
    c = _code(v * inverse[:, None], q, HARDWARE)
    if q.dtype.element_ty == tl.float32:
        c = c * s[:, None]
    tl.store(q + row.to(tl.int64) * KQ + at, c.to(q.dtype.element_ty), mask=(inside < group)[None, :] & (at < KQ))
    tl.store(scale + g.to(tl.int64) * M + row, s, mask=g < G)


@triton.jit
def _groups(x, first, K, G, group, column_stride, R: tl.constexpr, BLOCK: tl.constexpr):
    """R groups of a row, float32 (R, BLOCK), 0 where there are none, and their columns."""
    inside = tl.arange(0, BLOCK)
    g = first + tl.arange(0, R)
    at = g[:, None] * group + inside[None, :]
    there = (inside < group)[None, :] & (at < K) & (g < G)[:, None]
    return tl.load(x + at.to(tl.int64) * column_stride, mask=there, other=0.0).to(tl.float32), at


@triton.jit(do_not_specialize=["K", "KQ", "G"])
def quantize_numbers(x, q, unit, K, KQ, G, group, row_stride, column_stride, R: tl.constexpr, BLOCK: tl.constexpr,
                     HARDWARE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Quantized groups times their scales: float16 ``(M, KQ)`` in units of the row, a power of two, float32 ``(M,)``.

    The largest magnitude of a row is one of [2**14, 2**15) units, so numbers down to 2**-28 of it keep 11 bits. G:
    groups of KQ columns, R at a time.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    x += row * row_stride
    q += row * KQ
    # 1. The row's unit, by the exponent of its largest magnitude; both powers of two are normal numbers.
    most = tl.zeros((R,), tl.int32)
    for first in range(0, G, R):
        v, _ = _groups(x, first, K, G, group, column_stride, R, BLOCK)
        most = tl.maximum(most, tl.max(_bits(v), 1))
    power = tl.minimum(tl.maximum(268 - (tl.max(most, 0) >> 23), 1), 253)
    tl.store(unit + row, ((254 - power) << 23).to(tl.float32, bitcast=True))
    by = (power << 23).to(tl.float32, bitcast=True)
    # 2. Groups by their own scales.
    inside = (tl.arange(0, BLOCK) < group)[None, :]
    for first in range(0, G, R):
        v, at = _groups(x, first, K, G, group, column_stride, R, BLOCK)
        s = _scale(tl.max(_bits(v), 1))
        inverse = tl.div_rn(tl.full((R,), 1.0, tl.float32), s)
        number = _code(v * inverse[:, None], q, HARDWARE) * (s * by)[:, None]
        tl.store(q + at, number.to(tl.float16), mask=inside & (at < KQ))


@triton.jit(do_not_specialize=["M"])
def finish(sums, scale, bias, y, M, N, BIAS: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """``y[m, n] = sums[m, n] * scale[m] + bias[n]``, rounded once."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    n = tl.program_id(1) * B + tl.arange(0, B)
    at = row.to(tl.int64) * N + n
    value = tl.load(sums + at, mask=n < N, other=0.0) * tl.load(scale + row)
    if BIAS:
        value += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=n < N)
