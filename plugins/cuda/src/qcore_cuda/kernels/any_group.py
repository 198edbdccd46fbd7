"""Weights in groups of any even size: int4 pairs, int8, fp8 and 4-bit tables, row by row. Float activations.

A row of codes lies as in PLAIN: one byte a code, or the code of an even column in the low nibble and that of the next one
in the high nibble. Scales and zero points are ``(N, G)``, so that neighbouring threads read neighbours. Both columns of a
byte lie in one group, which is why its size has to be even. Everything is computed in float32.
"""

# ruff: noqa: N803 - constexprs are upper case, as in Triton's own code
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _number(code, table, TABLE: tl.constexpr, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """What codes stand for, before scale and zero point."""
    if TABLE:
        return tl.load(table + code.to(tl.int32))
    return code.to(tl.float32) - OFFSET


@triton.jit
def _scaled(number, at, scale, zero, inside, ZERO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of codes times their scale; ZERO: 0 none, 1 of an integer, 2 of a float, added after the scale."""
    s = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
    if ZERO == 1:
        return (number - tl.load(zero + at, mask=inside, other=0).to(tl.float32)) * s
    if ZERO == 2:
        return number * s + tl.load(zero + at, mask=inside, other=0.0).to(tl.float32)
    return number * s


@triton.jit
def few(  # type: ignore[no-untyped-def]
    x, data, scale, zero, table, bias, y, n, k, groups, pitch, x_pitch,
    M: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr, OFFSET: tl.constexpr,
    ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """M rows of x, 1 to 8, times BN rows of the weight: products in float32, summed over a program's threads at the end."""
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    present = rows < n
    lanes = tl.arange(0, BK)
    sums = tl.zeros((M, BN, BK), tl.float32)
    each = tl.arange(0, M)
    for start in range(0, k, BK * 8 // BITS):
        # 1. BK bytes of each row of the weight, and the scales of their groups.
        column = start + lanes * (8 // BITS)
        inside = present[:, None] & (column < k)[None, :]
        code = tl.load(data + rows[:, None] * pitch + (start * BITS // 8 + lanes)[None, :], mask=inside, other=0)
        at = rows[:, None] * groups + (column // GROUP)[None, :]
        low = code if BITS == 8 else code & 15
        w = _scaled(_number(low, table, TABLE, OFFSET), at, scale, zero, inside, ZERO)
        # 2. Their products with the columns of all rows of x.
        here = each[:, None] * x_pitch + column[None, :]
        v = tl.load(x + here, mask=(column < k)[None, :], other=0.0).to(tl.float32)
        sums += tl.where(inside, w, 0.0)[None, :, :] * v[:, None, :]
        if BITS == 4:
            w = _scaled(_number(code >> 4, table, TABLE, OFFSET), at, scale, zero, inside, ZERO)
            second = (column + 1 < k)[None, :]
            v = tl.load(x + here + 1, mask=second, other=0.0).to(tl.float32)
            sums += tl.where(inside & second, w, 0.0)[None, :, :] * v[:, None, :]
    total = tl.sum(sums, 2)
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=present, other=0.0).to(tl.float32)[None, :]
    tl.store(y + each[:, None] * n + rows[None, :], total.to(y.dtype.element_ty), mask=present[None, :])


@triton.jit
def tiles(  # type: ignore[no-untyped-def]
    x, data, scale, zero, table, bias, y, m, n, k, groups, pitch, x_pitch,
    GROUP: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr, OFFSET: tl.constexpr, ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BM rows of 16-bit x times BN rows of the weight, whose numbers are rounded to the dtype of x, on tensor cores.

    WIDE: float32 products, for Triton's interpreter, which has none of bfloat16.
    """
    DT: tl.constexpr = tl.float32 if WIDE else x.dtype.element_ty
    tokens = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    rows = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    present, wanted = rows < n, tokens < m
    lanes = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK * 8 // BITS):
        column = start + lanes * (8 // BITS)
        inside = present[:, None] & (column < k)[None, :]
        code = tl.load(data + rows[:, None] * pitch + (start * BITS // 8 + lanes)[None, :], mask=inside, other=0)
        at = rows[:, None] * groups + (column // GROUP)[None, :]
        low = code if BITS == 8 else code & 15
        w = _scaled(_number(low, table, TABLE, OFFSET), at, scale, zero, inside, ZERO)
        here = x + tokens[:, None] * x_pitch + column[None, :]
        v = tl.load(here, mask=wanted[:, None] & (column < k)[None, :], other=0.0).to(DT)
        acc = tl.dot(v, tl.trans(tl.where(inside, w, 0.0).to(DT)), acc)
        if BITS == 4:  # even columns first, then odd ones: no shuffles between both halves of a byte
            w = _scaled(_number(code >> 4, table, TABLE, OFFSET), at, scale, zero, inside, ZERO)
            second = (column + 1 < k)[None, :]
            v = tl.load(here + 1, mask=wanted[:, None] & second, other=0.0).to(DT)
            acc = tl.dot(v, tl.trans(tl.where(inside & second, w, 0.0).to(DT)), acc)
    if HAS_BIAS:
        acc += tl.load(bias + rows, mask=present, other=0.0).to(tl.float32)[None, :]
    inside = wanted[:, None] & present[None, :]
    tl.store(y + tokens[:, None] * n + rows[None, :], acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def numbers(  # type: ignore[no-untyped-def]
    data, scale, zero, table, y, n, k, groups, pitch,
    GROUP: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr, OFFSET: tl.constexpr, ZERO: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The weight ``(N, K)`` as numbers, rounded once to the dtype of y."""
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    byte = tl.program_id(1) * BK + tl.arange(0, BK)
    column = byte * (8 // BITS)
    inside = (rows < n)[:, None] & (column < k)[None, :]
    code = tl.load(data + rows[:, None] * pitch + byte[None, :], mask=inside, other=0)
    at = rows[:, None] * groups + (column // GROUP)[None, :]
    low = code if BITS == 8 else code & 15
    w = _scaled(_number(low, table, TABLE, OFFSET), at, scale, zero, inside, ZERO).to(y.dtype.element_ty)
    if BITS == 8:
        tl.store(y + rows[:, None] * k + column[None, :], w, mask=inside)
    else:
        high = _scaled(_number(code >> 4, table, TABLE, OFFSET), at, scale, zero, inside, ZERO).to(y.dtype.element_ty)
        both = tl.interleave(w, high)
        columns = tl.program_id(1) * 2 * BK + tl.arange(0, 2 * BK)
        tl.store(y + rows[:, None] * k + columns[None, :], both, mask=(rows < n)[:, None] & (columns < k)[None, :])
