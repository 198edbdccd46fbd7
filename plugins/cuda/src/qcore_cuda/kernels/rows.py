"""``copy_rows``: a matrix with other strides, and with more columns or fewer; ``sum_rows``: the sums of its rows.

Grid: (M, columns / B), B columns of one row per program, and (M), a row per program. Floor: the bytes of the matrices
at the bandwidth of the memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"


@triton.jit(do_not_specialize=["K"])
def copy_rows(x, y, K, columns, row_stride, column_stride, B: tl.constexpr, PDL: tl.constexpr):
    """Y ``(M, columns)``, contiguous: the first K columns of x, 0 behind them."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    v = tl.load(x + row * row_stride + at.to(tl.int64) * column_stride, mask=at < K, other=0.0)
    tl.store(y + row * columns + at, v, mask=at < columns)


@triton.jit(do_not_specialize=["K"])
def sum_rows(x, sums, K, row_stride, B: tl.constexpr, PDL: tl.constexpr):
    """Sums, float32 ``(M,)``, of the K columns of x, which are contiguous."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, B)
    parts = tl.zeros([B], tl.float32)
    for first in range(0, K, B):
        parts += tl.load(x + row * row_stride + first + at, mask=first + at < K, other=0.0).to(tl.float32)
    tl.store(sums + row, tl.sum(parts))
