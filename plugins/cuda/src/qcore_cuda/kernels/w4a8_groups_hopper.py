"""``w4a8_groups_hopper``: int8 times int4 in groups of 32 or 64 for many rows on Hopper, in Gluon.

Sums of so few columns would keep the int8 tensor cores waiting for the conversion of each from int32. Here codes of
both operands are bfloat16, which holds them exactly, as float32 holds their sums over a group: at most
``64 * 15 * 128``, below 2**24. One warp copies; two warpgroups unpack 64 rows of the weight each,
multiply them group by group by BM tokens in shared memory with ``wgmma``, and add up scaled sums of one group while the
tensor cores work on the next one, or for the other warpgroup.

Grid: at most one program per multiprocessor; programs loop over tiles (`schedule.tail_spread`) of 128 rows of the
weight by BM = 32, 64 or 128 tokens, K in stages of two groups. Inputs: x codes as bfloat16, columns in their own order;
w planar16 in blocks of P, its group; scales, INT zero points and code sums ``(G, pitch_of(N))``; y ``(M, N)``. Floor:
``2 * M * N * K`` operations at the 16-bit peak of the tensor cores; besides, one multiply-add per P columns for
each value of y.
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
from qcore_triton.kernels.rounding import begin

from .hopper import advance, my_steps, ring, summed
from .operands_hopper import ROWS, block_operand, row_numbers
from .parts import segment
from .w4a8_hopper import leave_tokens

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"


@gluon.jit
def _produce(x, w, scale, zero, sums, xs, ws, ss, zs, ms, full, empty, N, M, KB, waves, share, P: gl.constexpr,
             BM: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, ZERO: gl.constexpr, MOVED: gl.constexpr,
             PDL: gl.constexpr):  # fmt: skip
    """Fill stages of two groups, in the order of their use."""
    BN: gl.constexpr = 2 * ROWS
    # Bytes of a stage: BM rows of 2 P codes of x, 128 rows of P bytes of w, and the rows of parameters that apply.
    NUMBERS: gl.constexpr = scale.dtype.primitive_bitwidth // 8 + (1 if ZERO else 0) + (4 if MOVED else 0)
    STAGE: gl.constexpr = BM * 4 * P + BN * P + 2 * BN * NUMBERS
    if PDL:
        gdc_launch_dependents()
    tiles_m = gl.cdiv(M, BM)
    tiles_n = gl.cdiv(N, 2 * ROWS)
    program, programs, steps = my_steps(tiles_n * tiles_m, waves, share, KB)
    step = steps * 0
    # 1. The first weights, as many stages as the ring holds, before the previous kernel, which quantizes x, has ended.
    tile, first, end = segment(step, steps, program, programs, waves, share, KB)
    ahead = gl.minimum(end - first, STAGES)
    tile_n = tile_order(tile, tiles_m, tiles_n, BAND)[1]
    for i in range(ahead):
        mbarrier.expect(full.index(i), STAGE)
        _copy_weight(w, scale, zero, sums, ws, ss, zs, ms, full.index(i), first + i, tile_n, i, True, P, ZERO, MOVED)
    if PDL:
        gdc_wait()
    at = gl.to_tensor(0)
    turn = gl.to_tensor(1)
    # 2. Stages in the order of their use, as far ahead as the ring allows: also across the end of a tile.
    while step < steps:
        tile, first, end = segment(step, steps, program, programs, waves, share, KB)
        tile_m, tile_n = tile_order(tile, tiles_m, tiles_n, BAND)
        for b in range(first, end):
            # The weights of the first ``ahead`` stages, and their bytes, were announced in step 1.
            fresh = (step > 0) | (b - first >= ahead)
            mbarrier.wait(empty.index(at), turn)
            here = full.index(at)
            mbarrier.expect(here, STAGE, pred=fresh)
            _copy_weight(w, scale, zero, sums, ws, ss, zs, ms, here, b, tile_n, at, fresh, P, ZERO, MOVED)
            tma.async_copy_global_to_shared(x, [tile_m * BM, 2 * b * P], here, xs.index(at))
            at, turn = advance(at, turn, STAGES)
        step += end - first


@gluon.jit
def _copy_weight(w, scale, zero, sums, ws, ss, zs, ms, here, b, tile_n, at, wanted, P: gl.constexpr, ZERO: gl.constexpr,
                 MOVED: gl.constexpr):  # fmt: skip
    """Begin to copy the weight's part of stage b of a tile."""
    n0 = tile_n * (2 * ROWS)
    for g in gl.static_range(2):
        tma.async_copy_global_to_shared(w, [tile_n * 8 + 4 * g, b * 4 * P], here, ws.index(2 * at + g), pred=wanted)
    tma.async_copy_global_to_shared(scale, [b * 2, n0], here, ss.index(at), pred=wanted)
    if ZERO:
        tma.async_copy_global_to_shared(zero, [b * 2, n0], here, zs.index(at), pred=wanted)
    if MOVED:
        tma.async_copy_global_to_shared(sums, [b * 2, n0], here, ms.index(at), pred=wanted)


@gluon.jit
def _stage(left, acc, moved, a, at, turn, xs, ws, ss, zs, ms, full, empty, WG: gl.constexpr, P: gl.constexpr,
           STAGES: gl.constexpr, ZERO: gl.constexpr, MOVED: gl.constexpr, ACC: gl.constexpr,
           DOT: gl.constexpr):  # fmt: skip
    """Two groups, the first of which is ``a``; returns the operand behind them. left: stages to come, this too.

    No product is under way from one call to the next: ptxas uses no register again before all products have ended, and
    the sums of more than two groups do not fit.
    """
    none = gl.zeros(acc.shape, gl.float32, ACC)
    next_at, next_turn = advance(at, turn, STAGES)
    numbers = ss.index(at)
    # 1. A, 64 rows by P columns, is in registers; B, BM tokens, in shared memory. Each product starts from 0. The
    #    second group is unpacked while the tensor cores multiply the first.
    first = warpgroup_mma(a, xs.index(at).slice(0, P, dim=1).permute((1, 0)), none, use_acc=False, is_async=True)
    b = block_operand(ws.index(2 * at + WG), zs.index(at), 1, WG, xs.dtype, P, ZERO, DOT)
    second = warpgroup_mma(b, xs.index(at).slice(P, P, dim=1).permute((1, 0)), none, use_acc=False, is_async=True)
    s = row_numbers(numbers.slice(0, 1, dim=0), WG, ACC).to(gl.float32)
    t = row_numbers(numbers.slice(1, 1, dim=0), WG, ACC).to(gl.float32)
    if MOVED:
        moved += s * row_numbers(ms.index(at).slice(0, 1, dim=0), WG, ACC).to(gl.float32)
        moved += t * row_numbers(ms.index(at).slice(1, 1, dim=0), WG, ACC).to(gl.float32)
    # 2. Scale the sums of the first group while the second one is multiplied.
    first, a = warpgroup_mma_wait(1, deps=[first, a])
    acc += first * s[:, None]
    # 3. Unpack the first group of the next stage; behind the program's last stage there is nothing to wait for, and
    #    what is read there is never used.
    mbarrier.wait(full.index(next_at), next_turn, pred=left > 1)
    a = block_operand(ws.index(2 * next_at + WG), zs.index(next_at), 0, WG, xs.dtype, P, ZERO, DOT)
    # 4. Drain, and release the stage.
    second, b = warpgroup_mma_wait(0, deps=[second, b])
    mbarrier.arrive(empty.index(at), count=1)
    acc += second * t[:, None]
    return acc, moved, a, next_at, next_turn


@gluon.jit
def _consume(y, tiles_of_y, x_scale, x_zero, bias, ys, out_scale, out_zero, parts, counts, xs, ws, ss, zs, ms,
             full, empty, N, M, KB, waves, share, WG: gl.constexpr, P: gl.constexpr, BM: gl.constexpr,
             STAGES: gl.constexpr, BAND: gl.constexpr, ZERO: gl.constexpr, MOVED: gl.constexpr, HAS_BIAS: gl.constexpr,
             OUT: gl.constexpr, SPREAD: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Group WG of two: 64 rows of each tile."""
    BN: gl.constexpr = 2 * ROWS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    begin(PDL)
    tiles_m = gl.cdiv(M, BM)
    tiles_n = gl.cdiv(N, 2 * ROWS)
    program, programs, steps = my_steps(tiles_n * tiles_m, waves, share, KB)
    step = steps * 0
    # left: stages to come in all tiles of this program, so that only the last one does not prefetch.
    left = steps
    at = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    # 1. Prologue: the first operand, so that every stage starts with a product.
    mbarrier.wait(full.index(0), 0)
    a = block_operand(ws.index(WG), zs.index(0), 0, WG, xs.dtype, P, ZERO, DOT)
    while step < steps:
        tile, first, end = segment(step, steps, program, programs, waves, share, KB)
        step += end - first
        tile_m, tile_n = tile_order(tile, tiles_m, tiles_n, BAND)
        acc = gl.zeros([ROWS, BM], gl.float32, ACC)
        moved = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, ACC))
        for _ in range(first, end):
            acc, moved, a, at, turn = _stage(left, acc, moved, a, at, turn, xs, ws, ss, zs, ms, full, empty, WG, P,
                                             STAGES, ZERO, MOVED, ACC, DOT)  # fmt: skip
            left -= 1
        m0 = tile_m * BM
        # 2. The correction by zero points of x belongs to the sums of each part of K.
        if MOVED:
            m = m0 + gl.arange(0, BM, gl.SliceLayout(0, ACC))
            acc -= moved[:, None] * gl.load(x_zero + m, mask=m < M, other=0.0)[None, :]
        # 3. Epilogue; the copying warp fills stages for the next tile meanwhile.
        complete = True
        if SPREAD:
            acc, complete = summed(acc, parts, counts, tile, first, end, program, programs, waves, share, KB, WG)
        if complete:
            leave_tokens(acc, moved, x_scale, x_zero, m0, tile_n * BN + WG * ROWS, M, N, bias, y, out_scale, out_zero,
                         tiles_of_y, ys, False, HAS_BIAS, OUT)  # fmt: skip
    # 4. Shared memory must outlive the last store, which reads it.
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "KB", "waves", "share", "out_scale", "out_zero"])
def w4a8_groups_hopper(x, x_scale, x_zero, w, scale, zero, sums, bias, y, tiles_of_y, parts, counts, out_scale,
                       out_zero, M, N, KB, waves, share, P: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
                       BAND: gl.constexpr, ALIGNED: gl.constexpr, ZERO: gl.constexpr, MOVED: gl.constexpr,
                       HAS_BIAS: gl.constexpr, OUT: gl.constexpr, SPREAD: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """``y[m, n] = x_scale[m] * sum_k (x[m, k] - x_zero[m]) * W[n, k] + bias[n]``, or its codes.

    x, w, tiles_of_y: descriptors, of codes of x in bfloat16 with blocks (BM, 2 P), of int4 words ``(N / 16, KB * 4 P)``
    with blocks (4, 4 P), of y with blocks (BM, 64). KB: stages of two groups; scale, zero and sums are descriptors with
    blocks (2, 128), the latter two only with ZERO (INT zero points) and MOVED (x has
    zero points; sums of a group's codes). OUT, out_scale, out_zero: as for `int8_gemm.tiles`, numbers alone. BAND: as
    GROUP of `gemm_hopper`, as SPREAD, parts and counts, with a stage for a step. ALIGNED: N is a multiple of
    16.
    """
    if ALIGNED:
        N = N // 16 * 16  # tells the compiler
    # 1. Shared memory: a ring of x, words, and the parameters that apply; a result buffer for each group.
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, 2 * P], x.layout)
    ws = gl.allocate_shared_memory(gl.int32, [2 * STAGES, 4, 4 * P], w.layout)
    ss = gl.allocate_shared_memory(scale.dtype, [STAGES, 2, 2 * ROWS], scale.layout)
    # Parameters that do not apply stand for each other: a constexpr branch never reads them.
    zs = ss
    ms = ss
    if ZERO:
        zs = gl.allocate_shared_memory(zero.dtype, [STAGES, 2, 2 * ROWS], zero.layout)
    if MOVED:
        ms = gl.allocate_shared_memory(sums.dtype, [STAGES, 2, 2 * ROWS], sums.layout)
    y0 = gl.allocate_shared_memory(tiles_of_y.dtype, [BM, ROWS], tiles_of_y.layout)
    y1 = gl.allocate_shared_memory(tiles_of_y.dtype, [BM, ROWS], tiles_of_y.layout)
    # 2. Each of the two consumers reads every stage.
    full, empty = ring(STAGES, 2)
    # TMA signals barriers through the async proxy; it has to see them initialized.
    fence_async_shared()
    # 3. Two consumers and a copying warp; warps and registers as in `gemm_hopper`.
    gl.warp_specialize([
        (_consume, (y, tiles_of_y, x_scale, x_zero, bias, y0, out_scale, out_zero, parts, counts, xs, ws, ss, zs, ms,
                    full, empty, N, M, KB, waves, share, 0, P, BM, STAGES, BAND, ZERO, MOVED, HAS_BIAS, OUT, SPREAD,
                    PDL)),
        (_consume, (y, tiles_of_y, x_scale, x_zero, bias, y1, out_scale, out_zero, parts, counts, xs, ws, ss, zs, ms,
                    full, empty, N, M, KB, waves, share, 1, P, BM, STAGES, BAND, ZERO, MOVED, HAS_BIAS, OUT, SPREAD,
                    PDL)),
        (_produce, (x, w, scale, zero, sums, xs, ws, ss, zs, ms, full, empty, N, M, KB, waves, share, P, BM, STAGES,
                    BAND, ZERO, MOVED, PDL)),
    ], [4, 1], [240, 24])  # fmt: skip
