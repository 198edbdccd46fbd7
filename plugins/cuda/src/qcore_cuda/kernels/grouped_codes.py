"""``centred_codes``: int8 activations as bfloat16 whole numbers ``q - zero``, which is exact, with one scale per row.

Products of several experts multiply them like floats: products of codes are whole numbers, too.

Grid: one program per row, which holds BLOCK columns at a time. Floor: the bytes of x and twice those of its codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qcore_triton.kernels.order import column_of
from qcore_triton.kernels.quantize import SYMMETRIC, encode, extent, inverse_of, parameters
from qcore_triton.kernels.rounding import begin

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit(do_not_specialize=["given_scale", "given_zero"])
def centred_codes(x, q, scale, K, KQ, row_stride, column_stride, given_scale, given_zero, MODE: tl.constexpr,
                  CODES: tl.constexpr, BLOCK: tl.constexpr, LOOP: tl.constexpr, ORDER: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """Codes less their zero point, ``(T, KQ)``, 0 from K on, and float32 scales ``(T,)``.

    MODE, CODES: as in `qcore_triton.kernels.quantize`; parameters that are given are numbers. LOOP: K exceeds BLOCK,
    and x is read twice. ORDER: 128 puts columns in the order in which `gemm` meets those of rows16, else 0.
    """
    row = tl.program_id(0)
    o = tl.arange(0, BLOCK)
    NARROW: tl.constexpr = MODE == SYMMETRIC and x.dtype.element_ty == tl.bfloat16
    x += row.to(tl.int64) * row_stride
    q += row.to(tl.int64) * KQ
    begin(PDL)
    # 1. The extent of the row.
    most_below = tl.zeros((BLOCK,), tl.int32)
    most_above = tl.zeros((BLOCK,), tl.int32)
    v = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K if LOOP else 1, BLOCK):
        at = start + o
        v = tl.load(x + at.to(tl.int64) * column_stride, mask=at < K, other=0.0).to(tl.float32)
        below, above = extent(v, MODE)
        most_below = tl.maximum(most_below, below)
        most_above = tl.maximum(most_above, above)
    above = tl.max(most_above, 0)
    s, z = parameters(tl.max(most_below, 0), above, row, given_scale, given_zero, MODE)
    inverse = inverse_of(s, above, NARROW)
    # 2. Codes, whose differences to a zero point, at most 255, are exact in bfloat16.
    for start in range(0, KQ if LOOP else 1, BLOCK):
        at = start + o
        if LOOP:
            v = tl.load(x + at.to(tl.int64) * column_stride, mask=at < K, other=0.0).to(tl.float32)
        c = encode(v, s, inverse, z, MODE, CODES, NARROW).to(tl.float32) - z
        tl.store(q + column_of(at, ORDER), tl.where(at < K, c, 0.0).to(q.dtype.element_ty), mask=at < KQ)
    tl.store(scale + row, s)
