"""``dequantize``: a packed weight as a dense matrix, each value computed in float32 and rounded once.

Grid: (N / BN, blocks of K): BN rows of one block of P columns per program. Input: w planar16 or rows16. Floor: the
bytes of the packed and of the dense weight at the bandwidth of the memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elements import byte_value, factor_of, nibble_value, pitch_of, scale_value

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit(do_not_specialize=["N", "K", "KB", "GROUP"])
def dequantize(w, scale, zero, factor, out, N, K, KB, GROUP, BITS: tl.constexpr, P: tl.constexpr, ZERO: tl.constexpr,
               SCALED: tl.constexpr, BN: tl.constexpr, ELEMENT: tl.constexpr, FACTOR: tl.constexpr,
               HALVES: tl.constexpr):  # fmt: skip
    """``out[n, k] = (q - z) * s`` or ``q * s + z``: rows BN of one block of P columns; BN divides 16.

    HALVES: a block has two groups, and no zero points. FACTOR: see `Weight.factor`. Without SCALED, unscaled.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    block = tl.program_id(1)
    rows = tl.minimum(n, N - 1)
    at = (block * P // GROUP) * pitch_of(N) + rows
    if HALVES:
        group = tl.minimum(block * 2 + tl.arange(0, P) // (P // 2), (K - 1) // GROUP)
        s = scale_value(tl.load(scale + (group[None, :] * pitch_of(N) + rows[:, None])), scale.dtype.element_ty)
    else:
        s = scale_value(tl.load(scale + at), scale.dtype.element_ty)[:, None]
    s *= factor_of(factor, FACTOR)
    if BITS == 4:
        H: tl.constexpr = P // 2
        V: tl.constexpr = P // 32
        i = tl.arange(0, H)
        tile = (n // 16).to(tl.int64)[:, None] * (KB * (16 * H)) + block.to(tl.int64) * (16 * H)
        b = tl.load(w + tile + ((n % 16) * H)[:, None] + i[None, :])
        # From the order of the tensor core's registers to that of the columns, see `packing`.
        b = tl.reshape(tl.trans(tl.reshape(b, [BN, 4, V, 2, 2]), 0, 2, 3, 1, 4), [BN, H])
        low = nibble_value(b & 15, ELEMENT)
        high = nibble_value(b >> 4, ELEMENT)
        q = tl.reshape(tl.trans(tl.join(low, high), 0, 2, 1), [BN, P])
    else:
        i = tl.arange(0, P)
        q = byte_value(tl.load(w + n.to(tl.int64)[:, None] * (KB * P) + (block * P + i)[None, :]), ELEMENT)
    if ZERO == 1:
        q -= tl.load(zero + at).to(tl.float32)[:, None]
    value = q * s if SCALED else q
    if ZERO == 2:
        value += tl.load(zero + at).to(tl.float32)[:, None]
    k = block * P + tl.arange(0, P)
    where = n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(out + where, value.to(out.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])
