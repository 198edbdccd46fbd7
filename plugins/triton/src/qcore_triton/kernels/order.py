"""The order of columns inside a block of planar16, see `packing`: with int4 weights, codes of x follow it."""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit
def column_of(position, P: tl.constexpr):
    """The column stored at a position, for blocks of P columns; P = 0: the position itself."""
    if P == 0:
        column = position
    else:
        V: tl.constexpr = P // 32
        at = position % (P // 2)
        t = at // (4 * V)
        inside = 16 * (at // 4 % V) + 8 * (at // 2 % 2) + 2 * t + at % 2
        column = position - at + inside
    return column


@triton.jit
def arranged(values, P: tl.constexpr):
    """Values of consecutive columns, rearranged by position, see `column_of`."""
    if P != 0:
        SIZE: tl.constexpr = values.shape[0]
        V: tl.constexpr = P // 32
        by_column = tl.reshape(values, [SIZE // (16 * V), V, 2, 4, 2])
        values = tl.reshape(tl.permute(by_column, (0, 3, 1, 2, 4)), [SIZE])
    return values


@triton.jit
def position_of(column, P: tl.constexpr):
    """The inverse of `column_of`."""
    if P == 0:
        position = column
    else:
        V: tl.constexpr = P // 32
        at = column % (P // 2)
        inside = 4 * V * (at // 2 % 4) + 4 * (at // 16) + 2 * (at // 8 % 2) + at % 2
        position = column - at + inside
    return position
