"""Weights in groups of any even size as numbers: int4, int8, fp8 and 4-bit tables, row by row.

A row of codes lies as in PLAIN: one byte a code, or the code of an even column in the low nibble and that of the next
one in the high nibble. Scales and zero points are ``(N, G)``, so that neighbouring threads read neighbours. Both
columns of a byte lie in one group: its size is even, or there is one group. Everything is computed in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _numbers(
    code, rows, present, group, inside, scale, zero, table, groups,
    TABLE: tl.constexpr, OFFSET: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """The numbers of codes ``(BN, NG, GB)`` in groups ``group`` ``(NG,)``, of which a scale is read once for GB codes.

    ZERO: zero points, 0 none, 1 of an integer, 2 of a float, added after the scale. 0 where codes are not ``inside``.
    """
    at = rows[:, None] * groups + group[None, :]
    there = present[:, None] & (group < groups)[None, :]
    s = tl.load(scale + at, mask=there, other=0.0).to(tl.float32)[:, :, None]
    number = tl.load(table + code.to(tl.int32)) if TABLE else code.to(tl.float32) - OFFSET
    if ZERO == 1:
        number -= tl.load(zero + at, mask=there, other=0).to(tl.float32)[:, :, None]
    number *= s
    if ZERO == 2:
        number += tl.load(zero + at, mask=there, other=0.0).to(tl.float32)[:, :, None]
    return tl.where(inside, number, 0.0)


@triton.jit
def numbers(
    data, scale, zero, table, y, n, k, groups, pitch,
    GROUP: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr, OFFSET: tl.constexpr, ZERO: tl.constexpr,
    BN: tl.constexpr, NG: tl.constexpr, GB: tl.constexpr,
):  # fmt: skip
    """The weight ``(N, K)`` as numbers, rounded once to the dtype of y: NG groups of BN rows a program.

    GB bytes, a power of two, hold the ``GROUP * BITS / 8`` of a group.
    """
    PER: tl.constexpr = 8 // BITS
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    present = rows < n
    group, byte = tl.program_id(1) * NG + tl.arange(0, NG), tl.arange(0, GB)[None, :]
    column = group[:, None] * GROUP + byte * PER
    inside = present[:, None, None] & ((byte * PER < GROUP) & (column < k))[None, :, :]
    at = rows[:, None, None] * pitch + (group[:, None] * (GROUP // PER) + byte)[None, :, :]
    code = tl.load(data + at, mask=inside, other=0)
    low = code if BITS == 8 else code & 15
    w = _numbers(low, rows, present, group, inside, scale, zero, table, groups, TABLE, OFFSET, ZERO)
    w = w.to(y.dtype.element_ty)
    if BITS == 8:
        tl.store(y + rows[:, None, None] * k + column[None, :, :], w, mask=inside)
    else:
        high = _numbers(code >> 4, rows, present, group, inside, scale, zero, table, groups, TABLE, OFFSET, ZERO)
        both = tl.interleave(w, high.to(y.dtype.element_ty))
        inner = tl.arange(0, 2 * GB)[None, :]
        column = group[:, None] * GROUP + inner
        inside = present[:, None, None] & ((inner < GROUP) & (column < k))[None, :, :]
        tl.store(y + rows[:, None, None] * k + column[None, :, :], both, mask=inside)
