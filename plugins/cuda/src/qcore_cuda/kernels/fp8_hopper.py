"""``fp8_hopper``: e4m3 times e4m3 on Hopper, in Gluon, with sums of 128 products added up in float32.

The tensor cores keep about 14 bits of a sum of e4m3 products. So each step of 128 columns is a sum of its own, which is
added to the result in float32, after its scales if blocks of 128 have their own, while the tensor cores work for the
other of two warpgroups. One warp copies x and the weight through tensor descriptors into a ring of stages.

Grid: at most one program per multiprocessor, one-dimensional; programs loop over tiles. Tiles: BM = 128 tokens by BN
rows of the weight, K in steps of 128. Inputs: x ``(M, K)`` and w ``(N, K)``, bytes, 0 behind K; x_scale ``(M,)`` or
``(K / 128, M)``, scale ``(1, N)`` or ``(K / 128, N)``; y ``(M, N)``. Floor: ``2 * M * N * K`` operations at fp8 speed.
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

from qcore_triton.kernels.elements import pitch_of
from qcore_triton.kernels.int8_common import tile_order

from .hopper import advance, leave, ring

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

WIDTH = gl.constexpr(128)
"""The most rows of the weight that a warpgroup multiplies at a time: their sums take 64 registers."""


@gluon.jit
def _fetch(x, w, rings, M, N, blocks, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
           PDL: gl.constexpr):  # fmt: skip
    """Copy x and w to the ring of stages, in the order of their use."""
    xs, ws, full, empty = rings
    rows = (M + BM - 1) // BM
    columns = (N + BN - 1) // BN
    if PDL:
        gdc_wait()
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for tile in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        pm, pn = tile_order(tile, rows, columns, GROUP_M)
        for i in range(blocks):
            bar = full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(bar, (BM + BN) * 128)
            tma.async_copy_global_to_shared(x, [pm * BM, i * 128], bar, xs.index(slot))
            tma.async_copy_global_to_shared(w, [pn * BN, i * 128], bar, ws.index(slot))
            slot, phase = advance(slot, phase, STAGES)


@gluon.jit
def _step(acc, x, w, scales, following, there, BLOCKS: gl.constexpr, SQUARE: gl.constexpr, LAYOUT: gl.constexpr):
    """A sum plus the products of 128 columns, of 64 tokens with as many rows of the weight as acc has.

    BLOCKS: scales: theirs, of tokens and of rows of the weight; those of the following step are loaded from
    ``following`` where ``there`` says, and returned with the sum. SQUARE: of rows there is one.
    """
    part = gl.zeros(acc.shape, gl.float32, LAYOUT)
    part = warpgroup_mma(x, w.permute((1, 0)), part, use_acc=False, is_async=True)
    if BLOCKS:
        # Memory takes longer than the tensor cores: what is loaded here is used a step later. Loads come behind the
        # product, all of whose instructions would wait for what is loaded before it.
        next_x = gl.load(following[0], mask=there[0], other=0.0)
        next_w = gl.load(following[1], mask=there[1], other=0.0)
        by = scales[0] * scales[1] if SQUARE else scales[0]
        part = warpgroup_mma_wait(0, deps=[part])
        if SQUARE:
            acc += part * by[:, None]
        else:
            acc += part * by[:, None] * scales[1][None, :]
        scales = (next_x, next_w)
    else:
        part = warpgroup_mma_wait(0, deps=[part])
        acc += part
    return acc, scales


@gluon.jit
def _multiply(rings, x_scale, scale, bias, y, y_tiles, buffers, M, N, blocks, HALF: gl.constexpr, BM: gl.constexpr,
              BN: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, BLOCKS: gl.constexpr,
              SQUARE: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Multiply and store one half (0 or 1) of the tokens of each tile."""
    xs, ws, full, empty = rings
    W: gl.constexpr = min(BN, WIDTH)
    PARTS: gl.constexpr = BN // W
    PIECES: gl.constexpr = W // 64
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 32])
    PIECE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    if PDL:
        gdc_wait()
    rows = (M + BM - 1) // BM
    columns = (N + BN - 1) // BN
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        pm, pn = tile_order(tile, rows, columns, GROUP_M)
        m0, n0 = pm * BM + HALF * 64, pn * BN
        rm = m0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        rn = n0 + gl.arange(0, W, gl.SliceLayout(0, LAYOUT))
        acc0 = gl.zeros((64, W), gl.float32, LAYOUT)
        acc1 = acc0
        # Of each block the columns' scales, behind N are zeros; SQUARE: one scale for 128 of them.
        line = (N + 127) // 128 if SQUARE else pitch_of(N)
        column = n0 // 128 if SQUARE else rn
        scales = (rm, rm)
        if BLOCKS:
            scales = (gl.load(x_scale + rm, mask=rm < M, other=0.0),
                      gl.load(scale + column, mask=column < line, other=0.0))  # fmt: skip
        for i in range(blocks):
            following = (x_scale + (i + 1) * M + rm, scale + (i + 1) * line + column)
            there = ((rm < M) & (i + 1 < blocks), (column < line) & (i + 1 < blocks))
            mbarrier.wait(full.index(slot), phase)
            x = xs.index(slot).slice(HALF * 64, 64)
            w = ws.index(slot)
            acc0, scales = _step(acc0, x, w.slice(0, W), scales, following, there, BLOCKS, SQUARE, LAYOUT)
            if PARTS == 2:
                gl.static_assert(not BLOCKS, "sums of more than 128 rows leave no registers for scales")
                acc1, scales = _step(acc1, x, w.slice(W, W), scales, following, there, BLOCKS, SQUARE, LAYOUT)
            mbarrier.arrive(empty.index(slot), count=1)
            slot, phase = advance(slot, phase, STAGES)
        # The epilogue by pieces of 64 rows of the weight: scaled, plus bias, rounded once.
        for part in gl.static_range(PARTS):
            acc = acc1 if part == 1 else acc0
            low = acc
            high = acc
            if PIECES == 2:
                low, high = acc.reshape((64, 2, 64)).permute((0, 2, 1)).split()
            for h in gl.static_range(PIECES):
                v = gl.convert_layout(high if h == 1 else low, PIECE, assert_trivial=True)
                first = n0 + part * W + h * 64
                n = first + gl.arange(0, 64, gl.SliceLayout(0, PIECE))
                if not BLOCKS:
                    token = m0 + gl.arange(0, 64, gl.SliceLayout(1, PIECE))
                    v *= gl.load(x_scale + token, mask=token < M, other=0.0)[:, None]
                    v *= gl.load(scale + n, mask=n < N, other=0.0)[None, :]
                if HAS_BIAS:
                    v += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
                leave(v.to(y.dtype.element_ty), y_tiles, [m0, first], buffers, PIECES * part + h, PIECES * PARTS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "blocks"])
def fp8_hopper(x, x_scale, w, scale, bias, y, y_tiles, M, N, blocks, BM: gl.constexpr, BN: gl.constexpr,
               STAGES: gl.constexpr, GROUP_M: gl.constexpr, BLOCKS: gl.constexpr, SQUARE: gl.constexpr,
               ALIGNED: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """y ``(M, N)``, ``blocks`` steps of 128 along K; BLOCKS: each of them has scales of its own.

    SQUARE: 128 rows of the weight share one, scale is ``(K / 128, N / 128)``.

    x, w, y_tiles: descriptors with blocks ``(BM, 128)``, ``(BN, 128)`` and ``(64, 64)``. ALIGNED: N is a
    multiple of 16.
    """  # noqa: D403 - y is a name
    if PDL:
        gdc_launch_dependents()
    if ALIGNED:
        N = N // 16 * 16  # tells the compiler
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, 128], x.layout)
    ws = gl.allocate_shared_memory(w.dtype, [STAGES, BN, 128], w.layout)
    y0 = gl.allocate_shared_memory(y.dtype.element_ty, [2] + y_tiles.block_shape, y_tiles.layout)
    y1 = gl.allocate_shared_memory(y.dtype.element_ty, [2] + y_tiles.block_shape, y_tiles.layout)
    full, empty = ring(STAGES, 2)
    fence_async_shared()
    rings = (xs, ws, full, empty)
    gl.warp_specialize([
        (_multiply, (rings, x_scale, scale, bias, y, y_tiles, y0, M, N, blocks, 0, BM, BN, STAGES, GROUP_M, BLOCKS,
                     SQUARE, HAS_BIAS, PDL)),
        (_multiply, (rings, x_scale, scale, bias, y, y_tiles, y1, M, N, blocks, 1, BM, BN, STAGES, GROUP_M, BLOCKS,
                     SQUARE, HAS_BIAS, PDL)),
        (_fetch, (x, w, rings, M, N, blocks, BM, BN, STAGES, GROUP_M, PDL)),
    ], [4, 1], [240, 24])  # fmt: skip
