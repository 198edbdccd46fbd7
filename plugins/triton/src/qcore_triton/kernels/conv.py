"""Kernels of convolutions with int8 activations.

`quantize_image` and `gathered`: x has one scale, so an image is quantized once, and the product gathers its columns.
`quantize_columns`: each column has its own scale; its codes are a row of an ordinary product. `pixel_extents` and
`column_scales`: the scales of columns without their codes, for a product that quantizes x itself.

A column is the receptive field of one output position in one channel group, in (KH, KW, IC) order; row m of a product
is the position ``(image, oh, ow)`` counted in that order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .int8_common import finish, tile_order
from .order import position_of
from .quantize import SYMMETRIC, encode, extent, inverse_of, parameters
from .rounding import begin, code, magnitude, symmetric_scale


@triton.jit(do_not_specialize=["H", "W", "scale", "zero", "top", "left", "HP", "WP"])
def quantize_image(
    x,
    q,
    scale,
    zero,
    C,
    H,
    W,
    top,
    left,
    HP,
    WP,
    batch_stride,
    channel_stride,
    row_stride,
    column_stride,
    CODES: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
    PDL: tl.constexpr,
):
    """Codes q int8 ``(B, HP, WP, C)`` of x ``(B, C, H, W)`` of any strides.

    The border, ``top`` and ``left`` wide, holds the zero point. CODES: x holds codes already. One program per BP pixels
    and BC channels.
    """
    # 1. A tile of BP pixels of the padded image by BC channels; negative h or w is the border.
    pixel = tl.program_id(0) * BP + tl.arange(0, BP)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    image = tl.program_id(2).to(tl.int64)
    h, w = pixel // WP - top, pixel % WP - left
    inside = (h >= 0) & (h < H) & (w >= 0) & (w < W)
    x += image * batch_stride
    at = (h.to(tl.int64) * row_stride + w.to(tl.int64) * column_stride)[:, None] + channel.to(tl.int64)[
        None, :
    ] * channel_stride
    in_c = (channel < C)[None, :]
    # 2. Addresses are ready: only now wait for the previous kernel, which may have produced x.
    begin(PDL)
    v = tl.load(x + at, mask=inside[:, None] & in_c, other=0)
    s = tl.full((), scale, tl.float32)
    z = tl.full((), zero, tl.float32)
    # 3. Encode. A masked value is 0, whose code is the zero point; if x holds codes, set it explicitly.
    if CODES:
        c = tl.where(inside[:, None], v.to(tl.int32), z.to(tl.int32)).to(tl.int8)
    else:
        c = code(v.to(tl.float32), s, tl.div_rn(1.0, s), z)
    q += image * HP * WP * C
    tl.store(q + pixel[:, None] * C + channel[None, :], c, mask=(pixel < HP * WP)[:, None] & in_c)


@triton.jit(
    do_not_specialize=[
        "x_scale", "x_zero", "out_scale_number", "out_zero_number", "M", "N", "C32", "w_pitch", "OH", "OW", "HP", "WP",
        "stride_h", "stride_w", "dilation_h", "dilation_w", "KW", "taps",
    ]
)  # fmt: skip
def gathered(
    x,
    w,
    scale,
    sums,
    bias,
    y,
    x_scale,
    x_zero,
    out_scale_number,
    out_zero_number,
    M,
    N,
    C32,
    w_pitch,
    OH,
    OW,
    HP,
    WP,
    stride_h,
    stride_w,
    dilation_h,
    dilation_w,
    KW,
    taps,
    BK: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUT: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Implicit product: y ``(M, N)`` = columns of x times w, int8 per channel; x has one scale and zero point.

    x: codes ``(B, HP, WP, 32 * C32)`` with their border; BK divides the channels. w: rows16, rows of ``32 * w_pitch``.

    Grid: one program per tile of BM positions by BN channels, in bands of GROUP_M rows of tiles. K goes in steps of BK
    channels of one tap. Exact in int32: the caller limits K to less than 2**15. Floor: ``2 * M * N * K`` operations at
    the int8 peak of the matrix units.
    """
    if ALIGNED:
        N = N // 16 * 16  # a hint for the compiler
    C = C32 * 32
    pm, pn = tile_order(tl.program_id(0), (M + BM - 1) // BM, (N + BN - 1) // BN, GROUP_M)
    m0, n0 = pm * BM, pn * BN
    lm = tl.arange(0, BM)
    rm = m0 + lm
    rn = n0 + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    # 1. Pointers (BM, BK) to each position's first tap: a tap is a constant shift from there, the border being in
    #    memory, so the loop needs no masks.
    position = tl.minimum(rm, M - 1)
    image = position // (OH * OW)
    inside = position % (OH * OW)
    pixel = (image.to(tl.int64) * HP + inside // OW * stride_h) * WP + inside % OW * stride_w
    xp = x + (pixel * C)[:, None] + rk[None, :]
    row = tl.minimum(rn, (N + 15) // 16 * 16 - 1).to(tl.int64)
    wp = w + (row * (w_pitch * 32))[:, None] + rk[None, :]
    # 2. All taps and channels in one int32 sum; columns of w are in the order of the steps.
    per_tap = C // BK
    acc = tl.zeros((BM, BN), tl.int32)
    begin(PDL)
    for i in tl.range(0, taps * per_tap, num_stages=STAGES):
        # Triton issues these loads STAGES - 1 steps ahead.
        tap = i // per_tap
        shift = (tap // KW * dilation_h * WP + tap % KW * dilation_w) * C + (i % per_tap) * BK
        a = tl.load(xp + shift)
        b = tl.load(wp)
        acc = tl.dot(a, tl.trans(b), acc, out_dtype=tl.int32)
        wp += BK
    # 3. Epilogue: the zero point of x times the sum of the weight's codes, in int32; then the scales.
    in_n = rn < N
    z = tl.full((), x_zero, tl.float32).to(tl.int32)
    acc -= (tl.load(sums + rn, mask=in_n, other=0) * z)[None, :]
    s = tl.load(scale + rn, mask=in_n, other=0.0).to(tl.float32)
    v = acc.to(tl.float32) * s[None, :] * x_scale
    finish(
        v,
        lm[:, None],
        rm[:, None],
        rn[None, :],
        M,
        N,
        bias,
        y,
        y,
        out_scale_number,
        out_zero_number,
        y + m0.to(tl.int64) * N,
        HAS_BIAS,
        OUT,
    )


@triton.jit(
    do_not_specialize=[
        "first", "given_scale", "given_zero", "OH", "OW", "H", "W", "stride_h", "stride_w", "top", "left", "dilation_h",
        "dilation_w", "KW", "taps",
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
    TOTAL: tl.constexpr,
    ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Codes of columns, as `quantize.quantize_rows` does for rows: one program per position, from ``first`` on.

    x: ``(B, C, H, W)`` of any strides; ORDER as there. TAPS, BC: ``taps`` and C rounded up to powers of two.
    """
    NARROW: tl.constexpr = MODE == SYMMETRIC and x.dtype.element_ty == tl.bfloat16
    # 1. A tile (TAPS, BC): the receptive field of one position, padded to powers of two.
    row = tl.program_id(0)
    position = first + row
    image = position // (OH * OW)
    inside = position % (OH * OW)
    tap = tl.arange(0, TAPS)
    h = inside // OW * stride_h - top + tap // KW * dilation_h
    w = inside % OW * stride_w - left + tap % KW * dilation_w
    channel = tl.arange(0, BC)
    real = (tap < taps)[:, None] & (channel < C)[None, :]
    seen = real & ((h >= 0) & (h < H) & (w >= 0) & (w < W))[:, None]
    x += image.to(tl.int64) * batch_stride
    at = (h.to(tl.int64) * row_stride + w.to(tl.int64) * column_stride)[:, None] + channel.to(tl.int64)[
        None, :
    ] * channel_stride
    begin(PDL, True)  # an `int8_hopper` product may follow
    # 2. The extent of the column gives its parameters. Outside the image a value is 0, or the zero point if x holds
    #    codes.
    v = tl.load(x + at, mask=seen, other=0).to(tl.float32)
    below, above = extent(v, MODE)
    most = tl.max(tl.max(above, 1), 0)
    s, z = parameters(tl.max(tl.max(below, 1), 0), most, row, given_scale, given_zero, MODE)
    # 3. Encode what is still in registers: x is read once.
    if CODES:
        v = tl.where(seen, v, z)
    c = encode(v, s, inverse_of(s, most, NARROW), z, MODE, CODES, NARROW)
    # 4. Store K codes without the padding of the tile, in the weight's order; then zeros up to a multiple of 128.
    K = taps * C
    KQ = (K + 127) // 128 * 128
    q += row.to(tl.int64) * KQ
    tl.store(q + position_of(tap[:, None] * C + channel[None, :], ORDER), c, mask=real)
    tail = K + tl.arange(0, 128)
    tl.store(q + position_of(tail, ORDER), tl.zeros((128,), tl.int8), mask=tail < KQ)
    tl.store(scale + row, s)
    if MODE:
        tl.store(zero + row, z)
    if TOTAL:
        tl.store(total + row, tl.sum(tl.sum(tl.where(real, c.to(tl.int32), 0), 1), 0))


@triton.jit(do_not_specialize=["pixels"])
def pixel_extents(x, extent, pixels, C, BP: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr):
    """The largest `magnitude` of each pixel: x ``(pixels, C)``, contiguous, to int32."""
    pixel = tl.program_id(0) * BP + tl.arange(0, BP)
    channel = tl.arange(0, BC)
    inside = (pixel < pixels)[:, None] & (channel < C)[None, :]
    begin(PDL)
    v = tl.load(x + pixel.to(tl.int64)[:, None] * C + channel[None, :], mask=inside, other=0.0)
    tl.store(extent + pixel, tl.max(magnitude(v.to(tl.float32)), 1), mask=pixel < pixels)


@triton.jit(do_not_specialize=["M", "H", "W", "OH", "OW", "top", "left", "dilation_h", "dilation_w", "KW", "taps"])
def column_scales(
    extent,
    scale,
    inverse,
    M,
    H,
    W,
    OH,
    OW,
    top,
    left,
    dilation_h,
    dilation_w,
    KW,
    taps,
    BM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Symmetric scales ``(M,)`` of columns and the factors of their values; ``extent``: of pixels ``(B, H, W)``."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    image = m // (OH * OW)
    most = tl.zeros((BM,), tl.int32)
    begin(PDL)
    # The largest magnitude of a column is that of its pixels inside the image.
    for tap in range(taps):
        h = m // OW % OH - top + tap // KW * dilation_h
        w = m % OW - left + tap % KW * dilation_w
        seen = (m < M) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        most = tl.maximum(most, tl.load(extent + (image * H + h) * W + w, mask=seen, other=0))
    s = symmetric_scale(most)
    tl.store(scale + m, s, mask=m < M)
    tl.store(inverse + m, inverse_of(s, most, True), mask=m < M)
