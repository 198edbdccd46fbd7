"""``int8_hopper``: int8 times int8 per channel for many rows on sm_90, with specialized warps, see `hopper`.

Grid: at most one program per multiprocessor; programs loop over tiles of BM = 128 tokens by BN = 64, 128 or 256 rows of
the weight, K in steps of P = 128 columns. Inputs: codes x ``(M, 128 * blocks)``, w rows16; both are read through tensor
descriptors, and y ``(M, N)`` is stored through one. Floor: ``2 * M * N * K`` operations at the int8 peak.

Exact: products of codes are at most 2**14 in size and are added up in int32 over all of K, which
`qcore_triton.host.blocking` limits to 2**16 here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qcore_triton.kernels.int8_common import ended, tile_order
from qcore_triton.kernels.rounding import begin

from .hopper import WIDEST, advance, cut, leave, ring

# mypy: disable-error-code="unreachable"


@gluon.jit
def _fetch(
    x, w, rings, M, N, blocks,
    P: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Copy codes of x and w to the ring of stages, in the order of their use."""
    xs, ws, full, empty = rings
    rows = (M + BM - 1) // BM
    columns = (N + BN - 1) // BN
    # 1. Let the next kernel be scheduled early: it waits for this one's result by itself.
    if PDL:
        gdc_launch_dependents()
    # 2. The first weights, as many as the ring holds, before the previous kernel has ended: that one has waited for any
    #    kernel that wrote them. They arrive while x cannot be read yet.
    first = gl.program_id(0)
    ahead = gl.minimum(blocks, STAGES)
    if first < rows * columns:
        _, pn = tile_order(first, rows, columns, GROUP_M)
        for i in range(ahead):
            mbarrier.expect(full.index(i), (BM + BN) * P)
            tma.async_copy_global_to_shared(w, [pn * BN, i * P], full.index(i), ws.index(i))
    # 3. x may be the previous kernel's result.
    if PDL:
        gdc_wait()
    # 4. Stages in the order of their use, as far ahead as the ring allows: also across the end of a tile. A writer
    #    starts at parity 1: the first round over the ring does not block.
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for tile in range(first, rows * columns, gl.num_programs(0)):
        pm, pn = tile_order(tile, rows, columns, GROUP_M)
        for i in range(blocks):
            # The first ``ahead`` stages were announced, and their weights requested, in step 2: only x is missing.
            fresh = (tile > first) | (i >= ahead)
            bar = full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(bar, (BM + BN) * P, pred=fresh)
            tma.async_copy_global_to_shared(x, [pm * BM, i * P], bar, xs.index(slot))
            tma.async_copy_global_to_shared(w, [pn * BN, i * P], bar, ws.index(slot), pred=fresh)
            slot, phase = advance(slot, phase, STAGES)


@gluon.jit
def _multiply(
    rings, x_scale, x_zero, scale, sums, bias, y, y_tiles, buffers, out_scale, out_zero, M, N, blocks,
    HALF: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    MOVED: gl.constexpr, HAS_BIAS: gl.constexpr, OUT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply and store one half (0 or 1) of the rows of each tile: BM / 2 tokens by BN columns."""
    xs, ws, full, empty = rings
    H: gl.constexpr = BM // 2
    PIECES: gl.constexpr = max(1, BN // 64)
    Q: gl.constexpr = BN // PIECES
    # The accumulator's layout, and that of one of the PIECES in which a tile is scaled and stored: 64 columns are as
    # many as a 128-byte swizzled store of 16-bit values has.
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(BN, WIDEST), 32])
    piece: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Q, 32])
    begin(PDL)
    rows = (M + BM - 1) // BM
    columns = (N + BN - 1) // BN
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        pm, pn = tile_order(tile, rows, columns, GROUP_M)
        m0, n0 = pm * BM + HALF * H, pn * BN
        # 1. Operands of the epilogue are loaded before the product, not when every warp waits for them.
        rm = m0 + gl.arange(0, H, gl.SliceLayout(1, piece))
        sx = gl.load(x_scale + rm, mask=rm < M, other=0.0)[:, None]
        zx = sx
        if MOVED:
            zx = gl.load(x_zero + rm, mask=rm < M, other=0.0).to(gl.int32)[:, None]
        column = n0 + gl.arange(0, Q, gl.SliceLayout(0, piece))
        scales = ()
        for p in gl.static_range(PIECES):
            scales += (gl.load(scale + column + p * Q, mask=column + p * Q < N, other=0.0),)
        # 2. All of K in one accumulator, a stage per turn.
        acc = gl.zeros((H, BN), gl.int32, layout)
        # Not `slot`: a variable with the same value before a loop and after its first turn counts as loop-invariant.
        before = gl.to_tensor(0)
        for i in range(blocks):
            # 2a. A: this half's tokens; B: the whole step of the weight, transposed. Both stay in shared memory.
            mbarrier.wait(full.index(slot), phase)
            x = xs.index(slot).slice(HALF * H, H)
            acc = warpgroup_mma(x, ws.index(slot).permute((1, 0)), acc, use_acc=i > 0, is_async=True)
            # 2b. The product just issued may run on; the one before it has ended, so its stage is released.
            acc = warpgroup_mma_wait(1, deps=[acc])
            if i > 0:
                mbarrier.arrive(empty.index(before), count=1)
            before = slot
            slot, phase = advance(slot, phase, STAGES)
        # 3. Drain: the last product of the tile, and its stage.
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(before), count=1)
        pieces = cut(acc, PIECES)
        # 4. Epilogue by pieces: less zero points of x, exact in int32, as all of K is; scaled in float32, rounded
        #    once, stored while the next piece is scaled. The copying warp fills stages for the next tile meanwhile.
        for p in gl.static_range(PIECES):
            rn = column + p * Q
            v = gl.convert_layout(pieces[p], piece, assert_trivial=True)
            if MOVED:
                v -= zx * gl.load(sums + rn, mask=rn < N, other=0)[None, :]
            v = v.to(gl.float32) * scales[p].to(gl.float32)[None, :] * sx
            c = ended(v, rm[:, None], rn[None, :], M, N, bias, y, y, out_scale, out_zero, y, HAS_BIAS, OUT)
            leave(c, y_tiles, [m0, n0 + p * Q], buffers, p, PIECES)
    # 5. Shared memory must outlive the last stores, which read it.
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["out_scale", "out_zero", "M", "N", "blocks"])
def int8_hopper(
    x, x_scale, x_zero, w, scale, sums, bias, y, y_tiles, out_scale, out_zero, M, N, blocks,
    P: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    MOVED: gl.constexpr, ALIGNED: gl.constexpr, HAS_BIAS: gl.constexpr, OUT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y ``(M, N)`` by tiles of BM x BN, ``blocks`` steps of P along K.

    x, w, y_tiles: descriptors of codes and result, blocks ``(BM, P)``, ``(BN, P)`` and ``(BM / 2, 64)`` (or BN, if
    less). MOVED: x has zero points. Other arguments as for `int8_gemm.tiles`, numbers alone for OUT. ALIGNED: N is a
    multiple of 16.
    """  # noqa: D403 - y is a name
    if ALIGNED:
        N = N // 16 * 16  # tells the compiler
    # 1. Shared memory: a ring of x and w; for each multiplying group two buffers of results.
    xs = gl.allocate_shared_memory(gl.int8, [STAGES, BM, P], x.layout)
    ws = gl.allocate_shared_memory(gl.int8, [STAGES, BN, P], w.layout)
    y0 = gl.allocate_shared_memory(y.dtype.element_ty, [2] + y_tiles.block_shape, y_tiles.layout)
    y1 = gl.allocate_shared_memory(y.dtype.element_ty, [2] + y_tiles.block_shape, y_tiles.layout)
    # 2. Each of the two multiplying groups reads every stage.
    full, empty = ring(STAGES, 2)
    rings = (xs, ws, full, empty)
    # 3. Two multiplying groups and a copying warp. Tuples with constants are written in place: bound to a variable,
    #    their constants would become runtime values.
    gl.warp_specialize(
        [
            (_multiply, (rings, x_scale, x_zero, scale, sums, bias, y, y_tiles, y0, out_scale, out_zero, M, N, blocks,
                         0, BM, BN, STAGES, GROUP_M, MOVED, HAS_BIAS, OUT, PDL)),
            (_multiply, (rings, x_scale, x_zero, scale, sums, bias, y, y_tiles, y1, out_scale, out_zero, M, N, blocks,
                         1, BM, BN, STAGES, GROUP_M, MOVED, HAS_BIAS, OUT, PDL)),
            (_fetch, (x, w, rings, M, N, blocks, P, BM, BN, STAGES, GROUP_M, PDL)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
