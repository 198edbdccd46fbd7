"""Sums of the parts that `gemm` leaves when K is split among programs; a fixed order, so the same bits every time."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit(do_not_specialize=["size", "N"])
def sum_parts(parts, bias, y, size, N, split: tl.constexpr, BIAS: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """``y = sum of parts[s] + bias``: parts float32 ``(split, M, N)``, size = M * N."""
    if PDL:
        gdc_launch_dependents()
    at = tl.program_id(0) * B + tl.arange(0, B)
    valid = at < size
    if PDL:
        gdc_wait()
    total = tl.zeros([B], tl.float32)
    for s in tl.static_range(split):
        total += tl.load(parts + tl.cast(size, tl.int64) * s + at, mask=valid, other=0.0)
    if BIAS:
        total += tl.load(bias + at % N, mask=valid, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=valid)
