"""float32 as the sum of three bfloat16 numbers of 8 bits each, whose products with codes are exact in float32.

Grid of both kernels: (M, columns / B), a program per B columns of a row. Floor: the bytes of x and of the three terms
at the bandwidth of the memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qcore_triton.kernels.order import position_of

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

_MOST: tl.constexpr = tl.constexpr(3.3895313892515355e38)
"""The largest bfloat16."""


@triton.jit
def split(x, out, K, columns, row, step, plane, ARRANGED: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """``out[0] + out[1] + out[2] = x``, the smallest numbers first; infinity and NaN are in the last part only.

    x: float32 ``(M, K)``, ``row`` and ``step`` values from one row and column to the next; out: bfloat16
    ``(3, M, columns)``, zero from K on; plane: ``M * columns``. ARRANGED: columns are in the order in which `gemm`
    meets those of rows16. Program (m, j): columns ``j * B ..`` of row m.
    """
    if PDL:
        gdc_launch_dependents()
    m = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    k = position_of(at, 128 if ARRANGED else 0)
    if PDL:
        gdc_wait()
    v = tl.load(x + m * row + k.to(tl.int64) * step, mask=k < K, other=0.0)
    finite = (v.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    number = tl.where(finite, v, 0.0)
    # Values above the largest bfloat16 would become infinity; the other terms hold the excess.
    first = tl.minimum(tl.maximum(number, -_MOST), _MOST).to(tl.bfloat16)
    rest = number - first.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    to = out + m * columns + at
    plane = tl.cast(plane, tl.int64)
    tl.store(to, low, mask=at < columns)
    tl.store(to + plane, middle, mask=at < columns)
    tl.store(to + 2 * plane, tl.where(finite, first, v.to(tl.bfloat16)), mask=at < columns)


@triton.jit
def add(terms, bias, y, N, plane, BIAS: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """``y = terms[0] + terms[1] + terms[2] + bias``, rounded once: terms float32 ``(3, M, N)``; plane: ``M * N``.

    Program (m, j): columns ``j * B ..`` of row m.
    """
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(1) * B + tl.arange(0, B)
    at = terms + tl.program_id(0).to(tl.int64) * N + n
    plane = tl.cast(plane, tl.int64)
    if PDL:
        gdc_wait()
    v = tl.load(at, mask=n < N) + tl.load(at + plane, mask=n < N) + tl.load(at + 2 * plane, mask=n < N)
    if BIAS:
        v += tl.load(bias + n, mask=n < N).to(tl.float32)
    tl.store(y + tl.program_id(0).to(tl.int64) * N + n, v.to(y.dtype.element_ty), mask=n < N)
