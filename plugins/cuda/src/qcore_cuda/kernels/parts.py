"""Stream-K: steps of tiles spread over programs, which exchange parts of a tile's sum through memory, in float32.

A program computes ``waves`` whole tiles, and ``share`` consecutive steps of the remaining tiles.

Triton would rearrange parts through shared memory on their way to and from memory, for wide accesses. Inline assembly
keeps them in the tensor core's layout, and `part_at` makes the values of a warp contiguous. Parts must be read from the
second-level cache (``.cg``), not from the one of this multiprocessor, and not before the count says that they are
there.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit
def steps_of(program, programs, tiles, waves, share, KB):
    """The number of a program's steps, KB per tile; with a share of 0, the last wave may have fewer tiles."""
    whole = tl.minimum(waves, tl.cdiv(tiles - program, programs)) * KB
    return whole + tl.maximum(0, tl.minimum(share, (tiles - waves * programs) * KB - program * share))


@triton.jit
def segment(step, steps, program, programs, waves, share, KB):
    """The tile of a program's step, and the range of the tile's steps, [first, end), that the program computes."""
    place = program * share + step - waves * KB
    whole = step < waves * KB
    tile = tl.where(whole, step // KB * programs + program, waves * programs + place // KB)
    first = tl.where(whole, 0, place % KB)
    return tile, first, tl.minimum(first + steps - step, KB)


@triton.jit
def part_at(parts, slot, BN: tl.constexpr, BM: tl.constexpr):
    """Pointers ``(BN, BM)`` to the values of a part."""
    return value_at(parts, slot, tl.arange(0, BN), tl.arange(0, BM), BN, BM)


@triton.jit
def value_at(parts, slot, i, j, BN: tl.constexpr, BM: tl.constexpr):
    """Pointers to rows i and columns j of a part: of 16 x 8 values, even columns first; a warp's 32 are contiguous."""
    down = i // 16 * (16 * BM) + i // 8 % 2 * 32 + i % 8 * 4
    across = j // 8 * 128 + j % 2 * 64 + j % 8 // 2
    return parts + tl.cast(slot, tl.int64) * (BN * BM) + down[:, None] + across[None, :]


@triton.jit
def put(pointer, value, ASM: tl.constexpr):
    """Store a part."""
    if ASM:
        tl.inline_asm_elementwise(
            "st.global.cg.b32 [$1], $2; mov.b32 $0, 0;", "=r,l,r", [pointer, value.to(tl.int32, bitcast=True)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(pointer, value)


@triton.jit
def zeros_like(value, ASM: tl.constexpr):
    """Zeros in the layout of value."""
    if ASM:
        value = tl.inline_asm_elementwise(
            "mov.b32 $0, 0;", "=f,r", [value.to(tl.int32, bitcast=True)], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        value = tl.zeros_like(value)
    return value


@triton.jit
def add_parts(value, parts, slot, more, BN: tl.constexpr, BM: tl.constexpr, ASM: tl.constexpr):
    """Value plus the part in a slot and then those in the next three, of which there are ``more``."""
    return add_at(value, part_at(parts, slot, BN, BM), more, BN * BM, ASM)


@triton.jit
def add_at(value, pointer, more, SIZE: tl.constexpr, ASM: tl.constexpr):
    """`add_parts` by addresses; SIZE: values from one part to the next."""
    if ASM:
        value = tl.inline_asm_elementwise(
            """{ .reg .f32 sum, v0, v1, v2, v3; .reg .pred q1, q2, q3; .reg .b64 p1, p2, p3;
            mov.b32 sum, $1; add.s64 p1, $2, $4; add.s64 p2, p1, $4; add.s64 p3, p2, $4;
            setp.gt.s32 q1, $3, 0; setp.gt.s32 q2, $3, 1; setp.gt.s32 q3, $3, 2;
            mov.b32 v1, 0; mov.b32 v2, 0; mov.b32 v3, 0; ld.global.cg.f32 v0, [$2];
            @q1 ld.global.cg.f32 v1, [p1]; @q2 ld.global.cg.f32 v2, [p2]; @q3 ld.global.cg.f32 v3, [p3];
            add.f32 sum, sum, v0; add.f32 sum, sum, v1; add.f32 sum, sum, v2; add.f32 $0, sum, v3; }""",
            "=f,r,l,r,l",
            [value.to(tl.int32, bitcast=True), pointer, tl.cast(more, tl.int32), tl.cast(SIZE * 4, tl.int64)],
            dtype=tl.float32,
            is_pure=False,
            pack=1,
        )
    else:
        for i in tl.static_range(4):
            there = (tl.zeros(value.shape, tl.int32) + i) <= more
            value += tl.load(pointer + i * SIZE, mask=there, other=0.0, cache_modifier=".cg")
    return value
