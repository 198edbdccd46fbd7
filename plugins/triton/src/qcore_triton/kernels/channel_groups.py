"""Convolutions with int8 activations in channel groups of one or a few channels: depthwise ones.

Such groups are too narrow for matrix units: each output channel is summed on its own, in int32. A column is the
receptive field of one output position in one channel group, in (KH, KW, IC) order, and each has its own scale unless
one is given. Images have their channels last in memory, so that a thread reads several at once, and the arithmetic of
addresses and edges is shared by them. Floor: the bytes of x and y at memory bandwidth. The kernel is above it by its
instructions: each element of a column is read twice, from the L1 cache, and encoded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .int8_common import ended
from .quantize import ASYMMETRIC, SYMMETRIC, TENSOR, centred_codes, extent, inverse_of, parameters
from .rounding import MAGIC, begin, magnitude


@triton.jit
def window_starts(p, size, OW, stride_h, stride_w, top, left):
    """Of output positions p: the image, the position in it, and line and column of the window's first element."""
    image = p // size
    inside = p - image * size
    line = inside // OW
    h, w = line.to(tl.int32) * stride_h - top, (inside - line * OW).to(tl.int32) * stride_w - left
    return image.to(tl.int64), inside, h, w


@triton.jit
def window_tap(row, column, h, w, window, FAR: tl.constexpr):
    """A tap of windows that start at (h, w): its shift in memory, and whether it is in the image."""
    H, W, dilation_h, dilation_w, row_stride, column_stride = window
    down, right = row * dilation_h, column * dilation_w
    # As unsigned numbers, negative ones are above every size: one comparison for both ends.
    seen = ((h + down).to(tl.uint32, bitcast=True) < H) & ((w + right).to(tl.uint32, bitcast=True) < W)
    if FAR:
        shift = down.to(tl.int64) * row_stride + right.to(tl.int64) * column_stride
    else:
        shift = down * row_stride + right * column_stride
    return shift, seen


@triton.jit
def _accumulate(sums, v, weight, seen, how, MODE: tl.constexpr, CODES: tl.constexpr, NARROW: tl.constexpr,
           ZERO: tl.constexpr):  # fmt: skip
    """Add an element to the sums of products, of weights and, with float zero points of the weight, of codes.

    Codes are less their zero point, plus MAGIC unless CODES, see `quantize.centred_codes`.
    """
    products, weights, codes = sums
    s, inverse, z = how
    if CODES:
        c = tl.where(seen, v.to(tl.float32), z).to(tl.int32) - z.to(tl.int32)
    else:
        c = centred_codes(v.to(tl.float32), s, inverse, z, MODE, NARROW)
    if ZERO == 2:
        codes += c
    return products + c * weight, weights + weight, codes


@triton.jit
def _update_extents(v, below, most, largest, MODE: tl.constexpr, PAIRS: tl.constexpr):
    """Extents of columns with an element more: in ``largest`` if PAIRS and one number is enough, else in the others."""
    if PAIRS and MODE != ASYMMETRIC:
        largest = max_abs_pairs(v, largest)
    else:
        low, high = extent(v.to(tl.float32), MODE)
        below, most = tl.maximum(below, low), tl.maximum(most, high)
    return below, most, largest


@triton.jit
def max_abs_pairs(v, most):
    """The larger of ``|v|`` and most, which is not negative, in bfloat16: two in two instructions; NaN stays."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; and.b32 t, $1, 0x7FFF7FFF; max.NaN.bf16x2 $0, t, $2; }",
        "=r,r,r",
        [v, most],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit(
    do_not_specialize=[
        "given_scale", "given_zero", "out_scale_number", "out_zero_number", "positions", "size", "K", "group",
        "H", "W", "OW", "stride_h", "stride_w", "top", "left", "dilation_h", "dilation_w",
    ]
)  # fmt: skip
def convolve(
    x,
    w,
    scale,
    w_zero,
    bias,
    y,
    given_scale,
    given_zero,
    out_scale_number,
    out_zero_number,
    positions,
    size,
    N,
    K,
    group,
    H,
    W,
    OW,
    stride_h,
    stride_w,
    top,
    left,
    dilation_h,
    dilation_w,
    batch_stride,
    row_stride,
    column_stride,
    MODE: tl.constexpr,
    CODES: tl.constexpr,
    CHANNELS: tl.constexpr,
    EACH: tl.constexpr,
    KW: tl.constexpr,
    ZERO: tl.constexpr,
    LAST: tl.constexpr,
    FAR: tl.constexpr,
    ASM: tl.constexpr,
    WHOLE: tl.constexpr,
    LINES: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Y ``(B, N, OH, OW)``: x ``(B, C, H, W)``, channels last, in groups of CHANNELS, with EACH results per group.

    w: int8 codes ``(K, N)``; scale ``(G, N)``, one for ``group`` rows of w; w_zero ``(G, N)``: ZERO as
    `weights.Weight.zero_kind`. LAST: y is contiguous with channels last, else with positions last. ``size``: OH * OW;
    ``positions``: B * size; FAR: int32 does not number them, or what a window spans. CODES: x holds codes, in MODE
    TENSOR. WHOLE: the weight has one group of scales. LINES: windows are read a line at a time, each tap by code of its
    own.

    Grid: one program per BP positions and BC channels.
    """
    PAIRS: tl.constexpr = ASM and x.dtype.element_ty == tl.bfloat16
    NARROW: tl.constexpr = MODE == SYMMETRIC and x.dtype.element_ty == tl.bfloat16
    # 1. A tile of positions and channels; the first input channel of each channel's group.
    first = tl.program_id(0)
    p = (first.to(tl.int64) if FAR else first) * BP + tl.arange(0, BP)[:, None]
    n = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    in_p, in_n = p < positions, n < N
    image, inside, h, w0 = window_starts(p, size, OW, stride_h, stride_w, top, left)
    x += image * batch_stride + h.to(tl.int64) * row_stride + w0.to(tl.int64) * column_stride
    x += n // EACH * CHANNELS
    window = tl.full((), H, tl.uint32), tl.full((), W, tl.uint32), dilation_h, dilation_w, row_stride, column_stride
    none, largest = tl.zeros((BP, BC), tl.int32), tl.zeros((BP, BC), tl.bfloat16)
    most, below = none, none
    begin(PDL)
    # 2. Over the columns: their extents, and with them scales and zero points. The image stays in the L1 cache.
    if MODE == SYMMETRIC or MODE == ASYMMETRIC:
        if LINES:
            for row in range(K // (KW * CHANNELS)):
                for column in tl.static_range(KW):
                    shift, seen = window_tap(row, column, h, w0, window, FAR)
                    for i in range(CHANNELS):
                        v = tl.load(x + (shift + i), mask=in_p & seen & in_n, other=0)
                        below, most, largest = _update_extents(v, below, most, largest, MODE, PAIRS)
        else:
            for step in range(K):
                tap = step // CHANNELS
                shift, seen = window_tap(tap // KW, tap % KW, h, w0, window, FAR)
                v = tl.load(x + (shift + step % CHANNELS), mask=in_p & seen & in_n, other=0)
                below, most, largest = _update_extents(v, below, most, largest, MODE, PAIRS)
    if PAIRS and MODE == SYMMETRIC:
        most = magnitude(largest.to(tl.float32))
    s, z = parameters(below, most, 0, given_scale, given_zero, MODE)
    if MODE == ASYMMETRIC:
        z = tl.where(magnitude(s) > 0x7F800000, 0.0, z)  # a NaN has no integer
    how = s, inverse_of(s, most, NARROW), z
    # 3. Over them again, per group of the weight: codes, and their products with those of the weight, in int32.
    total = tl.zeros((BP, BC), tl.float32)
    for g in range(1 if WHOLE else (K + group - 1) // group):
        at = g * N + n
        zero = tl.load(w_zero + at, mask=in_n, other=0).to(tl.int32) if ZERO == 1 else tl.zeros_like(n)
        sums = none, tl.zeros_like(n), none
        if WHOLE and LINES:
            for row in range(K // (KW * CHANNELS)):
                for column in tl.static_range(KW):
                    shift, seen = window_tap(row, column, h, w0, window, FAR)
                    for i in range(CHANNELS):
                        v = tl.load(x + (shift + i), mask=in_p & seen & in_n, other=0)
                        codes = w + ((row * KW + column) * CHANNELS + i) * N + n
                        weight = tl.load(codes, mask=in_n, other=0).to(tl.int32) - zero
                        sums = _accumulate(sums, v, weight, seen, how, MODE, CODES, NARROW, ZERO)
                        if MODE == TENSOR:
                            _, most, largest = _update_extents(v, below, most, largest, MODE, PAIRS)
        else:
            for step in range(g * group, tl.minimum((g + 1) * group, K)):
                tap = step // CHANNELS
                shift, seen = window_tap(tap // KW, tap % KW, h, w0, window, FAR)
                v = tl.load(x + (shift + step % CHANNELS), mask=in_p & seen & in_n, other=0)
                weight = tl.load(w + step * N + n, mask=in_n, other=0).to(tl.int32) - zero
                sums = _accumulate(sums, v, weight, seen, how, MODE, CODES, NARROW, ZERO)
                if MODE == TENSOR:
                    _, most, largest = _update_extents(v, below, most, largest, MODE, PAIRS)
        products, weights, codes = sums
        if not CODES:
            # All codes were multiplied with MAGIC added to them, modulo 2**32: subtract MAGIC times the sum of weights.
            products -= MAGIC * weights
            if ZERO == 2:
                codes -= MAGIC * tl.minimum(group, K - g * group)
        total += products.to(tl.float32) * tl.load(scale + at, mask=in_n, other=0.0).to(tl.float32)
        if ZERO == 2:
            total += codes.to(tl.float32) * tl.load(w_zero + at, mask=in_n, other=0.0).to(tl.float32)
    # 4. The scale of x, which is NaN where a column holds NaN; bias, one rounding.
    if MODE == TENSOR:
        if PAIRS:
            most = magnitude(largest.to(tl.float32))
        s, _ = parameters(most, most, 0, given_scale, given_zero, MODE)
    v = ended(total * s, p, n, positions, N, bias, y, y, out_scale_number, out_zero_number, y, HAS_BIAS, OUT)
    p = p.to(tl.int64)
    y += p * N + n if LAST else (image * N + n) * size + inside
    tl.store(y, v, mask=in_p & in_n)
