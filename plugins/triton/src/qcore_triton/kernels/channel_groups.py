"""Convolutions with int8 activations in channel groups of one or a few channels: depthwise ones.

Such groups are too narrow for matrix units: each output channel is summed on its own, in int32. A column is the
receptive field of one output position in one channel group, in (KH, KW, IC) order, and each has its own scale unless
one is given. Floor: the bytes of x and y at memory bandwidth. The kernel is above it by its instructions: each element
of a column is read twice, from the L1 cache, and encoded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .int8_common import ended
from .quantize import ASYMMETRIC, SYMMETRIC, TENSOR, encode, extent, inverse_of, parameters
from .rounding import begin, magnitude


@triton.jit
def window_starts(p, size, OW, stride_h, stride_w, top, left):
    """Of output positions p: the image, the position in it, and line and column of the window's first element."""
    image, inside = p // size, p % size
    h, w = (inside // OW).to(tl.int32) * stride_h - top, (inside % OW).to(tl.int32) * stride_w - left
    return image, inside, h, w


@triton.jit
def window_values(x, step, h, w, real, window, strides, CHANNELS: tl.constexpr, KW: tl.constexpr):
    """Element ``step`` of all columns of a tile, in float32 (0 outside), and whether it is ``real`` and in the image.

    ``x``: addresses of the first elements, at (h, w), of which only the positions matter for what is outside; ``step``:
    one for all, or a row of several for a column of positions.
    """
    H, W, dilation_h, dilation_w = window
    channel_stride, row_stride, column_stride = strides
    tap = step // CHANNELS
    down, right = tap // KW * dilation_h, tap % KW * dilation_w
    shift = down.to(tl.int64) * row_stride + right.to(tl.int64) * column_stride + step % CHANNELS * channel_stride
    # As unsigned numbers, negative ones are above every size: one comparison for both ends.
    seen = real & ((h + down).to(tl.uint32, bitcast=True) < H) & ((w + right).to(tl.uint32, bitcast=True) < W)
    return tl.load(x + shift, mask=seen, other=0).to(tl.float32), seen


@triton.jit(
    do_not_specialize=[
        "given_scale", "given_zero", "out_scale_number", "out_zero_number", "positions", "N", "K", "group", "H", "W",
        "OH", "OW", "stride_h", "stride_w", "top", "left", "dilation_h", "dilation_w",
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
    N,
    K,
    group,
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
    batch_stride,
    channel_stride,
    row_stride,
    column_stride,
    MODE: tl.constexpr,
    CODES: tl.constexpr,
    CHANNELS: tl.constexpr,
    EACH: tl.constexpr,
    KW: tl.constexpr,
    ZERO: tl.constexpr,
    LAST: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Y ``(B, N, OH, OW)``: x ``(B, C, H, W)`` of any strides in groups of CHANNELS channels, EACH results per group.

    w: int8 codes ``(K, N)``; scale ``(G, N)``, one for ``group`` rows of w; w_zero ``(G, N)``: ZERO as
    `weights.Weight.zero_kind`. LAST: y is contiguous with channels last, else with positions last; the tile of BP
    positions by BC channels then has the same order, so that threads which are neighbours read and write neighbours.
    ``positions``: B * OH * OW. CODES: x holds codes, in MODE TENSOR.
    """
    NARROW: tl.constexpr = MODE == SYMMETRIC and x.dtype.element_ty == tl.bfloat16
    # 1. A tile of positions and channels; the first input channel of each channel's group.
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    n = tl.program_id(1) * BC + tl.arange(0, BC)
    if LAST:
        p, n = p[:, None], n[None, :]
    else:
        p, n = p[None, :], n[:, None]
    in_p, in_n = p < positions, n < N
    size = tl.full((), OH, tl.int64) * OW
    image, inside, h, w0 = window_starts(p, size, OW, stride_h, stride_w, top, left)
    # Channels beyond N read those of channel N - 1: masks depend on positions only, and are shared by all channels.
    known = tl.minimum(n, N - 1)
    first = h.to(tl.int64) * row_stride + w0.to(tl.int64) * column_stride
    x += image * batch_stride + first + (known // EACH * CHANNELS).to(tl.int64) * channel_stride
    window = tl.full((), H, tl.uint32), tl.full((), W, tl.uint32), dilation_h, dilation_w
    strides = tl.full((), channel_stride, tl.int64), row_stride, column_stride
    most = tl.zeros_like((in_p & in_n).to(tl.int32))
    below = most
    begin(PDL)
    # 2. Over the columns: their extents, and with them scales and zero points. The image stays in the L1 cache.
    if MODE == SYMMETRIC or MODE == ASYMMETRIC:
        for step in range(K):
            v, _ = window_values(x, step, h, w0, in_p, window, strides, CHANNELS, KW)
            low, high = extent(v, MODE)
            below, most = tl.maximum(below, low), tl.maximum(most, high)
    s, z = parameters(below, most, 0, given_scale, given_zero, MODE)
    if MODE == ASYMMETRIC:
        z = tl.where(magnitude(s) > 0x7F800000, 0.0, z)  # a NaN has no integer
    inverse = inverse_of(s, most, NARROW)
    # 3. Over them again: codes, and their products with those of the weight, in int32 per group of the weight.
    total = tl.zeros_like(most.to(tl.float32))
    for g in range((K + group - 1) // group):
        at = g * N + known
        zero = tl.zeros_like(known)
        if ZERO == 1:
            zero = tl.load(w_zero + at).to(tl.int32)
        acc, codes = tl.zeros_like(most), tl.zeros_like(most)
        for step in range(g * group, tl.minimum((g + 1) * group, K)):
            v, seen = window_values(x, step, h, w0, in_p, window, strides, CHANNELS, KW)
            if MODE == TENSOR:
                most = tl.maximum(most, magnitude(v))
            if CODES:
                v = tl.where(seen, v, z)
            c = encode(v, s, inverse, z, MODE, CODES, NARROW).to(tl.int32) - z.to(tl.int32)
            acc += c * (tl.load(w + step * N + known).to(tl.int32) - zero)
            if ZERO == 2:
                codes += c
        total += acc.to(tl.float32) * tl.load(scale + at).to(tl.float32)
        if ZERO == 2:
            total += codes.to(tl.float32) * tl.load(w_zero + at).to(tl.float32)
    # 4. The scale of x, which is NaN where a column holds NaN; bias, one rounding.
    if MODE == TENSOR:
        s, _ = parameters(most, most, 0, given_scale, given_zero, MODE)
    v = ended(total * s, p, n, positions, N, bias, y, y, out_scale_number, out_zero_number, y, HAS_BIAS, OUT)
    y += p * N + n if LAST else (image * N + n) * size + inside
    tl.store(y, v, mask=in_p & in_n)
