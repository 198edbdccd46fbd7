"""``int8_groups_hopper``: int8 times int8 with scales of groups for many rows on Hopper, in Gluon.

Both operands stay in shared memory. One warp copies; two warpgroups multiply 64 rows of the weight each by BM tokens
with ``wgmma``, a step of P columns at a time: 32 or 64, a group, or 128, a group or a part of one. Two products are
under way in a warpgroup: sums of the first are scaled and added up in float32 while the tensor cores work on the
second, or for the other warpgroup.

Grid: at most one program per multiprocessor; programs loop over tiles (`schedule.tail_spread`) of 128 rows of the
weight by BM = 32, 64 or 128 tokens, K in stages of 128 columns. Inputs: codes x ``(M, 128 * KB)``, w rows16; scales
and code sums ``(G, pitch_of(N))``; y ``(M, N)``. Floor: ``2 * M * N * K`` operations at the int8 peak of the tensor
cores; besides, a conversion and a multiply-add per P columns for each value of y.

Exact: a step sums to at most ``128 * 128 * 128 = 2**21``: exact in int32, and in float32, too.
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
from .operands_hopper import ROWS, row_numbers
from .parts import segment
from .w4a8_hopper import leave_tokens

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"


@gluon.jit
def _produce(x, w, scale, sums, xs, ws, ss, ms, full, empty, N, M, KB, PER, waves, share, BM: gl.constexpr,
             STAGES: gl.constexpr, BAND: gl.constexpr, EACH: gl.constexpr, MOVED: gl.constexpr,
             PDL: gl.constexpr):  # fmt: skip
    """Fill stages of 128 columns, in the order of their use."""
    BN: gl.constexpr = 2 * ROWS
    # Bytes of a stage: BM and 128 rows of 128 codes, and EACH rows of the parameters that apply.
    NUMBERS: gl.constexpr = scale.dtype.primitive_bitwidth // 8 + (4 if MOVED else 0)
    STAGE: gl.constexpr = (BM + BN) * 128 + EACH * BN * NUMBERS
    if PDL:
        gdc_launch_dependents()
    tiles_m = gl.cdiv(M, BM)
    tiles_n = gl.cdiv(N, BN)
    program, programs, steps = my_steps(tiles_n * tiles_m, waves, share, KB)
    step = steps * 0
    # 1. The first weights, as many stages as the ring holds, before the previous kernel, which quantizes x, has ended.
    tile, first, end = segment(step, steps, program, programs, waves, share, KB)
    ahead = gl.minimum(end - first, STAGES)
    tile_n = tile_order(tile, tiles_m, tiles_n, BAND)[1]
    for i in range(ahead):
        mbarrier.expect(full.index(i), STAGE)
        _copy_weight(w, scale, sums, ws, ss, ms, full.index(i), first + i, PER, tile_n * BN, i, True, EACH, MOVED)
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
            _copy_weight(w, scale, sums, ws, ss, ms, here, b, PER, tile_n * BN, at, fresh, EACH, MOVED)
            tma.async_copy_global_to_shared(x, [tile_m * BM, b * 128], here, xs.index(at))
            at, turn = advance(at, turn, STAGES)
        step += end - first


@gluon.jit
def _copy_weight(w, scale, sums, ws, ss, ms, here, b, PER, n0, at, wanted, EACH: gl.constexpr, MOVED: gl.constexpr):
    """Begin to copy the weight's part of stage b of a tile."""
    row = b // PER * EACH
    tma.async_copy_global_to_shared(w, [n0, b * 128], here, ws.index(at), pred=wanted)
    tma.async_copy_global_to_shared(scale, [row, n0], here, ss.index(at), pred=wanted)
    if MOVED:
        tma.async_copy_global_to_shared(sums, [row, n0], here, ms.index(at), pred=wanted)


@gluon.jit
def _stages(COUNT: gl.constexpr, b, acc, moved, at, turn, xs, ws, ss, ms, full, empty, PER, WG: gl.constexpr,
            STAGES: gl.constexpr, EACH: gl.constexpr, MOVED: gl.constexpr, ACC: gl.constexpr):  # fmt: skip
    """COUNT stages of a tile, from ``b`` on, of EACH steps: 1 or an even number of steps.

    No more than two products are under way, and none from one call to the next: ptxas uses no register again before all
    products have ended, and the sums of three do not fit.
    """
    P: gl.constexpr = 128 // EACH
    STEPS: gl.constexpr = COUNT * EACH
    none = gl.zeros(acc.shape, gl.int32, ACC)
    before = none
    s0 = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, ACC))
    done = at
    for i in gl.static_range(STEPS):
        # 1. A, 64 rows by P columns of the weight, and B, BM tokens, stay in shared memory; a product starts from 0.
        if i % EACH == 0:
            mbarrier.wait(full.index(at), turn)
        left = ws.index(at).slice(WG * ROWS, ROWS, dim=0).slice(i % EACH * P, P, dim=1)
        right = xs.index(at).slice(i % EACH * P, P, dim=1).permute((1, 0))
        d = warpgroup_mma(left, right, none, use_acc=False, is_async=True)
        # 2. The step's parameters, while it is multiplied.
        s = row_numbers(ss.index(at).slice(i % EACH, 1, dim=0), WG, ACC).to(gl.float32)
        if MOVED:
            # The correction by zero points of x, once per group: at its first stage.
            total = row_numbers(ms.index(at).slice(i % EACH, 1, dim=0), WG, ACC).to(gl.float32)
            moved += gl.where((b + i // EACH) % PER == 0, s * total, 0.0)
        # 3. The step before has ended: release its stage if it was the last there, and scale its sums while the tensor
        #    cores multiply this one.
        if i % 2 == 1:
            before = warpgroup_mma_wait(1, deps=[before])
            if EACH == 1:
                mbarrier.arrive(empty.index(done), count=1)
            acc += before.to(gl.float32) * s0[:, None]
        # 4. Drain behind the second of two, or a single one.
        if i % 2 == 1 or STEPS == 1:
            d = warpgroup_mma_wait(0, deps=[d])
            if (i + 1) % EACH == 0:
                mbarrier.arrive(empty.index(at), count=1)
            acc += d.to(gl.float32) * s[:, None]
        before = d
        s0 = s
        done = at
        if (i + 1) % EACH == 0:
            at, turn = advance(at, turn, STAGES)
    return acc, moved, at, turn


@gluon.jit
def _consume(y, tiles_of_y, x_scale, x_zero, bias, ys, out_scale, out_zero, parts, counts, xs, ws, ss, ms, full, empty,
             N, M, KB, PER, waves, share, WG: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
             EACH: gl.constexpr, MOVED: gl.constexpr, HAS_BIAS: gl.constexpr, OUT: gl.constexpr, SPREAD: gl.constexpr,
             PDL: gl.constexpr):  # fmt: skip
    """Group WG of two: 64 rows of each tile."""
    BN: gl.constexpr = 2 * ROWS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 32])
    AT_ONCE: gl.constexpr = 2 if EACH == 1 else 1
    begin(PDL)
    tiles_m = gl.cdiv(M, BM)
    tiles_n = gl.cdiv(N, BN)
    program, programs, steps = my_steps(tiles_n * tiles_m, waves, share, KB)
    step = steps * 0
    at = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    while step < steps:
        tile, first, end = segment(step, steps, program, programs, waves, share, KB)
        step += end - first
        tile_m, tile_n = tile_order(tile, tiles_m, tiles_n, BAND)
        acc = gl.zeros([ROWS, BM], gl.float32, ACC)
        moved = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, ACC))
        # 1. Two steps at a time; if they are stages of their own, there may be a single one behind.
        pairs = (end - first) // AT_ONCE * AT_ONCE
        for b in range(first, first + pairs, AT_ONCE):
            acc, moved, at, turn = _stages(AT_ONCE, b, acc, moved, at, turn, xs, ws, ss, ms, full, empty, PER, WG,
                                           STAGES, EACH, MOVED, ACC)  # fmt: skip
        if AT_ONCE > 1:
            for b in range(first + pairs, end):
                acc, moved, at, turn = _stages(1, b, acc, moved, at, turn, xs, ws, ss, ms, full, empty, PER, WG,
                                               STAGES, EACH, MOVED, ACC)  # fmt: skip
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


@gluon.jit(do_not_specialize=["M", "N", "KB", "PER", "waves", "share", "out_scale", "out_zero"])
def int8_groups_hopper(x, x_scale, x_zero, w, scale, sums, bias, y, tiles_of_y, parts, counts, out_scale, out_zero,
                       M, N, KB, PER, waves, share, BM: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
                       EACH: gl.constexpr, ALIGNED: gl.constexpr, MOVED: gl.constexpr, HAS_BIAS: gl.constexpr,
                       OUT: gl.constexpr, SPREAD: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """``y[m, n] = x_scale[m] * sum_k (x[m, k] - x_zero[m]) * W[n, k] + bias[n]``, or its codes.

    x, w, tiles_of_y: descriptors, of codes with blocks (BM, 128) and (128, 128), of y with blocks (BM, 64). KB: stages
    of 128 columns; each has EACH = 1, 2 or 4 groups, or PER of them are a group. scale and sums are descriptors with
    blocks (EACH, 128), the latter only with MOVED (x has zero points; sums of a group's codes). OUT, out_scale,
    out_zero: as for `int8_gemm.tiles`, numbers alone. BAND, SPREAD, parts and counts: as for `groups_hopper`. ALIGNED:
    N is a multiple of 16.
    """
    if ALIGNED:
        N = N // 16 * 16  # tells the compiler
    # 1. Shared memory: a ring of x, w, and the parameters that apply; a result buffer for each group.
    xs = gl.allocate_shared_memory(gl.int8, [STAGES, BM, 128], x.layout)
    ws = gl.allocate_shared_memory(gl.int8, [STAGES, 2 * ROWS, 128], w.layout)
    ss = gl.allocate_shared_memory(scale.dtype, [STAGES, EACH, 2 * ROWS], scale.layout)
    # Sums that do not apply have a stand-in: a constexpr branch never reads them.
    ms = ss
    if MOVED:
        ms = gl.allocate_shared_memory(sums.dtype, [STAGES, EACH, 2 * ROWS], sums.layout)
    y0 = gl.allocate_shared_memory(tiles_of_y.dtype, [BM, ROWS], tiles_of_y.layout)
    y1 = gl.allocate_shared_memory(tiles_of_y.dtype, [BM, ROWS], tiles_of_y.layout)
    # 2. Each of the two consumers reads every stage.
    full, empty = ring(STAGES, 2)
    # TMA signals barriers through the async proxy; it has to see them initialized.
    fence_async_shared()
    # 3. Two consumers and a copying warp; warps and registers as in `gemm_hopper`.
    gl.warp_specialize([
        (_consume, (y, tiles_of_y, x_scale, x_zero, bias, y0, out_scale, out_zero, parts, counts, xs, ws, ss, ms, full,
                    empty, N, M, KB, PER, waves, share, 0, BM, STAGES, BAND, EACH, MOVED, HAS_BIAS, OUT, SPREAD,
                    PDL)),
        (_consume, (y, tiles_of_y, x_scale, x_zero, bias, y1, out_scale, out_zero, parts, counts, xs, ws, ss, ms, full,
                    empty, N, M, KB, PER, waves, share, 1, BM, STAGES, BAND, EACH, MOVED, HAS_BIAS, OUT, SPREAD,
                    PDL)),
        (_produce, (x, w, scale, sums, xs, ws, ss, ms, full, empty, N, M, KB, PER, waves, share, BM, STAGES, BAND, EACH,
                    MOVED, PDL)),
    ], [4, 1], [240, 24])  # fmt: skip
