"""Per-thread PTX for `gemv`: wide loads, and the tensor core's m16n8k16 product, on one value per thread.

A one-dimensional tensor with as many elements as the program has threads holds one element per thread, in order:
element ``i`` belongs to lane ``i % 32`` of warp ``i // 32``. Elementwise inline assembly on them is ordinary SIMT code,
which reaches what Triton's block operations do not: weights go from memory to the registers of the tensor core in the
order in which they are stored, without shared memory.

The fragments of ``mma.m16n8k16`` (PTX ISA, "Matrix Fragments for mma.m16n8k16"), lane = 4 * r + t:
A (16 x 16): rows r and r + 8, columns 2t, 2t+1 and 2t+8, 2t+9; B (16 x 8): the same columns as its rows, column r;
C (16 x 8): rows r and r + 8, columns 2t and 2t + 1. Columns of A and rows of B are summed over, so any order of k does
as long as both use the same one.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit
def load_words(address, wanted, V: tl.constexpr):
    """Load V (1, 2 or 4) consecutive 32-bit words of a weight, read once, where ``wanted`` is not 0, else zeros."""
    if V == 4:
        out = tl.inline_asm_elementwise(
            """{ .reg .pred p; setp.ne.b32 p, $5, 0;
            mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
            @p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {$0, $1, $2, $3}, [$4]; }""",
            "=&r,=&r,=&r,=&r,l,r",
            [address, wanted],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    elif V == 2:
        out = tl.inline_asm_elementwise(
            """{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0;
            @p ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {$0, $1}, [$2]; }""",
            "=&r,=&r,l,r",
            [address, wanted],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        word = tl.inline_asm_elementwise(
            """{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0;
            @p ld.global.nc.L1::no_allocate.L2::128B.u32 $0, [$1]; }""",
            "=&r,l,r",
            [address, wanted],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        out = (word,)
    return out


@triton.jit
def load_pairs(address, wanted):
    """Load eight 16-bit values as four words where ``wanted`` is not 0, else zeros."""
    return tl.inline_asm_elementwise(
        """{ .reg .pred p; setp.ne.b32 p, $5, 0;
        mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
        @p ld.global.v4.u32 {$0, $1, $2, $3}, [$4]; }""",
        "=&r,=&r,=&r,=&r,l,r",
        [address, wanted],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_pair(address, wanted):
    """Load two 16-bit values as one word where ``wanted`` is not 0, else zeros."""
    return tl.inline_asm_elementwise(
        """{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.u32 $0, [$1]; }""",
        "=&r,l,r",
        [address, wanted],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def spread(nibbles, MAGIC: tl.constexpr):
    """Four small unsigned bytes to four 16-bit floats ``base + byte`` as two words, in order.

    MAGIC: the upper byte of the floats, repeated: 0x43 gives bfloat16 128 + b (b < 128), 0x64 gives float16 1024 + b.
    """
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x4140; prmt.b32 $1, $2, $3, 0x4342;",
        "=&r,=r,r,r",
        [nibbles, tl.full(nibbles.shape, MAGIC, tl.int32)],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, BF16: tl.constexpr):
    """``C += A @ B`` on fragments of m16n8k16: 16-bit floats in, float32 accumulated."""
    if BF16:
        d0, d1, d2, d3 = tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        d0, d1, d2, d3 = tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return d0, d1, d2, d3
