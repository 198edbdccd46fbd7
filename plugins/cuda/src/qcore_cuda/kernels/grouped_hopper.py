"""``grouped_hopper``: `gemm_hopper` for several experts, each with rows of its own: many rows on Hopper, in Gluon.

`list_tiles` reads the ends of the experts' rows and writes down the tiles of BM rows that there are; the product's
programs, at most one per multiprocessor, walk through that list. Within an expert, tiles that share rows of its weight
run next to each other, and bands of tiles share x.

Tiles: 128 rows of an expert's weight by BM of its rows of x; the last of its tiles has fewer rows, and is stored row by
row instead of by TMA. Inputs as for `gemm_hopper`, weights and their parameters one expert after the other. Floor:
``2 * T * N * K`` operations at the 16-bit peak of the tensor cores, or the packed weights at the memory's bandwidth.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qcore_triton.kernels.elements import pitch_of, scale_value
from qcore_triton.kernels.int8_common import tile_order

from .gemm_hopper import blocks, first_half
from .grouped import fill_behind, rows_of
from .hopper import advance, ring
from .operands_hopper import ROWS

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"


@triton.jit(do_not_specialize=["E", "T", "N"])
def list_tiles(offsets, table, y, E, T, N, SE: tl.constexpr, BM: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """Write the tiles of BM rows: their number, and from ``table + 4`` on four numbers for each.

    These are its expert, the first tile of the expert, and the expert's first row and the end of its rows. Rows of y
    that belong to no expert become 0. Grid: one program per B tiles that there may be.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    begins, ends = rows_of(offsets, E, T, SE)
    upto = tl.cumsum((ends - begins + BM - 1) // BM, 0)
    tile = tl.program_id(0) * B + tl.arange(0, B)
    before = upto[:, None] <= tile[None, :]
    expert = tl.sum(before.to(tl.int32), 0)
    first = tl.max(tl.where(before, upto[:, None], 0), 0)
    mine = tl.arange(0, SE)[:, None] == expert[None, :]
    begin = tl.max(tl.where(mine, begins[:, None], 0), 0)
    end = tl.max(tl.where(mine, ends[:, None], 0), 0)
    total = tl.max(upto, 0)
    real = tile < total
    at = table + 4 + tile * 4
    tl.store(at, expert, mask=real)
    tl.store(at + 1, first, mask=real)
    tl.store(at + 2, begin, mask=real)
    tl.store(at + 3, end, mask=real)
    if tl.program_id(0) == 0:
        tl.store(table, total)
    fill_behind(y, offsets, E, T, N, 1024)


@gluon.jit
def _tile_at(tile, table, tiles_n, BM: gl.constexpr, GROUP: gl.constexpr):
    """The expert of a tile, its first row of x, the end of the expert's rows, and its first row of the weight."""
    at = table + 4 + tile // tiles_n * 4
    first = gl.load(at + 1)
    begin = gl.load(at + 2)
    end = gl.load(at + 3)
    tile_m, tile_n = tile_order(tile - first * tiles_n, gl.cdiv(end - begin, BM), tiles_n, GROUP)
    return gl.load(at), begin + tile_m * BM, end, tile_n * (2 * ROWS)


@gluon.jit
def _produce(x, w, scale, zero, table, xs, ws, ss, zs, full, empty, N, NP, KB, PER, groups, BITS: gl.constexpr,
             BM: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, EACH: gl.constexpr,
             SCALED: gl.constexpr, ZERO: gl.constexpr):  # fmt: skip
    """Fill stages in the order of their use, as in `gemm_hopper`."""
    BN: gl.constexpr = 2 * ROWS
    STAGE: gl.constexpr = BM * 128 + (BN * 64 if BITS == 8 else 0)
    SCALES: gl.constexpr = EACH * BN * scale.dtype.primitive_bitwidth // 8 if SCALED else 0
    ZEROS: gl.constexpr = EACH * BN * zero.dtype.primitive_bitwidth // 8 if ZERO else 0
    BLOCK: gl.constexpr = (BN * 64 if BITS == 4 else 0) + SCALES + ZEROS
    tiles_n = gl.cdiv(N, BN)
    tile = gl.program_id(0)
    total = gl.load(table) * tiles_n
    at = 0
    turn = 1
    slot = 0
    while tile < total:
        expert, m0, end, n0 = _tile_at(tile, table, tiles_n, BM, GROUP)
        parameters = expert * groups
        for b in range(KB):
            for half in gl.static_range(2):
                mbarrier.wait(empty.index(at), turn)
                here = full.index(at)
                mbarrier.expect(here, STAGE + (BLOCK if half == 0 else 0))
                for g in gl.static_range(2):
                    n = expert * NP + n0 + g * ROWS
                    if BITS == 8:
                        tma.async_copy_global_to_shared(w, [n, b * 64 + half * 32], here, ws.index(2 * at + g))
                    elif half == 0:
                        tma.async_copy_global_to_shared(w, [n // 16, b * 256], here, ws.index(2 * slot + g))
                row = parameters + (b * EACH if EACH > 1 else b // PER)
                if SCALED and half == 0:
                    tma.async_copy_global_to_shared(scale, [row, n0], here, ss.index(slot))
                if ZERO and half == 0:
                    tma.async_copy_global_to_shared(zero, [row, n0], here, zs.index(slot))
                tma.async_copy_global_to_shared(x, [m0, b * 128 + half * 64], here, xs.index(at))
                at, turn = advance(at, turn, STAGES)
            slot = advance(slot, 0, SLOTS)[0]
        tile += gl.num_programs(0)


@gluon.jit
def _leave(acc, y, result, scale, factor, bias, row_scale, ys, expert, m0, end, n0, N, SCALED: gl.constexpr,
           FACTOR: gl.constexpr, BIAS: gl.constexpr, ROW_SCALES: gl.constexpr, PIECES: gl.constexpr):  # fmt: skip
    """A group's sums of a tile, scaled and rounded, on their way to y: a descriptor; result: the pointer to it."""
    BM: gl.constexpr = acc.shape[1]
    PIECE: gl.constexpr = BM // PIECES
    n = gl.minimum(n0 + gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout)), N - 1)
    own = expert.to(gl.int64)
    if not SCALED:
        acc *= scale_value(gl.load(scale + own * pitch_of(N) + n), scale.dtype.element_ty)[:, None]
    if FACTOR:
        acc *= gl.load(factor + expert)
    if ROW_SCALES:
        m = gl.minimum(m0 + gl.arange(0, BM, gl.SliceLayout(0, acc.type.layout)), end - 1)
        acc *= gl.load(row_scale + m)[None, :]
    if BIAS:
        acc += gl.load(bias + own * N + n).to(gl.float32)[:, None]
    first = acc.to(y.dtype)
    second = first
    if PIECES == 2:
        first, second = first.reshape([ROWS, 2, PIECE]).permute((0, 2, 1)).split()
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for i in gl.static_range(PIECES):
        # One buffer per group: the copy of the previous piece or tile must have read it.
        tma.store_wait(0)
        ys.permute((1, 0)).store(first if i == 0 else second)
        row = m0 + i * PIECE
        if row + PIECE <= end:
            fence_async_shared()
            tma.async_copy_shared_to_global(y, [row, n0], ys)
        else:
            # Behind the end come rows of the next expert, whose results are another tile's.
            values = ys.load(ROW)
            r = row + gl.arange(0, PIECE, gl.SliceLayout(1, ROW))
            c = n0 + gl.arange(0, ROWS, gl.SliceLayout(0, ROW))
            where = result + r.to(gl.int64)[:, None] * N + c[None, :]
            gl.store(where, values, mask=(r < end)[:, None] & (c < N)[None, :])


@gluon.jit
def _consume(y, result, scale, factor, bias, row_scale, table, ys, xs, ws, ss, zs, full, empty, N, KB,
             BITS: gl.constexpr, WG: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
             GROUP: gl.constexpr, EACH: gl.constexpr, SCALED: gl.constexpr, ZERO: gl.constexpr, BIAS: gl.constexpr,
             ROW_SCALES: gl.constexpr, PIECES: gl.constexpr, U: gl.constexpr, ELEMENT: gl.constexpr,
             FACTOR: gl.constexpr):  # fmt: skip
    """Group WG of two: 64 rows of the weight of each tile, as in `gemm_hopper`."""
    DT: gl.constexpr = xs.dtype
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    tiles_n = gl.cdiv(N, 2 * ROWS)
    tile = gl.program_id(0)
    total = gl.load(table) * tiles_n
    # Blocks to come in all tiles of this program; there may be none.
    left = gl.maximum(0, gl.cdiv(total - tile, gl.num_programs(0))) * KB
    at = 0
    turn = 0
    slot = 0
    mbarrier.wait(full.index(0), 0, pred=left > 0)
    low, raw, s, z = first_half(0, 0, ws, ss, zs, DT, BITS, WG, EACH, SCALED, ZERO, DOT, ELEMENT)
    while tile < total:
        expert, m0, end, n0 = _tile_at(tile, table, tiles_n, BM, GROUP)
        acc = gl.zeros([ROWS, BM], gl.float32, ACC)
        for _ in range(KB // U):
            acc, low, raw, s, z, at, turn, slot = blocks(
                U, left, acc, low, raw, s, z, at, turn, slot, xs, ws, ss, zs, full, empty, BITS, WG, STAGES, SLOTS,
                EACH, SCALED, ZERO, DOT, ELEMENT)  # fmt: skip
            left -= U
        if U > 1:
            for _ in range(KB % U):
                acc, low, raw, s, z, at, turn, slot = blocks(
                    1, left, acc, low, raw, s, z, at, turn, slot, xs, ws, ss, zs, full, empty, BITS, WG, STAGES, SLOTS,
                    EACH, SCALED, ZERO, DOT, ELEMENT)  # fmt: skip
                left -= 1
        _leave(acc, y, result, scale, factor, bias, row_scale, ys, expert, m0, end, n0 + WG * ROWS, N, SCALED, FACTOR,
               BIAS, ROW_SCALES, PIECES)  # fmt: skip
        tile += gl.num_programs(0)
    # Shared memory must outlive the last store, which reads it.
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "NP", "KB", "PER", "groups"])
def grouped_hopper(
    x, w, scale, zero, factor, bias, row_scale, table, result, y, N, NP, KB, PER, groups, BITS: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, EACH: gl.constexpr, SCALED: gl.constexpr,
    ZERO: gl.constexpr, BIAS: gl.constexpr, ROW_SCALES: gl.constexpr, PIECES: gl.constexpr, U: gl.constexpr,
    PDL: gl.constexpr, ELEMENT: gl.constexpr, FACTOR: gl.constexpr,
):  # fmt: skip
    """As `kernels.grouped.grouped_tiles`, with the list of `list_tiles`.

    x, w, scale, zero, y: descriptors as for `gemm_hopper`, those of the weight with rows of all experts: NP of the
    weight, ``groups`` of parameters each; ``factor``: float32 (E,) if FACTOR; ``result``: y as a pointer. N is a
    multiple of 8.
    """
    N = N // 8 * 8  # tells the compiler
    if PDL:
        gdc_launch_dependents()
    SLOTS: gl.constexpr = (STAGES + 1) // 2
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, 64], x.layout)
    COUNT: gl.constexpr = 2 * (SLOTS if BITS == 4 else STAGES)
    ws = gl.allocate_shared_memory(w.dtype, [COUNT, w.block_shape[0], w.block_shape[1]], w.layout)
    ss = ws
    zs = ws
    if SCALED:
        ss = gl.allocate_shared_memory(scale.dtype, [SLOTS, EACH, 2 * ROWS], scale.layout)
    if ZERO:
        zs = gl.allocate_shared_memory(zero.dtype, [SLOTS, EACH, 2 * ROWS], zero.layout)
    y0 = gl.allocate_shared_memory(y.dtype, [BM // PIECES, ROWS], y.layout)
    y1 = gl.allocate_shared_memory(y.dtype, [BM // PIECES, ROWS], y.layout)
    full, empty = ring(STAGES, 2)
    fence_async_shared()
    # The list of tiles is the previous kernel's result: everybody reads it.
    if PDL:
        gdc_wait()
    gl.warp_specialize([
        (_consume, (y, result, scale, factor, bias, row_scale, table, y0, xs, ws, ss, zs, full, empty, N, KB, BITS, 0,
                    BM, STAGES, SLOTS, GROUP, EACH, SCALED, ZERO, BIAS, ROW_SCALES, PIECES, U, ELEMENT,
                    FACTOR)),
        (_consume, (y, result, scale, factor, bias, row_scale, table, y1, xs, ws, ss, zs, full, empty, N, KB, BITS, 1,
                    BM, STAGES, SLOTS, GROUP, EACH, SCALED, ZERO, BIAS, ROW_SCALES, PIECES, U, ELEMENT,
                    FACTOR)),
        (_produce, (x, w, scale, zero, table, xs, ws, ss, zs, full, empty, N, NP, KB, PER, groups, BITS, BM, STAGES,
                    SLOTS, GROUP, EACH, SCALED, ZERO)),
    ], [4, 1], [240, 24])  # fmt: skip
