"""Copies of a packed weight's blocks into a `smem_pipeline`, shared by `gemv` and `int8_gemv`.

A block is 16 rows by P columns. Lane l = 4 r + t holds consecutive words of rows r and r + 8, see `packing`. Mostly a
lane copies the words that it holds. Blocks of int8 are copied in PAIRS if a warp takes two at a time: eight lanes copy
128 consecutive bytes of a row, a whole cache line.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import smem_pipeline as pipeline

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit
def places(w, lane, rows, NP, KB, pitch, BITS: tl.constexpr, P: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr):
    """Addresses of a lane's words.

    Returns the address in block 0 of the weight's first 16 rows; the offsets of R row blocks from row ``rows`` on; and
    the bytes between two rows that the lane copies. NP: number of rows, padding included; rows of rows16 have
    ``32 * pitch`` bytes.
    """
    line = pitch.to(tl.int64) * 32
    tiles = ()
    for i in tl.static_range(R):
        tile = tl.minimum(rows // 16 + i, (NP - 1) // 16).to(tl.int64)
        tiles = tiles + (tile * (KB.to(tl.int64) * (8 * P) if BITS == 4 else line * 16),)
    at = w.to(tl.int64, bitcast=True)
    if BITS == 4:
        step = 4 * P
        at += lane * (P // 8)
    elif PAIRS:
        step = line * 4
        at += (lane // 8) * line + lane % 8 * 16
    else:
        step = line * 8
        at += (lane // 4) * line + lane % 4 * (P // 4)
    return at, tiles, step


@triton.jit
def copy_weights(to, at, lane, first, tiles, step, KB, R: tl.constexpr, U: tl.constexpr, BYTES: tl.constexpr,
                 NEXT: tl.constexpr, PAIRS: tl.constexpr, FILL: tl.constexpr = False):  # fmt: skip
    """Begin to copy the weights of blocks ``first`` to ``first + U - 1``.

    at: the address of this lane's words in block ``first``; BYTES: of a lane and row in a block; NEXT: bytes from a
    block to the next. Behind the last block memory keeps what it held, which meets zeros of x; FILL: it is filled with
    zeros instead, as any bytes might stand for NaN.
    """
    size = tl.full(to.shape, BYTES, tl.int32)
    if PAIRS:
        # Odd rows swap the halves of their 128 bytes: lanes that read two rows at once meet different banks.
        spot = to + (lane // 8) * 128 + ((lane % 8) ^ (lane // 8 % 2 * 4)) * 16
        for p in tl.static_range(U // 2):
            wanted = (first + 2 * p + lane % 8 // 4 < KB).to(tl.int32)
            if FILL:
                size = wanted * 16
                wanted = wanted * 0 + 1
            for i in tl.static_range(R):
                for q in tl.static_range(4):
                    here = at + (tiles[i] + q * step + p * 2 * NEXT)
                    pipeline.copy(spot + ((p * R + i) * 2048 + q * 512), here, size, wanted, 16)
    else:
        spot = to + lane * BYTES
        for u in tl.static_range(U):
            wanted = (first + u < KB).to(tl.int32)
            if FILL:
                size = wanted * BYTES
                wanted = wanted * 0 + 1
            for i in tl.static_range(R):
                here = at + (tiles[i] + u * NEXT)
                pipeline.copy(spot + (u * R + i) * (64 * BYTES), here, size, wanted, BYTES)
                pipeline.copy(spot + (u * R + i) * (64 * BYTES) + 32 * BYTES, here + step, size, wanted, BYTES)


@triton.jit
def weights(at, lane, u: tl.constexpr, i: tl.constexpr, R: tl.constexpr, BYTES: tl.constexpr, PAIRS: tl.constexpr):
    """Read a lane's words of rows r and r + 8, of block u and row block i of a stage."""
    if PAIRS:
        turned = (u % 2 * 4 + lane % 4) ^ (lane // 4 % 2 * 4)
        spot = at + ((u // 2 * R + i) * 2048 + (lane // 4) * 128 + turned * 16)
        words = (pipeline.words(spot, 4), pipeline.words(spot + 1024, 4))
    else:
        spot = at + (u * R + i) * (64 * BYTES) + lane * BYTES
        words = (pipeline.words(spot, BYTES // 4), pipeline.words(spot + 32 * BYTES, BYTES // 4))
    return words


@triton.jit
def copy_parameters(to, scale, zero, lane, first, live, rows, line, KB, each, R: tl.constexpr, U: tl.constexpr,
                    ZERO: tl.constexpr):  # fmt: skip
    """Begin to copy the scales of R row blocks, of the groups of U blocks, and behind them, if ZERO, zero points.

    A lane copies those of 16 rows and one block. line: parameters of a group, a multiple of 16; live: whether any warp
    will read this stage.
    """
    SB: tl.constexpr = scale.dtype.element_ty.primitive_bitwidth // 8
    ZB: tl.constexpr = zero.dtype.element_ty.primitive_bitwidth // 8 if ZERO else 0
    size = tl.full(to.shape, 16, tl.int32)
    for q in tl.static_range((U * R + 31) // 32):
        c = q * 32 + lane
        wanted = ((c < U * R) & live).to(tl.int32)
        row = tl.minimum(rows + c % R * 16, line - 16)
        at = group_of(first + c // R, KB, each).to(tl.int64) * line + row
        for j in tl.static_range(SB):
            pipeline.copy(to + (c * SB + j) * 16, scale.to(tl.int64, bitcast=True) + at * SB + j * 16, size, wanted, 16)
        for j in tl.static_range(ZB):
            spot = to + (U * R * SB * 16 + (c * ZB + j) * 16)
            pipeline.copy(spot, zero.to(tl.int64, bitcast=True) + at * ZB + j * 16, size, wanted, 16)


@triton.jit
def copy_stage(to, at, lane, first, live, tiles, step, scale, zero, rows, line, KB, each, R: tl.constexpr,
               U: tl.constexpr, BYTES: tl.constexpr, NEXT: tl.constexpr, PAIRS: tl.constexpr, AFTER: tl.constexpr,
               RINGED: tl.constexpr, ZERO: tl.constexpr, G: tl.constexpr = 1, FILL: tl.constexpr = False):  # fmt: skip
    """Begin to copy a stage's weights and, if RINGED, its scales and zero points, AFTER bytes behind them.

    G: groups in a block, if it has several; FILL: see `copy_weights`.
    """
    copy_weights(to, at, lane, first, tiles, step, KB, R, U, BYTES, NEXT, PAIRS, FILL)
    if RINGED:
        copy_parameters(to + AFTER, scale, zero, lane, first * G, live, rows, line, KB * G, each, R, U * G, ZERO)


@triton.jit
def turn(slot, STAGE: tl.constexpr, STAGES: tl.constexpr):
    """The offsets of the next stage, and of the stage that was read last, which is free."""
    after = tl.where(slot == (STAGES - 1) * STAGE, 0, slot + STAGE)
    free = tl.where(after >= 2 * STAGE, after - 2 * STAGE, after + (STAGES - 2) * STAGE)
    return after, free


@triton.jit
def group_of(block, KB, each):
    """The group of a block, ``each`` = 1 / blocks per group: exact, halves stand far from whole numbers."""
    return ((tl.minimum(block, KB - 1).to(tl.float32) + 0.5) * each).to(tl.int32)


@triton.jit
def pair(at, lane, u: tl.constexpr, i: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr):
    """The scales or zero points of rows r and r + 8, of block u and row block i of a stage."""
    B: tl.constexpr = DTYPE.primitive_bitwidth // 8
    spot = at + ((u * R + i) * 16 + lane // 4) * B
    return pipeline.number(spot, DTYPE), pipeline.number(spot + 8 * B, DTYPE)


@triton.jit
def over_warps(a, NW: tl.constexpr):
    """Four accumulators per lane, summed over the warps in one exchange: [lane, row half, column]."""
    four = tl.join(tl.join(a[0], a[2]), tl.join(a[1], a[3]))
    return tl.sum(tl.reshape(four, [NW, 128]), 0)
