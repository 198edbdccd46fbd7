"""``gemm_wide_hopper``: `gemm_hopper` with tiles of 256 rows of the weight, which read x half as often.

Tiles of 128 rows and 128 tokens keep the tensor cores waiting for the second-level cache: x arrives as 16-bit floats,
once for each tile of rows. A packed weight is small, so a tile may have many rows. Here each of the two warpgroups has
two blocks of 64 rows, with sums of their own; while the tensor cores multiply one of them, the warpgroup unpacks the
other one. Copies, barriers, and the way in which programs share tiles are those of `gemm_hopper`.

Grid: at most one program per multiprocessor, one-dimensional. Tiles: 256 rows of the weight by BM = 64 or 128 tokens, K
in blocks of 128 columns, x in stages of 64. Inputs and result: as for `gemm_hopper`. Floor: ``2 * M * N * K``
operations at the 16-bit peak of the tensor cores.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qcore_triton.kernels.int8_common import tile_order

from .gemm_hopper import UNITS, first_half, leave_tile, operand, produce
from .hopper import advance, my_steps, ring, summed
from .operands_hopper import ROWS, pairs_layout
from .parts import segment

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

GROUPS = gl.constexpr(4)
"""Groups of 64 rows of a tile: two of each warpgroup."""


@gluon.jit
def _second_half(at, raw, s, z, ws, DT: gl.constexpr, BITS: gl.constexpr, G: gl.constexpr, EACH: gl.constexpr,
                 SCALED: gl.constexpr, ZERO: gl.constexpr, DOT: gl.constexpr, ELEMENT: gl.constexpr):  # fmt: skip
    """The second half of a block of group G as operand A; int8 codes are those of stage ``at``."""
    codes = raw if BITS == 4 else ws.index(GROUPS * at + G).load(pairs_layout())
    return operand(codes, s, z, DT, BITS, True, EACH, SCALED, ZERO, DOT, ELEMENT)


@gluon.jit
def _block(left, upper, lower, a, raw, s, z, at, turn, slot, xs, ws, ss, zs, full, empty, BITS: gl.constexpr,
           WG: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, EACH: gl.constexpr, SCALED: gl.constexpr,
           ZERO: gl.constexpr, DOT: gl.constexpr, ELEMENT: gl.constexpr):  # fmt: skip
    """A block of 128 columns, the first half of whose upper rows is ``a``; returns that of the next block.

    upper, lower: the sums of the two groups of rows. left: blocks to come, this one too. No product is under way from
    one call to the next, see `gemm_hopper.blocks`.
    """
    DT: gl.constexpr = xs.dtype
    U: gl.constexpr = 2 * WG
    L: gl.constexpr = 2 * WG + 1
    # 1. First half, upper rows; the lower ones are unpacked meanwhile. All of the block's slot has been read then.
    first = at
    upper = warpgroup_mma(a, xs.index(first).permute((1, 0)), upper, is_async=True)
    b, more, t, u = first_half(first, slot, ws, ss, zs, DT, BITS, L, EACH, SCALED, ZERO, DOT, ELEMENT, GROUPS)
    lower = warpgroup_mma(b, xs.index(first).permute((1, 0)), lower, is_async=True)
    # 2. Second half, upper rows: their operand takes the registers of the product that has ended. int8 codes come with
    #    the stage.
    upper, a = warpgroup_mma_wait(1, deps=[upper, a])
    at, turn = advance(at, turn, STAGES)
    second = at
    if BITS == 4:
        a = _second_half(second, raw, s, z, ws, DT, BITS, U, EACH, SCALED, ZERO, DOT, ELEMENT)
        mbarrier.wait(full.index(second), turn)
    else:
        mbarrier.wait(full.index(second), turn)
        a = _second_half(second, raw, s, z, ws, DT, BITS, U, EACH, SCALED, ZERO, DOT, ELEMENT)
    upper = warpgroup_mma(a, xs.index(second).permute((1, 0)), upper, is_async=True)
    # 3. Second half, lower rows. Both products of the first stage have ended: release it.
    lower, b = warpgroup_mma_wait(1, deps=[lower, b])
    mbarrier.arrive(empty.index(first), count=1)
    b = _second_half(second, more, t, u, ws, DT, BITS, L, EACH, SCALED, ZERO, DOT, ELEMENT)
    lower = warpgroup_mma(b, xs.index(second).permute((1, 0)), lower, is_async=True)
    # 4. The first half of the next block. Behind the program's last block there is nothing to wait for; what is read
    #    there is never used.
    upper, a = warpgroup_mma_wait(1, deps=[upper, a])
    at, turn = advance(at, turn, STAGES)
    slot = advance(slot, 0, SLOTS)[0]
    mbarrier.wait(full.index(at), turn, pred=left > 1)
    a, raw, s, z = first_half(at, slot, ws, ss, zs, DT, BITS, U, EACH, SCALED, ZERO, DOT, ELEMENT, GROUPS)
    # 5. Drain, and release the second stage.
    lower, b = warpgroup_mma_wait(0, deps=[lower, b])
    mbarrier.arrive(empty.index(second), count=1)
    return upper, lower, a, raw, s, z, at, turn, slot


@gluon.jit
def _consume(y, scale, factor, bias, tokens, parts, counts, ys, xs, ws, ss, zs, full, empty, N, M, KB, waves, share,
             BITS: gl.constexpr, WG: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
             BAND: gl.constexpr, EACH: gl.constexpr, SCALED: gl.constexpr, ZERO: gl.constexpr, BIAS: gl.constexpr,
             SPREAD: gl.constexpr, ELEMENT: gl.constexpr, FACTOR: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Warpgroup WG of two: 128 rows of each tile."""
    DT: gl.constexpr = xs.dtype
    BN: gl.constexpr = GROUPS * ROWS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    tiles_m, tiles_n, program, programs, steps = my_steps(N, M, BM, waves, share, KB, BN)
    step = steps * 0
    left = steps
    at = 0
    turn = 0
    slot = 0
    if PDL and ZERO == UNITS:  # the previous kernel computes what the epilogue scales tokens by
        gdc_wait()
    # 1. Prologue: the first half of the first block's upper rows, so that every turn of the loop starts with a product.
    mbarrier.wait(full.index(0), 0)
    a, raw, s, z = first_half(0, 0, ws, ss, zs, DT, BITS, 2 * WG, EACH, SCALED, ZERO, DOT, ELEMENT, GROUPS)
    while step < steps:
        tile, begin, end = segment(step, steps, program, programs, waves, share, KB)
        step += end - begin
        tile_m, tile_n = tile_order(tile, tiles_m, tiles_n, BAND)
        upper = gl.zeros([ROWS, BM], gl.float32, ACC)
        lower = gl.zeros([ROWS, BM], gl.float32, ACC)
        for _ in range(begin, end):
            upper, lower, a, raw, s, z, at, turn, slot = _block(
                left, upper, lower, a, raw, s, z, at, turn, slot, xs, ws, ss, zs, full, empty, BITS, WG, STAGES, SLOTS,
                EACH, SCALED, ZERO, DOT, ELEMENT)  # fmt: skip
            left -= 1
        # 2. Epilogue, while the copying warp fills stages for the next tile: add up a shared tile, scale, round, store.
        n0 = tile_n * BN + 2 * WG * ROWS
        for i in gl.static_range(2):
            acc = upper if i == 0 else lower
            complete = True
            if SPREAD:
                acc, complete = summed(acc, parts, counts, tile, begin, end, program, programs, waves, share, KB,
                                       2 * WG + i, GROUPS)  # fmt: skip
            if complete:
                leave_tile(acc, y, scale, factor, bias, tokens, ys, tile_m * BM, n0 + i * ROWS, M, N, SCALED, FACTOR,
                           BIAS, 1, ZERO)  # fmt: skip
    # 3. Shared memory must outlive the last store, which reads it.
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "KB", "PER", "waves", "share"])
def gemm_wide_hopper(
    x, w, scale, zero, factor, bias, tokens, y, parts, counts, M, N, KB, PER, waves, share, BITS: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, EACH: gl.constexpr, SCALED: gl.constexpr,
    ZERO: gl.constexpr, BIAS: gl.constexpr, SPREAD: gl.constexpr, PDL: gl.constexpr, ELEMENT: gl.constexpr,
    FACTOR: gl.constexpr,
):  # fmt: skip
    """``y[m, n] = sum_k x[m, k] * W[n, k] + bias[n]``.

    Arguments are those of `gemm_hopper`, but scales and zero points, if they are descriptors, have blocks (EACH, 256),
    parts have 256 * BM values, and counts are four for each shared tile. BAND: tiles of tokens whose programs share the
    weight in the second-level cache.
    """
    # 1. Let the next kernel be scheduled early: it waits for this one's result by itself.
    if PDL:
        gdc_launch_dependents()
    # 2. Shared memory, as in `gemm_hopper`, for twice as many rows; a result buffer of 64 rows for each warpgroup.
    SLOTS: gl.constexpr = (STAGES + 1) // 2
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, 64], x.layout)
    COUNT: gl.constexpr = GROUPS * (SLOTS if BITS == 4 else STAGES)
    ws = gl.allocate_shared_memory(w.dtype, [COUNT, w.block_shape[0], w.block_shape[1]], w.layout)
    ss = ws
    zs = ws
    if SCALED:
        ss = gl.allocate_shared_memory(scale.dtype, [SLOTS, EACH, GROUPS * ROWS], scale.layout)
    if ZERO:
        zs = gl.allocate_shared_memory(zero.dtype, [SLOTS, 1 if ZERO == UNITS else EACH, GROUPS * ROWS], zero.layout)
    y0 = gl.allocate_shared_memory(y.dtype, [BM, ROWS], y.layout)
    y1 = gl.allocate_shared_memory(y.dtype, [BM, ROWS], y.layout)
    # 3. Each of the two consumers reads every stage.
    full, empty = ring(STAGES, 2)
    # TMA signals barriers through the async proxy; it has to see them initialized.
    fence_async_shared()
    # 4. Two consumers and a copying warp; warps and registers as in `gemm_hopper`.
    gl.warp_specialize([
        (_consume, (y, scale, factor, bias, tokens, parts, counts, y0, xs, ws, ss, zs, full, empty, N, M, KB, waves,
                    share, BITS, 0, BM, STAGES, SLOTS, BAND, EACH, SCALED, ZERO, BIAS, SPREAD, ELEMENT, FACTOR, PDL)),
        (_consume, (y, scale, factor, bias, tokens, parts, counts, y1, xs, ws, ss, zs, full, empty, N, M, KB, waves,
                    share, BITS, 1, BM, STAGES, SLOTS, BAND, EACH, SCALED, ZERO, BIAS, SPREAD, ELEMENT, FACTOR, PDL)),
        (produce, (x, w, scale, zero, xs, ws, ss, zs, full, empty, N, M, KB, PER, waves, share, BITS, BM, STAGES,
                   SLOTS, BAND, EACH, SCALED, ZERO, PDL, GROUPS)),
    ], [4, 1], [240, 24])  # fmt: skip
