"""Shared parts of the int8 products: nibbles as int8, the order of tiles, and the epilogue."""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import code

NO_ZERO: tl.constexpr = tl.constexpr(0)
INT_ZERO: tl.constexpr = tl.constexpr(1)
FLOAT_ZERO: tl.constexpr = tl.constexpr(2)

TO_FLOAT: tl.constexpr = tl.constexpr(0)
TO_INT8: tl.constexpr = tl.constexpr(1)
TO_INT8_TOKEN: tl.constexpr = tl.constexpr(2)


@triton.jit
def nibbles(raw, ASM: tl.constexpr):
    """planar16 bytes to two int8 tensors: ``16 * code`` of the low nibbles and of the high ones.

    A code u = q + 8 in the upper half of a byte, its top bit flipped, is 16 * q in two's complement: three instructions
    for eight weights.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $2, 4; lop3.b32 $0, t, 0xF0F0F0F0, 0x80808080, 0x6A;"
            " lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A; }",
            "=r,=r,r",
            [raw],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:  # noqa: RET505 - Triton compiles code after a constexpr branch
        low = ((raw << 4) ^ 0x80).to(tl.int8, bitcast=True)
        high = ((raw & 0xF0) ^ 0x80).to(tl.int8, bitcast=True)
        return low, high


@triton.jit
def chosen_nibble(raw, high):
    """``16 * code`` of the high nibble if ``high``, else of the low one."""
    return (tl.where(high, raw & 0xF0, raw << 4) ^ 0x80).to(tl.int8, bitcast=True)


@triton.jit
def tile_order(tile, rows, columns, GROUP_M: tl.constexpr):
    """Tile number to (row, column): bands of GROUP_M rows of tiles, column by column, to keep both operands in L2."""
    first = tile // columns // GROUP_M * GROUP_M
    height = tl.minimum(rows - first, GROUP_M)
    inside = tile - first * columns
    return first + inside % height, inside // height


@triton.jit
def finish(
    v,
    local,
    m,
    n,
    M,
    N,
    bias,
    out_scale,
    out_zero,
    out_scale_number,
    out_zero_number,
    y,
    HAS_BIAS: tl.constexpr,
    OUT: tl.constexpr,
):
    """Add the bias to v, round once and store. ``m``, ``n``: indices that broadcast to v; y starts at row m - local."""
    store(
        ended(v, m, n, M, N, bias, out_scale, out_zero, out_scale_number, out_zero_number, y, HAS_BIAS, OUT),
        local,
        m,
        n,
        M,
        N,
        y,
    )


@triton.jit
def ended(
    v,
    m,
    n,
    M,
    N,
    bias,
    out_scale,
    out_zero,
    out_scale_number,
    out_zero_number,
    y,
    HAS_BIAS: tl.constexpr,
    OUT: tl.constexpr,
):
    """V plus bias in the dtype of y: rounded once, or int8 codes."""
    if HAS_BIAS:
        v += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if OUT == TO_INT8:
        s = tl.cast(out_scale_number, tl.float32)
        return code(v, s, tl.div_rn(1.0, s), tl.cast(out_zero_number, tl.float32))
    if OUT == TO_INT8_TOKEN:
        s = tl.load(out_scale + m, mask=m < M, other=1.0).to(tl.float32)
        z = tl.load(out_zero + m, mask=m < M, other=0).to(tl.float32)
        return code(v, s, tl.div_rn(1.0, s), z)
    return v.to(y.dtype.element_ty)


@triton.jit
def store(v, local, m, n, M, N, y):
    """Write v to ``y[local, n]``."""
    tl.store(y + local * N + n, v, mask=(m < M) & (n < N))
