"""Convolutions with int8 activations in channel groups of several channels, as those of ResNeXt, on matrix units.

One launch for all groups, and without columns in memory: a program takes the channels of several neighbouring groups at
once, tap by tap, which are neighbours in memory, too. It multiplies their codes by a matrix that is 0 except where
input and output channel have the same group: matrix units have more products to spare than memory has reads of a few
bytes. Floor: the bytes of x and y at memory bandwidth. The kernel is above it by the instructions that read each
element of a column twice, once for its scale and once for its code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .channel_groups import max_abs_pairs, window_starts, window_tap
from .int8_common import ended
from .quantize import ASYMMETRIC, SYMMETRIC, TENSOR, encode, extent, inverse_of, parameters
from .rounding import begin, magnitude


@triton.jit
def broadcast_groups(v, BM: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """V ``(BM, GROUPS, 1)``, one per group, as ``(BM, GROUPS * EACH)``: one per channel."""
    return tl.reshape(tl.broadcast_to(v, (BM, GROUPS, EACH)), (BM, GROUPS * EACH))


@triton.jit(
    do_not_specialize=[
        "given_scale", "given_zero", "out_scale_number", "out_zero_number", "positions", "size", "K", "group",
        "H", "W", "OW", "stride_h", "stride_w", "top", "left", "dilation_h", "dilation_w", "pitch",
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
    pitch,
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
    BM: tl.constexpr,
    GROUPS: tl.constexpr,
    BC: tl.constexpr,
    BN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Arguments as for `channel_groups.convolve`, but w is ``(N, 32 * pitch)``, codes of a row in the order of columns.

    ``sums``: int32 ``(G, N)``, of codes of w minus their zero points. WHOLE: the weight has one group of scales.

    Grid: one program per BM positions, and per GROUPS channel groups with BC input and BN output channels each, at
    least their number or, of one group, as many as are multiplied at a time; output channels beyond BN have programs of
    their own.
    """
    NARROW: tl.constexpr = MODE == SYMMETRIC and x.dtype.element_ty == tl.bfloat16
    PAIRS: tl.constexpr = ASM and x.dtype.element_ty == tl.bfloat16
    PARTS: tl.constexpr = (EACH + BN - 1) // BN
    BLOCKS: tl.constexpr = (CHANNELS + BC - 1) // BC
    # 1. Positions and the addresses of their columns; input and output channels, and which of them exist.
    first = tl.program_id(0)
    p = (first.to(tl.int64) if FAR else first) * BM + tl.arange(0, BM)[:, None]
    image, inside, h, w0 = window_starts(p, size, OW, stride_h, stride_w, top, left)
    x += image * batch_stride + h.to(tl.int64) * row_stride + w0.to(tl.int64) * column_stride
    window = tl.full((), H, tl.uint32), tl.full((), W, tl.uint32), dilation_h, dilation_w, row_stride, column_stride
    group0, part = tl.program_id(1) // PARTS * GROUPS, tl.program_id(1) % PARTS
    c = tl.arange(0, GROUPS * BC)[None, :]
    j = tl.arange(0, GROUPS * BN)[None, :]
    rows = tl.arange(0, GROUPS * BN)[:, None]
    n = group0 * EACH + j if BN == EACH else (group0 + j // BN) * EACH + part * BN + j % BN
    in_p, in_n = p < positions, (part * BN + j % BN < EACH) & (n < N)
    row = (group0 + rows // BN) * EACH + part * BN + rows % BN
    same = (rows // BN == c // BC) & (part * BN + rows % BN < EACH) & (row < N)
    w += row.to(tl.int64) * (pitch * 32)
    # Channels that do not exist are not read, and count as 0; so do their weights.
    channel = group0 * CHANNELS + c if BC == CHANNELS else (group0 + c // BC) * CHANNELS + c % BC
    exists = (group0 + c // BC) * EACH < N
    most = tl.zeros((BM, GROUPS * BC), tl.int32)
    below = most
    largest = tl.zeros((BM, GROUPS * BC), tl.bfloat16)
    begin(PDL)
    # 2. Over the columns: their extents, lane by lane. Then one reduction over the channels of each group.
    if MODE == SYMMETRIC or MODE == ASYMMETRIC:
        for step in range(K // CHANNELS * BLOCKS):
            tap = step // BLOCKS
            shift, seen = window_tap(tap // KW, tap % KW, h, w0, window, FAR)
            from_ = step % BLOCKS * BC
            inner = exists if BC * BLOCKS == CHANNELS else exists & (from_ + c % BC < CHANNELS)
            v = tl.load(x + (shift + from_) + channel, mask=in_p & seen & inner, other=0)
            if NARROW and PAIRS:
                largest = max_abs_pairs(v, largest)
            else:
                low, high = extent(v.to(tl.float32), MODE)
                below, most = tl.maximum(below, low), tl.maximum(most, high)
    if NARROW and PAIRS:
        most = magnitude(largest.to(tl.float32))
    above = tl.max(tl.reshape(most, (BM, GROUPS, BC)), 2, keep_dims=True)
    lowest = above
    if MODE == ASYMMETRIC:
        lowest = tl.max(tl.reshape(below, (BM, GROUPS, BC)), 2, keep_dims=True)
    s, z = parameters(lowest, above, 0, given_scale, given_zero, MODE)
    if MODE == ASYMMETRIC:
        z = tl.where(magnitude(s) > 0x7F800000, 0.0, z)  # a NaN has no integer
    inverse = inverse_of(s, above, NARROW)
    z += tl.zeros((BM, GROUPS, 1), tl.float32)
    s += tl.zeros((BM, GROUPS, 1), tl.float32)
    s_in, z_in = broadcast_groups(s, BM, GROUPS, BC), broadcast_groups(z, BM, GROUPS, BC)
    inverse += tl.zeros((BM, GROUPS, 1), tl.float32)
    inverse = broadcast_groups(inverse, BM, GROUPS, BC)
    # 3. Over them again, per group of the weight: codes, and their products in int32.
    total = tl.zeros((BM, GROUPS * BN), tl.float32)
    for g in range(1 if WHOLE else (K + group - 1) // group):
        begun, end = (0, K) if WHOLE else (g * group, tl.minimum((g + 1) * group, K))
        acc, codes = tl.zeros((BM, GROUPS * BN), tl.int32), tl.zeros((BM, GROUPS * BC), tl.int32)
        # Of several groups, one may begin or end inside the channels of a tap, which is then read for both.
        last = (end - 1) // CHANNELS * BLOCKS + (end - 1) % CHANNELS // BC
        for step in range(begun // CHANNELS * BLOCKS + begun % CHANNELS // BC, last + 1):
            tap = step // BLOCKS
            shift, seen = window_tap(tap // KW, tap % KW, h, w0, window, FAR)
            from_ = step % BLOCKS * BC
            inner = exists if BC * BLOCKS == CHANNELS else exists & (from_ + c % BC < CHANNELS)
            v = tl.load(x + (shift + from_) + channel, mask=in_p & seen & inner, other=0)
            if MODE == TENSOR and PAIRS:
                largest = max_abs_pairs(v, largest)
            v = v.to(tl.float32)
            if MODE == TENSOR and not PAIRS:
                most = tl.maximum(most, magnitude(v))
            if CODES:
                v = tl.where(seen, v, z_in)
            q = encode(v, s_in, inverse, z_in, MODE, CODES, NARROW)
            k = tap * CHANNELS + from_ + c % BC
            if not WHOLE:
                inner &= (k >= begun) & (k < end)
            b = tl.load(w + k, mask=same & inner, other=0)
            acc = tl.dot(q, tl.trans(b), acc, out_dtype=tl.int32)
            if ZERO:
                codes += tl.where(inner, q.to(tl.int32), 0)
        # 4. Zero points, in int32: those of x times the sums of w, those of w times the sums of x.
        at = g * N + n
        if MODE != SYMMETRIC:
            z_out = broadcast_groups(z, BM, GROUPS, BN).to(tl.int32)
            acc -= z_out * tl.load(sums + at, mask=in_n, other=0)
        if ZERO:
            sum_in = tl.sum(tl.reshape(codes, (BM, GROUPS, BC)), 2, keep_dims=True)
            if ZERO == 2:
                sum_in -= (end - begun) * z.to(tl.int32)
            sum_out = broadcast_groups(sum_in, BM, GROUPS, BN)
            if ZERO == 1:
                acc -= sum_out * tl.load(w_zero + at, mask=in_n, other=0).to(tl.int32)
        total += acc.to(tl.float32) * tl.load(scale + at, mask=in_n, other=0.0).to(tl.float32)
        if ZERO == 2:
            total += sum_out.to(tl.float32) * tl.load(w_zero + at, mask=in_n, other=0.0).to(tl.float32)
    # 5. The scale of x, which is NaN where a column holds NaN; bias, one rounding.
    if MODE == TENSOR:
        if PAIRS:
            most = magnitude(largest.to(tl.float32))
        above = tl.max(tl.reshape(most, (BM, GROUPS, BC)), 2, keep_dims=True)
        s, _ = parameters(above, above, 0, given_scale, given_zero, MODE)
    bound = tl.where(in_n, n, N)  # channels of the next group have no bias here
    v = total * broadcast_groups(s, BM, GROUPS, BN)
    v = ended(v, p, bound, positions, N, bias, y, y, out_scale_number, out_zero_number, y, HAS_BIAS, OUT)
    p = p.to(tl.int64)
    y += p * N + n if LAST else (image * N + n) * size + inside
    tl.store(y, v, mask=in_p & in_n)
