"""Unsigned nibbles to signed 16-bit floats inside tile kernels, with and without inline assembly."""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit
def _unpack_bf16(b):
    """bf16 ``0x4300 | u`` is 128 + u; one fused multiply-add takes 136 away (bf16x2 subtraction needs sm_90)."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 p0, p1, q0, q1, u0, u1, u2, u3, one, off;
        mov.b32 one, 0x3F803F80; mov.b32 off, 0xC308C308;
        and.b32 p0, $4, 0x0F0F0F0F; shr.u32 p1, $4, 4; and.b32 p1, p1, 0x0F0F0F0F;
        prmt.b32 u0, p0, 0x43434343, 0x4140; prmt.b32 u1, p0, 0x43434343, 0x4342;
        prmt.b32 u2, p1, 0x43434343, 0x4140; prmt.b32 u3, p1, 0x43434343, 0x4342;
        fma.rn.bf16x2 $0, u0, one, off; fma.rn.bf16x2 $1, u1, one, off;
        fma.rn.bf16x2 $2, u2, one, off; fma.rn.bf16x2 $3, u3, one, off; }""",
        "=&r,=&r,=&r,=r,r",
        [b],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _unpack_fp16(b):
    """fp16 ``0x6400 | u`` is 1024 + u; 1032 is taken away."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 p0, p1, u0, u1, u2, u3, off;
        mov.b32 off, 0x64086408;
        and.b32 p0, $4, 0x0F0F0F0F; shr.u32 p1, $4, 4; and.b32 p1, p1, 0x0F0F0F0F;
        prmt.b32 u0, p0, 0x64646464, 0x4140; prmt.b32 u1, p0, 0x64646464, 0x4342;
        prmt.b32 u2, p1, 0x64646464, 0x4140; prmt.b32 u3, p1, 0x64646464, 0x4342;
        sub.f16x2 $0, u0, off; sub.f16x2 $1, u1, off; sub.f16x2 $2, u2, off; sub.f16x2 $3, u3, off; }""",
        "=&r,=&r,=&r,=r,r",
        [b],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def unpack_nibbles(b, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Bytes of unsigned nibbles ``q + 8`` to (low, high) codes ``q`` as DTYPE, order kept."""
    if ASM and tl.bfloat16 == DTYPE:
        low, high = _unpack_bf16(b)
    elif ASM and tl.float16 == DTYPE:
        low, high = _unpack_fp16(b)
    else:
        low = ((b & 0xF).to(tl.int8) - 8).to(DTYPE)
        high = ((b >> 4).to(tl.int8) - 8).to(DTYPE)
    return low, high


@triton.jit
def load_early(pointer, ASM: tl.constexpr):
    """Load a vector of scales or zero points (1, 2 or 4 bytes each) that is carried to the next iteration.

    Triton would load it in an order made for wide accesses and rearrange it through shared memory, with a barrier, each
    time; it leaves inline assembly in the order in which the values are used.
    """
    DT: tl.constexpr = pointer.dtype.element_ty
    if ASM and DT.primitive_bitwidth == 16:
        bits = tl.inline_asm_elementwise(
            "ld.global.nc.u16 $0, [$1];", "=h,l", [pointer], dtype=tl.int16, is_pure=True, pack=1
        )
        value = bits.to(DT, bitcast=True)
    elif ASM and DT.primitive_bitwidth == 32:
        bits = tl.inline_asm_elementwise(
            "ld.global.nc.u32 $0, [$1];", "=r,l", [pointer], dtype=tl.int32, is_pure=True, pack=1
        )
        value = bits.to(DT, bitcast=True)
    else:
        value = tl.load(pointer)
    return value
