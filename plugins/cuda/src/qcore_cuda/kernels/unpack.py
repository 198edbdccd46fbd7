"""Codes and scales as floats inside tile kernels, with and without inline assembly."""

from __future__ import annotations

import triton
import triton.language as tl

from qcore_triton.kernels.elements import decoded, scale_value

from .tables import bytes_asm, nibbles_asm

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit
def _unpack_bf16(b, taken):
    """bf16 ``0x4300 | u`` is 128 + u; one fused multiply-add subtracts 128 + taken (bf16x2 subtraction needs sm_90).

    taken: twice in 32 bits; two bytes that follow each other are of one row.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 p0, p1, u0, u1, u2, u3, o0, o1, one;
        mov.b32 one, 0x3F803F80; or.b32 o0, $5, 0xC300C300; or.b32 o1, $7, 0xC300C300;
        and.b32 p0, $4, 0x0F0F0F0F; shr.u32 p1, $4, 4; and.b32 p1, p1, 0x0F0F0F0F;
        prmt.b32 u0, p0, 0x43434343, 0x4140; prmt.b32 u1, p0, 0x43434343, 0x4342;
        prmt.b32 u2, p1, 0x43434343, 0x4140; prmt.b32 u3, p1, 0x43434343, 0x4342;
        fma.rn.bf16x2 $0, u0, one, o0; fma.rn.bf16x2 $1, u1, one, o1;
        fma.rn.bf16x2 $2, u2, one, o0; fma.rn.bf16x2 $3, u3, one, o1; }""",
        "=&r,=&r,=&r,=r,r,r,r,r,r",
        [b, taken],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _unpack_fp16(b, taken):
    """fp16 ``0x6400 | u`` is 1024 + u, from which 1024 + taken is subtracted."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 p0, p1, u0, u1, u2, u3, o0, o1;
        or.b32 o0, $5, 0x64006400; or.b32 o1, $7, 0x64006400;
        and.b32 p0, $4, 0x0F0F0F0F; shr.u32 p1, $4, 4; and.b32 p1, p1, 0x0F0F0F0F;
        prmt.b32 u0, p0, 0x64646464, 0x4140; prmt.b32 u1, p0, 0x64646464, 0x4342;
        prmt.b32 u2, p1, 0x64646464, 0x4140; prmt.b32 u3, p1, 0x64646464, 0x4342;
        sub.f16x2 $0, u0, o0; sub.f16x2 $1, u1, o1; sub.f16x2 $2, u2, o0; sub.f16x2 $3, u3, o1; }""",
        "=&r,=&r,=&r,=r,r,r,r,r,r",
        [b, taken],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _nibbles_bf16(b, ELEMENT: tl.constexpr):
    """Nibbles of a table, low and high, as bf16."""
    return tl.inline_asm_elementwise(
        nibbles_asm(ELEMENT, False),
        "=&r,=&r,=&r,=&r,r",
        [b],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _nibbles_fp16(b, ELEMENT: tl.constexpr):
    """Nibbles of a table, low and high, as fp16."""
    return tl.inline_asm_elementwise(
        nibbles_asm(ELEMENT, True),
        "=&r,=&r,=&r,=&r,r",
        [b],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _table_bf16(b, ELEMENT: tl.constexpr):
    """Bytes of a table as bf16."""
    return tl.inline_asm_elementwise(
        bytes_asm(ELEMENT, False), "=&r,=&r,r", [b], dtype=tl.bfloat16, is_pure=True, pack=4
    )


@triton.jit
def _table_fp16(b, ELEMENT: tl.constexpr):
    """Bytes of a table as fp16."""
    return tl.inline_asm_elementwise(bytes_asm(ELEMENT, True), "=&r,=&r,r", [b], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def unpack_nibbles(b, zero, ELEMENT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Bytes of unsigned nibbles ``q + 8`` to (low, high) codes ``q - zero`` as DTYPE, order kept.

    zero: an integer in -8..7, of rows or one for all. Of other elements, the numbers that codes stand for.
    """
    if ELEMENT != "int" and ASM:
        low, high = _nibbles_bf16(b, ELEMENT) if tl.bfloat16 == DTYPE else _nibbles_fp16(b, ELEMENT)
    elif ELEMENT != "int":
        low = decoded(b & 0xF, ELEMENT, tl.bfloat16 == DTYPE).to(DTYPE)
        high = decoded(b >> 4, ELEMENT, tl.bfloat16 == DTYPE).to(DTYPE)
    elif ASM:
        taken = tl.zeros(b.shape, tl.int32) + (zero.to(tl.int32) + 8) * 0x10001
        if tl.bfloat16 == DTYPE:
            low, high = _unpack_bf16(b, taken)
        else:
            low, high = _unpack_fp16(b, taken)
    else:
        taken = zero.to(tl.int8) + 8
        low = ((b & 0xF).to(tl.int8) - taken).to(DTYPE)
        high = ((b >> 4).to(tl.int8) - taken).to(DTYPE)
    return low, high


@triton.jit
def _bytes_bf16(b):
    """bf16 ``0x4300 | v`` is 128 + v for 7 bits v; 128 or 256 is subtracted: the sign bit is the last bit of that."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 u0, u1, v0, v1, s0, s1, one;
        mov.b32 one, 0x3F803F80;
        prmt.b32 u0, $2, 0x43434343, 0x4140; prmt.b32 u1, $2, 0x43434343, 0x4342;
        and.b32 v0, u0, 0xFF7FFF7F; and.b32 v1, u1, 0xFF7FFF7F;
        lop3.b32 s0, u0, 0xFF80FF80, 0x80008000, 0xEA; lop3.b32 s1, u1, 0xFF80FF80, 0x80008000, 0xEA;
        fma.rn.bf16x2 $0, v0, one, s0; fma.rn.bf16x2 $1, v1, one, s1; }""",
        "=&r,=&r,r",
        [b],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _bytes_fp16(b):
    """fp16 ``0x6400 | u`` is 1024 + u, u = q + 128; 1152 is subtracted."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 u, u0, u1, off;
        mov.b32 off, 0x64806480; xor.b32 u, $2, 0x80808080;
        prmt.b32 u0, u, 0x64646464, 0x4140; prmt.b32 u1, u, 0x64646464, 0x4342;
        sub.f16x2 $0, u0, off; sub.f16x2 $1, u1, off; }""",
        "=&r,=&r,r",
        [b],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def unpack_bytes(b, ELEMENT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Signed bytes, or the numbers that bytes of another element stand for, as DTYPE, order kept."""
    if ELEMENT != "int" and ASM:
        q = _table_bf16(b, ELEMENT) if tl.bfloat16 == DTYPE else _table_fp16(b, ELEMENT)
    elif ELEMENT != "int":
        q = decoded(b, ELEMENT).to(DTYPE)
    elif ASM and tl.bfloat16 == DTYPE:
        q = _bytes_bf16(b)
    elif ASM and tl.float16 == DTYPE:
        q = _bytes_fp16(b)
    else:
        q = b.to(DTYPE)
    return q


@triton.jit
def load_raw(pointer, ASM: tl.constexpr):
    """Load a vector of scales or zero points, 1, 2 or 4 bytes each, for `as_float`.

    Triton would load it in an order made for wide accesses and rearrange it through shared memory, with a barrier, each
    time; it leaves inline assembly in the order in which the values are used. Relaxed, such a load stays before the
    barrier that follows it; and 32 bits of raw register can be handed on before they have arrived.
    """
    if ASM:
        WIDTH: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth
        code: tl.constexpr = (
            "ld.relaxed.cta.global.u8 $0, [$1];"
            if pointer.dtype.element_ty == tl.uint8
            else "ld.relaxed.cta.global.s8 $0, [$1];"
            if WIDTH == 8
            else "ld.relaxed.cta.global.u16 $0, [$1];"
            if WIDTH == 16
            else "ld.relaxed.cta.global.b32 $0, [$1];"
        )
        value = tl.inline_asm_elementwise(code, "=r,l", [pointer], dtype=tl.int32, is_pure=False, pack=1)
    else:
        value = tl.load(pointer)
    return value


@triton.jit
def as_float(raw, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """A value of `load_raw`, loaded through a pointer to DTYPE, as float32."""
    if not ASM or tl.int8 == DTYPE:
        value = raw.to(tl.float32)
    elif tl.bfloat16 == DTYPE:
        value = (raw << 16).to(tl.float32, bitcast=True)
    elif tl.float16 == DTYPE:
        value = raw.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = raw.to(tl.float32, bitcast=True)
    return value


@triton.jit
def scale_of(raw, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """A scale of `load_raw`, loaded through a pointer to DTYPE, as float32."""
    return scale_value(raw, DTYPE) if DTYPE.primitive_bitwidth == 8 else as_float(raw, DTYPE, ASM)
