"""``dequantize``: a packed weight as a dense matrix, each value computed in float32 and rounded once.

Grid: (N / BN, blocks of K): BN rows of one block of P columns per program. Input: w planar16 or rows16. Floor: the
bytes of the packed and of the dense weight at the bandwidth of the memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit(do_not_specialize=["N", "K", "KB", "GROUP"])
def dequantize(w, scale, zero, out, N, K, KB, GROUP, BITS: tl.constexpr, P: tl.constexpr, ZERO: tl.constexpr,
               BN: tl.constexpr):  # fmt: skip
    """``out[n, k] = (q - z) * s`` or ``q * s + z``: rows BN of one block of P columns; BN divides 16."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    block = tl.program_id(1)
    at = (block * P // GROUP) * N + tl.minimum(n, N - 1)
    s = tl.load(scale + at).to(tl.float32)[:, None]
    if BITS == 4:
        H: tl.constexpr = P // 2
        V: tl.constexpr = P // 32
        i = tl.arange(0, H)
        tile = (n // 16).to(tl.int64)[:, None] * (KB * (16 * H)) + block.to(tl.int64) * (16 * H)
        b = tl.load(w + tile + ((n % 16) * H)[:, None] + i[None, :])
        # From the order of the tensor core's registers to that of the columns, see `packing`.
        b = tl.reshape(tl.trans(tl.reshape(b, [BN, 4, V, 2, 2]), 0, 2, 3, 1, 4), [BN, H])
        low = (b & 15).to(tl.float32) - 8.0
        high = (b >> 4).to(tl.float32) - 8.0
        q = tl.reshape(tl.trans(tl.join(low, high), 0, 2, 1), [BN, P])
    else:
        i = tl.arange(0, P)
        q = tl.load(w + n.to(tl.int64)[:, None] * (KB * P) + (block * P + i)[None, :]).to(tl.float32)
    if ZERO == 1:
        q -= tl.load(zero + at).to(tl.float32)[:, None]
    value = q * s
    if ZERO == 2:
        value += tl.load(zero + at).to(tl.float32)[:, None]
    k = block * P + tl.arange(0, P)
    where = n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(out + where, value.to(out.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])
