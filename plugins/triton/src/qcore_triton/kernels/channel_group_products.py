"""Convolutions with int8 activations in channel groups of several channels, as those of ResNeXt, on matrix units.

One launch for all groups, and without columns in memory: each program gathers the columns of some positions in one
group, quantizes them and multiplies their codes. Floor: the bytes of x and y at memory bandwidth. The kernel is above
it by the instructions that gather each element of a column twice: once for its scale, then for its code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .channel_groups import window_starts, window_values
from .int8_common import ended
from .quantize import ASYMMETRIC, SYMMETRIC, TENSOR, encode, extent, inverse_of, parameters
from .rounding import begin, magnitude


@triton.jit(
    do_not_specialize=[
        "given_scale", "given_zero", "out_scale_number", "out_zero_number", "positions", "N", "K", "group", "H", "W",
        "OH", "OW", "stride_h", "stride_w", "top", "left", "dilation_h", "dilation_w",
        "pitch",
    ]
)  # fmt: skip
def convolve(
    x,
    w,
    scale,
    w_zero,
    sums,
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
    pitch,
    MODE: tl.constexpr,
    CODES: tl.constexpr,
    CHANNELS: tl.constexpr,
    EACH: tl.constexpr,
    KW: tl.constexpr,
    ZERO: tl.constexpr,
    LAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Arguments as for `channel_groups.convolve`, but w is ``(N, 32 * pitch)``, K and a whole block more.

    ``sums``: int32 ``(G, N)``, of codes of w minus their zero points.

    Grid: one program per BM positions and BN of the EACH output channels of a group.
    """
    NARROW: tl.constexpr = MODE == SYMMETRIC and x.dtype.element_ty == tl.bfloat16
    PARTS: tl.constexpr = (EACH + BN - 1) // BN
    # 1. Positions, the output channels of one group, and the addresses of the columns' first elements.
    p = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    channel_group, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    j = part * BN + tl.arange(0, BN)[None, :]
    n = channel_group * EACH + j
    in_p, in_n = p < positions, j < EACH
    size = tl.full((), OH, tl.int64) * OW
    image, inside, h, w0 = window_starts(p, size, OW, stride_h, stride_w, top, left)
    x += image * batch_stride + h.to(tl.int64) * row_stride + w0.to(tl.int64) * column_stride
    x += channel_group.to(tl.int64) * CHANNELS * channel_stride
    window = tl.full((), H, tl.uint32), tl.full((), W, tl.uint32), dilation_h, dilation_w
    strides = tl.full((), channel_stride, tl.int64), row_stride, column_stride
    ks = tl.arange(0, BK)
    # Channels of the next group and codes beyond a group's end are read, too: their products are not stored, or with 0.
    row = tl.minimum(channel_group * EACH + part * BN + tl.arange(0, BN), N - 1).to(tl.int64)[:, None] * (pitch * 32)
    most = tl.zeros((BM,), tl.int32)
    below = most
    begin(PDL)
    # 2. Over the columns: their extents, and with them scales and zero points. The image stays in the L1 cache.
    if MODE == SYMMETRIC or MODE == ASYMMETRIC:
        for start in range(0, K, BK):
            k = start + ks[None, :]
            v, _ = window_values(x, k, h, w0, in_p & (k < K), window, strides, CHANNELS, KW)
            low, high = extent(v, MODE)
            below, most = tl.maximum(below, tl.max(low, 1)), tl.maximum(most, tl.max(high, 1))
    s, z = parameters(below, most, 0, given_scale, given_zero, MODE)
    if MODE == ASYMMETRIC:
        z = tl.where(magnitude(s) > 0x7F800000, 0.0, z)  # a NaN has no integer
    inverse = inverse_of(s, most, NARROW)
    z += tl.zeros((BM,), tl.float32)
    # 3. Over them again, per group of the weight: codes, and their products in int32.
    total = tl.zeros((BM, BN), tl.float32)
    for g in range((K + group - 1) // group):
        begun, end = g * group, tl.minimum((g + 1) * group, K)  # of several groups the size is a multiple of 32
        acc, codes = tl.zeros((BM, BN), tl.int32), tl.zeros((BM,), tl.int32)
        for start in range(begun, end, BK):
            k = start + ks[None, :]
            v, seen = window_values(x, k, h, w0, in_p & (k < end), window, strides, CHANNELS, KW)
            if MODE == TENSOR:
                most = tl.maximum(most, tl.max(magnitude(v), 1))
            if CODES:
                v = tl.where(seen, v, z[:, None])
            c = encode(v, s[:, None], inverse[:, None], z[:, None], MODE, CODES, NARROW)
            c = tl.where(k < end, c, 0).to(tl.int8)
            b = tl.load(w + row + tl.multiple_of(start, 32) + ks[None, :])
            acc = tl.dot(c, tl.trans(b), acc, out_dtype=tl.int32)
            if ZERO:
                codes += tl.sum(c.to(tl.int32), 1)
        # 4. Zero points, in int32: those of x times the sums of w, those of w times the sums of x.
        at = g * N + n
        if MODE != SYMMETRIC:
            acc -= z.to(tl.int32)[:, None] * tl.load(sums + at, mask=in_n, other=0)
        if ZERO == 1:
            acc -= codes[:, None] * tl.load(w_zero + at, mask=in_n, other=0).to(tl.int32)
        total += acc.to(tl.float32) * tl.load(scale + at, mask=in_n, other=0.0).to(tl.float32)
        if ZERO == 2:
            centred = (codes - (end - begun) * z.to(tl.int32)).to(tl.float32)
            total += centred[:, None] * tl.load(w_zero + at, mask=in_n, other=0.0).to(tl.float32)
    # 5. The scale of x, which is NaN where a column holds NaN; bias, one rounding.
    if MODE == TENSOR:
        s, _ = parameters(most, most, 0, given_scale, given_zero, MODE)
    bound = tl.where(in_n, n, N)  # channels of the next group have no bias here
    v = total * s[:, None]
    v = ended(v, p, bound, positions, N, bias, y, y, out_scale_number, out_zero_number, y, HAS_BIAS, OUT)
    y += p * N + n if LAST else (image * N + n) * size + inside
    tl.store(y, v, mask=in_p & in_n)
