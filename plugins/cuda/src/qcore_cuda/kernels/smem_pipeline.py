"""Per-thread PTX that keeps copies from memory in flight (``cp.async``): each warp has its own ring of stages.

Data in flight occupies no registers, so few warps keep the memory busy; and no warp waits for another one. (Triton's
own pipelines share stages among all warps of a program, with a barrier in each iteration.)

Tensors hold one value per thread, see `warp`. Every function is declared impure, so that nothing here is reordered;
functions without a result return a meaningless number.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

# How a warp keeps STAGES - 1 stages in flight, in `gemv` and `int8_gemv`:
# 1. Before the loop, `copy` and `commit` for the first STAGES - 1 stages.
# 2. In each turn, `wait` for all groups but STAGES - 2: the oldest stage has arrived, for every lane. Its barrier also
#    says that every lane has left the previous turn, so the stage that was read then is free.
# 3. `copy` into the free stage and `commit`, even if nothing was copied: `wait` counts groups, not bytes.
# 4. Read the stage that has arrived, by `words`, `fragments` and `number`, and multiply.
STATIC = 48 << 10
"""Bytes of shared memory, Triton's own included, that a program has without an opt-in at its launch."""


def scratch(warps: int) -> int:
    """Bytes that Triton itself uses to exchange values between threads in these kernels, see `blocks.over_warps`."""
    return 512 * warps


@triton.jit
def allocate(thread, NW: tl.constexpr, BYTES: tl.constexpr, DYNAMIC: tl.constexpr):
    """The address of BYTES of shared memory, common to the whole program; to be called once.

    DYNAMIC: 0 declares them (STATIC at most); otherwise it is BYTES, which the launch requests on top of `scratch`.
    """
    if DYNAMIC:
        return tl.inline_asm_elementwise(
            f"mov.u32 $0, global_smem; add.u32 $0, $0, {512 * NW};",
            "=r,r",
            [thread],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:  # noqa: RET505 - Triton compiles what stands behind a constexpr branch
        return tl.inline_asm_elementwise(
            f"{{ .shared .align 128 .b8 ring[{BYTES}]; mov.u32 $0, ring; }}",
            "=r,r",
            [thread],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def copy(to, address, size, wanted, BYTES: tl.constexpr):
    """Begin to copy ``size`` bytes, at most BYTES, from memory, zero-filled up to BYTES, if ``wanted`` is not 0.

    BYTES: 4, 8 or 16; ``to`` and ``address`` are multiples of it. Copies of 16 bytes bypass the first-level cache.
    """
    WAY: tl.constexpr = "cg" if BYTES == 16 else "ca"
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $4, 0; mov.b32 $0, 0; "
        f"@p cp.async.{WAY}.shared.global.L2::128B [$1], [$2], {BYTES}, $3; }}",
        "=&r,r,l,r,r",
        [to, address, size, wanted],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def commit(thread):
    """Close a group of copies: those that this thread has begun since the last `commit`."""
    return tl.inline_asm_elementwise(
        "cp.async.commit_group; mov.b32 $0, 0;", "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait(thread, LEFT: tl.constexpr):
    """Wait until all but the newest LEFT groups have arrived, for every thread of this warp."""
    return tl.inline_asm_elementwise(
        f"cp.async.wait_group {LEFT}; bar.warp.sync 0xffffffff; mov.b32 $0, 0;",
        "=r,r",
        [thread],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def clear(to):
    """Set 16 bytes of shared memory to 0."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 z; mov.b32 z, 0; mov.b32 $0, 0; st.shared.v4.b32 [$1], {z, z, z, z}; }",
        "=&r,r",
        [to],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def place(at, word, wanted):
    """Write the lowest 2 bytes of a word to shared memory if ``wanted`` is not 0."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b16 h; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; cvt.u16.u32 h, $2; "
        "@p st.shared.b16 [$1], h; }",
        "=&r,r,r,r",
        [at, word, wanted],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def words(at, V: tl.constexpr):
    """V (1, 2 or 4) consecutive 32-bit words of shared memory."""
    if V == 4:
        out = tl.inline_asm_elementwise(
            "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,r",
            [at],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    elif V == 2:
        out = tl.inline_asm_elementwise(
            "ld.shared.v2.b32 {$0, $1}, [$2];",
            "=r,=r,r",
            [at],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        word = tl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=r,r", [at], dtype=tl.int32, is_pure=False, pack=1)
        out = (word,)
    return out


@triton.jit
def fragments(at):
    """Four 8 x 8 matrices of 16-bit values as the tensor core holds them (PTX ISA, "ldmatrix").

    Lane l = 4 r + t gives the address of row l % 8 of matrix l // 8, and gets columns 2t and 2t + 1 of row r of each.
    """
    return tl.inline_asm_elementwise(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r",
        [at],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def number(at, DTYPE: tl.constexpr):
    """One number of 1, 2 or 4 bytes from shared memory, in float32; int8 and uint8 as int32."""
    if DTYPE.primitive_bitwidth == 32:
        bits = tl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=r,r", [at], dtype=tl.int32, is_pure=False, pack=1)
        out = bits.to(DTYPE, bitcast=True).to(tl.float32)
    elif DTYPE.primitive_bitwidth == 16:
        bits = tl.inline_asm_elementwise("ld.shared.b16 $0, [$1];", "=h,r", [at], dtype=tl.int16, is_pure=False, pack=1)
        out = bits.to(DTYPE, bitcast=True).to(tl.float32)
    elif tl.uint8 == DTYPE:
        out = tl.inline_asm_elementwise("ld.shared.u8 $0, [$1];", "=r,r", [at], dtype=tl.int32, is_pure=False, pack=1)
    else:
        out = tl.inline_asm_elementwise("ld.shared.s8 $0, [$1];", "=r,r", [at], dtype=tl.int32, is_pure=False, pack=1)
    return out
