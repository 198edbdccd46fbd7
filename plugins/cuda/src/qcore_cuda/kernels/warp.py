"""Per-thread PTX for `gemv` and `int8_gemv`: codes as operands, and the tensor core's products.

A one-dimensional tensor with as many elements as the program has threads holds one element per thread, in order:
element ``i`` belongs to lane ``i % 32`` of warp ``i // 32``. Elementwise inline assembly on them is ordinary SIMT code
and does what Triton's block operations cannot: weights become fragments of the tensor core in the order in which they
are stored, without an exchange between threads.

The fragments of ``mma.m16n8k16`` (PTX ISA, "Matrix Fragments for mma.m16n8k16"), lane = 4 * r + t:
A (16 x 16): rows r and r + 8, columns 2t, 2t+1 and 2t+8, 2t+9; B (16 x 8): the same columns as its rows, column r;
C (16 x 8): rows r and r + 8, columns 2t and 2t + 1. Columns of A and rows of B are summed over, so any order of k does
as long as both use the same one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tables import bytes_asm, nibbles_asm

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit
def load_quad(address, wanted):
    """Four consecutive words from memory if ``wanted`` is not 0, else zeros."""
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
def both(word, DTYPE: tl.constexpr):
    """The two 16-bit floats of a word, in float32."""
    if tl.bfloat16 == DTYPE:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    else:
        low = (word & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def spread(nibbles, taken, BF16: tl.constexpr):
    """Four bytes of unsigned nibbles ``q + 8`` to four 16-bit floats ``q - zero`` as two words, in order; exact.

    Setting the upper byte of the float makes bfloat16 128 + u and float16 1024 + u. taken: `taken_of` the zero point.
    """
    low, high = tl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x4140; prmt.b32 $1, $2, $3, 0x4342;",
        "=&r,=r,r,r",
        [nibbles, tl.full(nibbles.shape, 0x43434343 if BF16 else 0x64646464, tl.int32)],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    return _less(low, taken, BF16), _less(high, taken, BF16)


@triton.jit
def taken_of(zero, BF16: tl.constexpr):
    """Minus ``136 + zero`` as a bfloat16 twice in a word, or minus ``1032 + zero`` as a float16; zero in -8..7."""
    return (zero + (0xC308 if BF16 else 0xE408)) * 0x10001


@triton.jit
def _less(word, taken, BF16: tl.constexpr):
    """Two 16-bit floats plus those of ``taken``."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2; }"
        if BF16
        else "add.rn.f16x2 $0, $1, $2;",
        "=r,r,r",
        [word, taken],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def codes8(word, BF16: tl.constexpr):
    """Four signed bytes as two words of 16-bit floats, in order.

    bfloat16 has too few digits for 128 + u: the lower seven bits become 128 + l, and the sign bit makes -128 or -256
    of the summand.
    """
    # 1. Split off the sign bits (bfloat16), or flip them: u = q + 128 (float16).
    # 2. ``prmt`` sets the upper bytes: 128 + l, and -128 or -256 for the sign; or 1024 + u.
    # 3. One addition leaves the code: l or l - 128; or 1024 + u - 1152.
    if BF16:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 l, h, l0, l1, h0, h1, one; mov.b32 one, 0x3F803F80;
            and.b32 l, $2, 0x7F7F7F7F; and.b32 h, $2, 0x80808080;
            prmt.b32 l0, l, 0x43434343, 0x4140; prmt.b32 l1, l, 0x43434343, 0x4342;
            prmt.b32 h0, h, 0xC3C3C3C3, 0x4140; prmt.b32 h1, h, 0xC3C3C3C3, 0x4342;
            fma.rn.bf16x2 $0, l0, one, h0; fma.rn.bf16x2 $1, l1, one, h1; }""",
            "=&r,=r,r",
            [word],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 u, u0, u1, off; mov.b32 off, 0xE480E480; xor.b32 u, $2, 0x80808080;
            prmt.b32 u0, u, 0x64646464, 0x4140; prmt.b32 u1, u, 0x64646464, 0x4342;
            add.rn.f16x2 $0, u0, off; add.rn.f16x2 $1, u1, off; }""",
            "=&r,=r,r",
            [word],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    return low, high


@triton.jit
def table4(word, ELEMENT: tl.constexpr, BF16: tl.constexpr):
    """Four bytes of nibbles to four words of two 16-bit floats: the low nibbles in order, then the high ones."""
    TEXT: tl.constexpr = nibbles_asm(ELEMENT, not BF16)
    return tl.inline_asm_elementwise(
        TEXT,
        "=&r,=&r,=&r,=&r,r",
        [word],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def table8(word, ELEMENT: tl.constexpr, BF16: tl.constexpr):
    """Four bytes to two words of two 16-bit floats, in order."""
    TEXT: tl.constexpr = bytes_asm(ELEMENT, not BF16)
    return tl.inline_asm_elementwise(TEXT, "=&r,=&r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)


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


@triton.jit
def nibbles16(word):
    """Four bytes of unsigned nibbles ``q + 8`` as two words of int8 ``16 * q``: of the low nibbles, of the high ones.

    A code in the upper half of a byte, its top bit flipped, is 16 * q in two's complement.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; shl.b32 t, $2, 4; lop3.b32 $0, t, 0xF0F0F0F0, 0x80808080, 0x6A;"
        " lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A; }",
        "=&r,=r,r",
        [word],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def mma8(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """``C += A @ B`` on fragments of m16n8k32: int8 in, int32 accumulated.

    As `mma`, but that lane 4 r + t holds columns 4t to 4t + 3 and 4t + 16 to 4t + 19 of A.
    """
    return tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
        [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
