"""``convolve``: implicit convolutions of stride 1, int8 per channel, on sm_90, with specialized warps, see `hopper`.

The rows of a tile are a box of output positions: at each tap of the kernel they read a box of the image, which one
tensor descriptor copies. If all of x has one scale, x comes as codes. If each column has its own
(`conv.column_scales`), a code depends on the column: then four warps encode each box that was copied.

Grid: at most one program per multiprocessor; programs loop over tiles of 128 output positions by BN = 64, 128 or 256
output channels. K, in (tap, channel) order, goes in steps of 128 channels of one tap. Inputs: x ``(B, H, W, C)``
channels-last, w rows16 ``(OC, KH * KW * C)``; y ``(B, OH, OW, OC)``. Floor: ``2 * B * OH * OW * OC * KH * KW * C``
operations at the int8 peak of the tensor cores.

Exact: sums of products of codes fit int32, K being below 2**15 (`convolutions`).
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

from qcore_triton.kernels.int8_common import ended
from qcore_triton.kernels.rounding import begin

from .hopper import WIDEST, advance, cut, leave, ring

# mypy: disable-error-code="unreachable"


@gluon.jit
def _place(tile, sizes, SHAPE: gl.constexpr, BN: gl.constexpr):
    """The first image, row, column and output channel of a tile; neighbouring tiles share a box of x."""
    tiles_h, tiles_w, columns = sizes
    t = tile // columns
    return (
        t // tiles_w // tiles_h * SHAPE[0],
        t // tiles_w % tiles_h * SHAPE[1],
        t % tiles_w * SHAPE[2],
        tile % columns * BN,
    )


@gluon.jit
def _positions(b, h, w, row, limits, SHAPE: gl.constexpr):
    """The indices of the output positions in rows of a tile, and a mask of those inside the result."""
    B, OH, OW = limits
    b += row // (SHAPE[1] * SHAPE[2])
    h += row // SHAPE[2] % SHAPE[1]
    w += row % SHAPE[2]
    return (b * OH + h) * OW + w, (b < B) & (h < OH) & (w < OW)


@gluon.jit
def _fetch(
    x,
    w,
    rings,
    sizes,
    tiles,
    window,
    per_tap,
    SHAPE: gl.constexpr,
    BN: gl.constexpr,
    XS: gl.constexpr,
    STAGES: gl.constexpr,
    ENCODE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Copy boxes of x (codes, or values if ENCODE) and codes of w to their stages, in the order of their use."""
    P: gl.constexpr = 128
    xs, ws, full, empty, x_full, x_empty = rings
    KW, taps, dilation_h, dilation_w, top, left = window
    X_BYTES: gl.constexpr = SHAPE[0] * SHAPE[1] * SHAPE[2] * P * x.dtype.primitive_bitwidth // 8
    begin(PDL)
    # Stages in the order of their use, as far ahead as the rings allow: also across the end of a tile. Writers start at
    # parity 1: the first round over a ring does not block. Boxes to be encoded have a ring of their own; codes share
    # the stage of the weight.
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    x_slot = gl.to_tensor(0)
    x_phase = gl.to_tensor(1)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, h0, w0, n0 = _place(tile, sizes, SHAPE, BN)
        for tap in range(taps):
            # 1. The box that this tap reads. Positions outside the image, negative ones too, are filled with zeros by
            #    TMA; codes come with their border, so top and left are 0 then.
            h = h0 + tap // KW * dilation_h - top
            v = w0 + tap % KW * dilation_w - left
            for i in range(per_tap):
                # 2. A box of values goes to the ring that `_encode` reads: first, because encoding comes before the
                #    product.
                if ENCODE:
                    mbarrier.wait(x_empty.index(x_slot), x_phase)
                    mbarrier.expect(x_full.index(x_slot), X_BYTES)
                    tma.async_copy_global_to_shared(x, [b, h, v, i * P], x_full.index(x_slot), xs.index(x_slot))
                    x_slot, x_phase = advance(x_slot, x_phase, XS)
                # 3. The weight of this step, and with codes also their box, arrive on one barrier.
                bar = full.index(slot)
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(bar, BN * P if ENCODE else BN * P + X_BYTES)
                tma.async_copy_global_to_shared(w, [n0, (tap * per_tap + i) * P], bar, ws.index(slot))
                if not ENCODE:
                    tma.async_copy_global_to_shared(x, [b, h, v, i * P], bar, xs.index(slot))
                slot, phase = advance(slot, phase, STAGES)


@gluon.jit
def _encode(
    xs,
    codes,
    x_full,
    x_empty,
    full,
    empty,
    inverse,
    sizes,
    limits,
    tiles,
    blocks,
    SHAPE: gl.constexpr,
    BN: gl.constexpr,
    XS: gl.constexpr,
    CODES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Encode boxes of x: bfloat16 values times the reciprocal of their column's scale, see `quantize.inverse_of`."""
    BM: gl.constexpr = SHAPE[0] * SHAPE[1] * SHAPE[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    begin(PDL)
    row = gl.arange(0, BM, gl.SliceLayout(1, layout))
    # A reader of boxes, which starts at parity 0, and a writer of codes, which starts at 1.
    x_slot = gl.to_tensor(0)
    x_phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, h, w, _ = _place(tile, sizes, SHAPE, BN)
        m, real = _positions(b, h, w, row, limits, SHAPE)
        # 1. One factor per row of the tile, for all taps and channels.
        factor = gl.load(inverse + m, mask=real, other=0.0)
        for _ in range(blocks):
            # 2. The box is in registers once it is loaded: its stage is released before encoding, and refilled during
            #    it.
            mbarrier.wait(x_full.index(x_slot), x_phase)
            v = xs.index(x_slot).reshape((BM, 128)).load(layout)
            mbarrier.arrive(x_empty.index(x_slot), count=1)
            # 3. Adding 1.5 * 2**23 rounds to whole numbers, half to even, and leaves them in the low bits.
            q = v.to(gl.float32) * factor[:, None] + 12582912.0
            # 4. Only now wait until both multiplying groups have released the stage of codes.
            mbarrier.wait(empty.index(slot), phase)
            codes.index(slot).store(q.to(gl.int32, bitcast=True).to(gl.int8))
            # 5. wgmma reads shared memory through the async proxy; the fence orders the stores above before it.
            fence_async_shared()
            mbarrier.arrive(full.index(slot), count=1)
            x_slot, x_phase = advance(x_slot, x_phase, XS)
            slot, phase = advance(slot, phase, CODES)


@gluon.jit
def _multiply(
    rings,
    factors,
    bias,
    y,
    y_tiles,
    buffers,
    numbers,
    sizes,
    limits,
    tiles,
    N,
    blocks,
    HALF: gl.constexpr,
    SHAPE: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CODES: gl.constexpr,
    ENCODE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    OUT: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply and store one half (0 or 1) of the rows of each tile: 64 output positions by BN channels."""
    codes, ws, full, empty, c_full, c_empty = rings
    scale, sums, x_scales = factors
    x_scale, x_zero, out_scale, out_zero = numbers
    BM: gl.constexpr = SHAPE[0] * SHAPE[1] * SHAPE[2]
    H: gl.constexpr = BM // 2
    PIECES: gl.constexpr = max(1, BN // 64)
    Q: gl.constexpr = BN // PIECES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(BN, WIDEST), 32])
    piece: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Q, 32])
    begin(PDL)
    # The weight's ring, and that of codes made here; without ENCODE both operands share a stage.
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    c_slot = gl.to_tensor(0)
    c_phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, h, w, n0 = _place(tile, sizes, SHAPE, BN)
        # 1. Operands of the epilogue are loaded before the product, not when every warp waits for them.
        row = gl.arange(0, H, gl.SliceLayout(1, piece))
        if ENCODE:
            m, real = _positions(b, h, w, row + HALF * H, limits, SHAPE)
            sx = gl.load(x_scales + m, mask=real, other=0.0)[:, None]
        else:
            sx = x_scale
        column = n0 + gl.arange(0, Q, gl.SliceLayout(0, piece))
        scales = ()
        for p in gl.static_range(PIECES):
            scales += (gl.load(scale + column + p * Q, mask=column + p * Q < N, other=0.0),)
        # 2. All taps and channels in one accumulator, a stage per turn.
        acc = gl.zeros((H, BN), gl.int32, layout)
        # Not `slot`: a variable with the same value before a loop and after its first turn counts as loop-invariant.
        before = gl.to_tensor(0)
        c_before = gl.to_tensor(0)
        for i in range(blocks):
            # 2a. A: this half's positions; B: the weight of the step, transposed. Both stay in shared memory.
            mbarrier.wait(full.index(slot), phase)
            if ENCODE:
                mbarrier.wait(c_full.index(c_slot), c_phase)
                a = codes.index(c_slot).slice(HALF * H, H)
            else:
                a = codes.index(slot).reshape((BM, 128)).slice(HALF * H, H)
            acc = warpgroup_mma(a, ws.index(slot).permute((1, 0)), acc, use_acc=i > 0, is_async=True)
            # 2b. The product just issued may run on; the one before it has ended, so its stages are released.
            acc = warpgroup_mma_wait(1, deps=[acc])
            if i > 0:
                mbarrier.arrive(empty.index(before), count=1)
                if ENCODE:
                    mbarrier.arrive(c_empty.index(c_before), count=1)
            before = slot
            c_before = c_slot
            slot, phase = advance(slot, phase, STAGES)
            if ENCODE:
                c_slot, c_phase = advance(c_slot, c_phase, CODES)
        # 3. Drain: the last product of the tile, and its stages.
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(before), count=1)
        if ENCODE:
            mbarrier.arrive(c_empty.index(c_before), count=1)
        pieces = cut(acc, PIECES)
        # 4. Epilogue by pieces, while the other warps fill stages for the next tile. The origin of this half's box:
        #    boxes are halved along their first side that is longer than 1.
        if SHAPE[0] > 1:
            b += HALF * (SHAPE[0] // 2)
        elif SHAPE[1] > 1:
            h += HALF * (SHAPE[1] // 2)
        else:
            w += HALF * (SHAPE[2] // 2)
        for p in gl.static_range(PIECES):
            v = gl.convert_layout(pieces[p], piece, assert_trivial=True)
            rn = column + p * Q
            if not ENCODE:
                # The zero point of x times the sum of the weight's codes, in int32; symmetric columns have none.
                v -= (gl.load(sums + rn, mask=rn < N, other=0) * x_zero.to(gl.int32))[None, :]
            f = v.to(gl.float32) * scales[p].to(gl.float32)[None, :] * sx
            c = ended(f, row[:, None], rn[None, :], H, N, bias, y, y, out_scale, out_zero, y, HAS_BIAS, OUT)
            leave(c, y_tiles, [b, h, w, n0 + p * Q], buffers, p, PIECES)
    # 5. Shared memory must outlive the last stores, which read it.
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "x_scale", "x_zero", "out_scale", "out_zero", "B", "OH", "OW", "N", "per_tap", "tiles_h", "tiles_w", "columns",
        "KW", "taps", "dilation_h", "dilation_w", "top", "left",
    ]
)  # fmt: skip
def convolve(
    x,
    w,
    scale,
    sums,
    x_scales,
    inverse,
    bias,
    y,
    y_tiles,
    x_scale,
    x_zero,
    out_scale,
    out_zero,
    B,
    OH,
    OW,
    N,
    per_tap,
    tiles_h,
    tiles_w,
    columns,
    KW,
    taps,
    dilation_h,
    dilation_w,
    top,
    left,
    SHAPE: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    XS: gl.constexpr,
    CODES: gl.constexpr,
    ENCODE: gl.constexpr,
    ALIGNED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    OUT: gl.constexpr,
    PDL: gl.constexpr,
):
    """y ``(B, OH, OW, N)`` by tiles of SHAPE (images, rows, columns; 128 in all) x BN.

    x: descriptor of ``(B, H, W, 128 * per_tap)``, block ``(*SHAPE, 128)``: codes, all of one scale and zero point, with
    the border of the image; or values, if ENCODE, with ``x_scales`` and ``inverse`` of `conv.column_scales`. w: of
    rows16, ``(BN, 128)``. y_tiles: half of SHAPE, and 64 (or BN, if less) channels. ALIGNED: N is a multiple
    of 16.
    """  # noqa: D403 - y is a name
    if ALIGNED:
        N = N // 16 * 16  # tells the compiler
    codes: gl.constexpr = w.layout
    BM: gl.constexpr = SHAPE[0] * SHAPE[1] * SHAPE[2]
    # 1. Shared memory: rings of the weight and of boxes of x; for each multiplying group two buffers of results.
    ws = gl.allocate_shared_memory(gl.int8, [STAGES, BN, 128], codes)
    xs = gl.allocate_shared_memory(x.dtype, [XS if ENCODE else STAGES] + x.block_shape, x.layout)
    y0 = gl.allocate_shared_memory(y.dtype.element_ty, [2] + y_tiles.block_shape, y_tiles.layout)
    y1 = gl.allocate_shared_memory(y.dtype.element_ty, [2] + y_tiles.block_shape, y_tiles.layout)
    # 2. Each of the two multiplying groups reads every stage.
    full, empty = ring(STAGES, 2)
    sizes = (tiles_h, tiles_w, columns)
    limits = (B, OH, OW)
    window = (KW, taps, dilation_h, dilation_w, top, left)
    numbers = (x_scale, x_zero, out_scale, out_zero)
    factors = (scale, sums, x_scales)
    blocks = taps * per_tap
    tiles = (B + SHAPE[0] - 1) // SHAPE[0] * tiles_h * tiles_w * columns
    # 3. Two multiplying groups, a copying warp, and if x has to be encoded four warps in between, with a ring of codes.
    #    Tuples with constants are written in place: bound to a variable, their constants would become runtime values.
    if ENCODE:
        cs = gl.allocate_shared_memory(gl.int8, [CODES, BM, 128], codes)
        # Boxes have one reader, the encoding warps; codes have the two multiplying groups.
        x_full, x_empty = ring(XS, 1)
        c_full, c_empty = ring(CODES, 2)
        rings = (cs, ws, full, empty, c_full, c_empty)
        gl.warp_specialize(
            [
                (_multiply, (rings, factors, bias, y, y_tiles, y0, numbers, sizes, limits, tiles, N, blocks,
                             0, SHAPE, BN, STAGES, CODES, True, HAS_BIAS, OUT, PDL)),
                (_multiply, (rings, factors, bias, y, y_tiles, y1, numbers, sizes, limits, tiles, N, blocks,
                             1, SHAPE, BN, STAGES, CODES, True, HAS_BIAS, OUT, PDL)),
                (_encode, (xs, cs, x_full, x_empty, c_full, c_empty, inverse, sizes, limits, tiles, blocks,
                           SHAPE, BN, XS, CODES, PDL)),
                (_fetch, (x, w, (xs, ws, full, empty, x_full, x_empty), sizes, tiles, window, per_tap,
                          SHAPE, BN, XS, STAGES, True, PDL)),
            ],
            [4, 4, 1],
            [184, 120, 24],
        )  # fmt: skip
    else:
        rings = (xs, ws, full, empty, full, empty)
        gl.warp_specialize(
            [
                (_multiply, (rings, factors, bias, y, y_tiles, y0, numbers, sizes, limits, tiles, N, blocks,
                             0, SHAPE, BN, STAGES, 0, False, HAS_BIAS, OUT, PDL)),
                (_multiply, (rings, factors, bias, y, y_tiles, y1, numbers, sizes, limits, tiles, N, blocks,
                             1, SHAPE, BN, STAGES, 0, False, HAS_BIAS, OUT, PDL)),
                (_fetch, (x, w, rings, sizes, tiles, window, per_tap, SHAPE, BN, 0, STAGES, False, PDL)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
