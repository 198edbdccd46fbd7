"""``groups_hopper``: codes times int4 or int8 weights in groups, for many rows on Hopper, in Gluon.

Int8 tensor cores would wait for the conversion of sums of so few columns from int32, or int8 could not hold codes less
their zero points. Here codes of both operands, less zero points, are bfloat16, which holds them exactly, as float32
holds their sums over a block of 32 or 64 columns: at most ``64 * 255 * 255``, below 2**24. One warp copies; two
warpgroups unpack 64 rows of the weight each, multiply them block by block by BM tokens in shared memory with ``wgmma``,
and add up scaled sums of one block while the tensor cores work on the next one, or for the other warpgroup.

Grid: at most one program per multiprocessor; programs loop over tiles (`schedule.tail_spread`) of 128 rows of the
weight by BM = 32, 64 or 128 tokens, K in stages of two blocks. Inputs: x codes less their zero points as bfloat16,
columns in their own order; w planar16 in blocks of P, its group, or rows16, P = 64; scales and INT zero points ``(G,
pitch_of(N))``; y ``(M, N)``. Floor: ``2 * M * N * K`` operations at the 16-bit peak of the tensor cores; besides, one
multiply-add per P columns for each value of y.
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
from .operands_hopper import ROWS, block_operand, from_pairs, pairs_layout, row_numbers, zero_point
from .parts import segment
from .w4a8_hopper import leave_tokens

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"


@gluon.jit
def _produce(x, w, scale, zero, xs, ws, ss, zs, full, empty, N, M, KB, PER, waves, share, BITS: gl.constexpr,
             P: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, EACH: gl.constexpr,
             ZERO: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Fill stages of two blocks, in the order of their use."""
    BN: gl.constexpr = 2 * ROWS
    # Bytes of a stage: BM rows of 2 P codes of x, 128 rows of w, and the EACH rows of parameters that apply.
    NUMBERS: gl.constexpr = scale.dtype.primitive_bitwidth // 8 + (1 if ZERO else 0)
    STAGE: gl.constexpr = BM * 4 * P + BN * P * BITS // 4 + EACH * BN * NUMBERS
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
        _copy_weight(w, scale, zero, ws, ss, zs, full.index(i), first + i, PER, tile_n, i, True, BITS, P, EACH, ZERO)
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
            _copy_weight(w, scale, zero, ws, ss, zs, here, b, PER, tile_n, at, fresh, BITS, P, EACH, ZERO)
            tma.async_copy_global_to_shared(x, [tile_m * BM, 2 * b * P], here, xs.index(at))
            at, turn = advance(at, turn, STAGES)
        step += end - first


@gluon.jit
def _copy_weight(w, scale, zero, ws, ss, zs, here, b, PER, tile_n, at, wanted, BITS: gl.constexpr, P: gl.constexpr,
                 EACH: gl.constexpr, ZERO: gl.constexpr):  # fmt: skip
    """Begin to copy the weight's part of stage b of a tile."""
    n0 = tile_n * (2 * ROWS)
    row = b // PER * EACH
    for g in gl.static_range(2):
        if BITS == 4:
            tma.async_copy_global_to_shared(w, [tile_n * 8 + 4 * g, b * 4 * P], here, ws.index(2 * at + g), pred=wanted)
        else:
            for e in gl.static_range(2):
                to = ws.index(4 * at + 2 * g + e)
                tma.async_copy_global_to_shared(w, [n0 + g * ROWS, b * P + e * (P // 2)], here, to, pred=wanted)
    tma.async_copy_global_to_shared(scale, [row, n0], here, ss.index(at), pred=wanted)
    if ZERO:
        tma.async_copy_global_to_shared(zero, [row, n0], here, zs.index(at), pred=wanted)


@gluon.jit
def _operand(ws, zs, at, G: gl.constexpr, WG: gl.constexpr, BITS: gl.constexpr, DT: gl.constexpr, P: gl.constexpr,
             EACH: gl.constexpr, ZERO: gl.constexpr, DOT: gl.constexpr):  # fmt: skip
    """Block G of the two of a stage, codes (64, P) less INT zero points, as operand A."""
    if BITS == 4:
        operand = block_operand(ws.index(2 * at + WG), zs.index(at), G, WG, DT, P, ZERO, DOT)
    else:
        raw = ws.index(4 * at + 2 * WG + G).load(pairs_layout())
        z = raw
        if ZERO:
            z = row_numbers(zs.index(at).slice(G * (EACH - 1), 1, dim=0), WG, pairs_layout())
            z = zero_point(z, DT, BITS, ZERO)
        operand = from_pairs(raw, raw, z, DT, False, ZERO, DOT, "int")
    return operand


@gluon.jit
def _stage(left, acc, a, at, turn, xs, ws, ss, zs, full, empty, WG: gl.constexpr, BITS: gl.constexpr, P: gl.constexpr,
           STAGES: gl.constexpr, EACH: gl.constexpr, ZERO: gl.constexpr, ACC: gl.constexpr,
           DOT: gl.constexpr):  # fmt: skip
    """Two blocks, the first of which is ``a``; returns the operand behind them. left: stages to come, this too.

    No product is under way from one call to the next: ptxas uses no register again before all products have ended, and
    the sums of more than two blocks do not fit.
    """
    none = gl.zeros(acc.shape, gl.float32, ACC)
    next_at, next_turn = advance(at, turn, STAGES)
    numbers = ss.index(at)
    # 1. A, 64 rows by P columns, is in registers; B, BM tokens, in shared memory. Each product starts from 0. The
    #    second block is unpacked while the tensor cores multiply the first.
    first = warpgroup_mma(a, xs.index(at).slice(0, P, dim=1).permute((1, 0)), none, use_acc=False, is_async=True)
    b = _operand(ws, zs, at, 1, WG, BITS, xs.dtype, P, EACH, ZERO, DOT)
    second = warpgroup_mma(b, xs.index(at).slice(P, P, dim=1).permute((1, 0)), none, use_acc=False, is_async=True)
    s = row_numbers(numbers.slice(0, 1, dim=0), WG, ACC).to(gl.float32)
    # 2. Scale the sums of the first block while the second one is multiplied.
    first, a = warpgroup_mma_wait(1, deps=[first, a])
    acc += first * s[:, None]
    t = row_numbers(numbers.slice(EACH - 1, 1, dim=0), WG, ACC).to(gl.float32)
    # 3. Unpack the first block of the next stage; behind the program's last stage there is nothing to wait for, and
    #    what is read there is never used.
    mbarrier.wait(full.index(next_at), next_turn, pred=left > 1)
    a = _operand(ws, zs, next_at, 0, WG, BITS, xs.dtype, P, EACH, ZERO, DOT)
    # 4. Drain, and release the stage.
    second, b = warpgroup_mma_wait(0, deps=[second, b])
    mbarrier.arrive(empty.index(at), count=1)
    acc += second * t[:, None]
    return acc, a, next_at, next_turn


@gluon.jit
def _consume(y, tiles_of_y, x_scale, bias, ys, out_scale, out_zero, parts, counts, xs, ws, ss, zs, full, empty, N, M,
             KB, waves, share, WG: gl.constexpr, BITS: gl.constexpr, P: gl.constexpr, BM: gl.constexpr,
             STAGES: gl.constexpr, BAND: gl.constexpr, EACH: gl.constexpr, ZERO: gl.constexpr, HAS_BIAS: gl.constexpr,
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
    a = _operand(ws, zs, 0, 0, WG, BITS, xs.dtype, P, EACH, ZERO, DOT)
    while step < steps:
        tile, first, end = segment(step, steps, program, programs, waves, share, KB)
        step += end - first
        tile_m, tile_n = tile_order(tile, tiles_m, tiles_n, BAND)
        acc = gl.zeros([ROWS, BM], gl.float32, ACC)
        for _ in range(first, end):
            acc, a, at, turn = _stage(left, acc, a, at, turn, xs, ws, ss, zs, full, empty, WG, BITS, P, STAGES, EACH,
                                      ZERO, ACC, DOT)  # fmt: skip
            left -= 1
        # 2. Epilogue; the copying warp fills stages for the next tile meanwhile.
        complete = True
        if SPREAD:
            acc, complete = summed(acc, parts, counts, tile, first, end, program, programs, waves, share, KB, WG)
        if complete:
            leave_tokens(acc, x_scale, x_scale, x_scale, tile_m * BM, tile_n * BN + WG * ROWS, M, N, bias, y, out_scale,
                         out_zero, tiles_of_y, ys, False, HAS_BIAS, OUT)  # fmt: skip
    # 3. Shared memory must outlive the last store, which reads it.
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "KB", "PER", "waves", "share", "out_scale", "out_zero"])
def groups_hopper(x, x_scale, w, scale, zero, bias, y, tiles_of_y, parts, counts, out_scale, out_zero, M, N, KB, PER,
                  waves, share, BITS: gl.constexpr, P: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
                  BAND: gl.constexpr, EACH: gl.constexpr, ALIGNED: gl.constexpr, ZERO: gl.constexpr,
                  HAS_BIAS: gl.constexpr, OUT: gl.constexpr, SPREAD: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """``y[m, n] = x_scale[m] * sum_k x[m, k] * W[n, k] + bias[n]``, or its codes.

    x, w, tiles_of_y: descriptors, of codes of x, less their zero points, in bfloat16 with blocks (BM, 2 P), of int4
    words ``(N / 16, KB * 4 P)`` with blocks (4, 4 P) or of pairs of int8 with blocks (64, P / 2), of y with blocks (BM,
    64). KB: stages of two blocks; each has EACH = 2 groups, or EACH is 1 and PER of them are a group. scale and zero
    are descriptors with blocks (EACH, 128), the latter only with ZERO (INT zero points). OUT, out_scale, out_zero: as
    for `int8_gemm.tiles`, numbers alone. BAND: as GROUP of `gemm_hopper`, as SPREAD, parts and counts, with a stage for
    a step. ALIGNED: N is a multiple of 16.
    """
    if ALIGNED:
        N = N // 16 * 16  # tells the compiler
    # 1. Shared memory: a ring of x, words, and the parameters that apply; a result buffer for each group.
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, 2 * P], x.layout)
    COUNT: gl.constexpr = 2 * STAGES if BITS == 4 else 4 * STAGES
    ws = gl.allocate_shared_memory(w.dtype, [COUNT, w.block_shape[0], w.block_shape[1]], w.layout)
    ss = gl.allocate_shared_memory(scale.dtype, [STAGES, EACH, 2 * ROWS], scale.layout)
    # Parameters that do not apply stand for each other: a constexpr branch never reads them.
    zs = ss
    if ZERO:
        zs = gl.allocate_shared_memory(zero.dtype, [STAGES, EACH, 2 * ROWS], zero.layout)
    y0 = gl.allocate_shared_memory(tiles_of_y.dtype, [BM, ROWS], tiles_of_y.layout)
    y1 = gl.allocate_shared_memory(tiles_of_y.dtype, [BM, ROWS], tiles_of_y.layout)
    # 2. Each of the two consumers reads every stage.
    full, empty = ring(STAGES, 2)
    # TMA signals barriers through the async proxy; it has to see them initialized.
    fence_async_shared()
    # 3. Two consumers and a copying warp; warps and registers as in `gemm_hopper`.
    gl.warp_specialize([
        (_consume, (y, tiles_of_y, x_scale, bias, y0, out_scale, out_zero, parts, counts, xs, ws, ss, zs, full, empty,
                    N, M, KB, waves, share, 0, BITS, P, BM, STAGES, BAND, EACH, ZERO, HAS_BIAS, OUT, SPREAD, PDL)),
        (_consume, (y, tiles_of_y, x_scale, bias, y1, out_scale, out_zero, parts, counts, xs, ws, ss, zs, full, empty,
                    N, M, KB, waves, share, 1, BITS, P, BM, STAGES, BAND, EACH, ZERO, HAS_BIAS, OUT, SPREAD, PDL)),
        (_produce, (x, w, scale, zero, xs, ws, ss, zs, full, empty, N, M, KB, PER, waves, share, BITS, P, BM, STAGES,
                    BAND, EACH, ZERO, PDL)),
    ], [4, 1], [240, 24])  # fmt: skip
