"""Activations to int8 codes as in `quantize` and `conv`, for short rows: several rows per program.

With short rows, one program per row leaves most of its lanes idle; here BM rows share a program, in one tile
``(BM, BLOCK)`` of registers. Grid: ``M / BM``. Inputs and results as in `quantize`. Floor: the bytes of x and of the
codes at memory bandwidth.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .order import arranged, position_of
from .quantize import SYMMETRIC, encode, extent, inverse_of, parameters
from .rounding import begin


@triton.jit
def _codes(
    v,
    row,
    given_scale,
    given_zero,
    MODE: tl.constexpr,
    CODES: tl.constexpr,
    NARROW: tl.constexpr,
    BM: tl.constexpr,
):
    """Codes of v ``(BM, BLOCK)``, with scales and zero points ``(BM,)``."""
    below, above = extent(v, MODE)
    most = tl.max(above, 1)
    s, z = parameters(tl.max(below, 1), most, row, given_scale, given_zero, MODE)
    z += tl.zeros((BM,), tl.float32)
    inverse = inverse_of(s, most, NARROW)
    return encode(v, s[:, None], inverse[:, None], z[:, None], MODE, CODES, NARROW), s, z


@triton.jit
def _keep(s, z, c, row, real, scale, zero, total, MODE: tl.constexpr, TOTAL: tl.constexpr):
    """Write parameters of the ``real`` rows, and sums of their codes c, which are 0 beyond the last column."""
    tl.store(scale + row, s, mask=real)
    if MODE != SYMMETRIC:
        tl.store(zero + row, z, mask=real)
    if TOTAL:
        tl.store(total + row, tl.sum(c.to(tl.int32), 1), mask=real)


@triton.jit(do_not_specialize=["M", "given_scale_number", "given_zero_number"])
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
    M,
    K,
    row_stride,
    column_stride,
    MODE: tl.constexpr,
    CODES: tl.constexpr,
    BM: tl.constexpr,
    BLOCK: tl.constexpr,
    TOTAL: tl.constexpr,
    ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    """`quantize.quantize_rows` for BM rows per program, each of at most BLOCK columns."""
    NARROW: tl.constexpr = MODE == SYMMETRIC and x.dtype.element_ty == tl.bfloat16
    # 1. A tile (BM, BLOCK), which stays in registers; rows beyond M repeat the last row and are not stored.
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    row = tl.minimum(m, M - 1)
    o = tl.arange(0, BLOCK)[None, :]
    KQ = (K + 127) // 128 * 128
    begin(PDL)
    at = row.to(tl.int64)[:, None] * row_stride + o.to(tl.int64) * column_stride
    v = tl.load(x + at, mask=o < K, other=0).to(tl.float32)
    # 2. Parameters and codes. TENSOR: numbers passed as arguments; else pointers, read only if parameters are given
    #    per token.
    if MODE == 2:
        c, s, z = _codes(v, row, given_scale_number, given_zero_number, MODE, CODES, NARROW, BM)
    else:
        c, s, z = _codes(v, row, given_scale, given_zero, MODE, CODES, NARROW, BM)
    c = tl.where(o < K, c, 0).to(tl.int8)
    # 3. Store in the weight's order. BLOCK is a multiple of the order's blocks, so all rows can be rearranged as one.
    placed = tl.reshape(arranged(tl.reshape(c, [BM * BLOCK]), ORDER), [BM, BLOCK])
    real = m < M
    tl.store(q + row.to(tl.int64)[:, None] * KQ + o, placed, mask=real[:, None] & (o < KQ))
    _keep(s, z, c, row, real, scale, zero, total, MODE, TOTAL)


@triton.jit(
    do_not_specialize=[
        "first", "count", "given_scale", "given_zero", "OH", "OW", "H", "W", "stride_h", "stride_w", "top", "left",
        "dilation_h", "dilation_w", "KW", "taps",
    ]
)  # fmt: skip
def quantize_columns(
    x,
    q,
    scale,
    zero,
    total,
    given_scale,
    given_zero,
    first,
    count,
    C,
    H,
    W,
    OH,
    OW,
    stride_h,
    stride_w,
    top,
    left,
    dilation_h,
    dilation_w,
    KW,
    taps,
    batch_stride,
    channel_stride,
    row_stride,
    column_stride,
    MODE: tl.constexpr,
    CODES: tl.constexpr,
    TAPS: tl.constexpr,
    BC: tl.constexpr,
    BM: tl.constexpr,
    TOTAL: tl.constexpr,
    ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    """`conv.quantize_columns` for BM of ``count`` positions per program."""
    NARROW: tl.constexpr = MODE == SYMMETRIC and x.dtype.element_ty == tl.bfloat16
    # 1. A tile (BM, TAPS * BC), which stays in registers: a row is the receptive field of one position, taps and
    #    channels padded to powers of two.
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    row = tl.minimum(m, count - 1)
    position = first + row
    image = position // (OH * OW)
    inside = position % (OH * OW)
    o = tl.arange(0, TAPS * BC)[None, :]
    tap, channel = o // BC, o % BC
    h = (inside // OW * stride_h - top)[:, None] + tap // KW * dilation_h
    w = (inside % OW * stride_w - left)[:, None] + tap % KW * dilation_w
    in_column = (tap < taps) & (channel < C)
    # Inside the image; outside it a value is 0, or the zero point if x holds codes.
    seen = in_column & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    at = image.to(tl.int64)[:, None] * batch_stride + channel.to(tl.int64) * channel_stride
    # 2. Addresses are ready: only now wait for the previous kernel, which may have produced x.
    begin(PDL)
    v = tl.load(x + (at + h.to(tl.int64) * row_stride + w.to(tl.int64) * column_stride), mask=seen, other=0)
    v = v.to(tl.float32)
    # 3. Parameters and codes; the padding of the tile gets the code 0, which adds nothing to sums.
    if CODES:
        v = tl.where(seen, v, tl.full((), given_zero, tl.float32))
    c, s, z = _codes(v, row, given_scale, given_zero, MODE, CODES, NARROW, BM)
    c = tl.where(in_column, c, 0).to(tl.int8)
    real = m < count
    K = taps * C
    KQ = (K + 127) // 128 * 128
    # 4. Store K = taps * C codes without the padding of the tile, in the weight's order; then zeros up to a multiple of
    #    128.
    line = q + row.to(tl.int64)[:, None] * KQ
    tl.store(line + position_of(tap * C + channel, ORDER), c, mask=real[:, None] & in_column)
    tail = K + tl.arange(0, 128)[None, :]
    nothing = tl.zeros((BM, 128), tl.int8)
    tl.store(line + position_of(tail, ORDER), nothing, mask=real[:, None] & (tail < KQ))
    _keep(s, z, c, row, real, scale, zero, total, MODE, TOTAL)
