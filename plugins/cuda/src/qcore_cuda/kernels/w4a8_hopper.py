"""``w4a8_hopper``: int8 times int4 for many rows on Hopper, in Gluon: one warp copies, eight unpack and multiply.

Like `gemm_hopper`, but for codes of x: a warpgroup unpacks its 64 rows of the weight into registers as int8, 128
columns at a time, and ``wgmma`` multiplies them by BM tokens in shared memory. With a scale per group, the sum of each
block is scaled and added up in float32 while the tensor cores work for the other warpgroup. With one scale for all of
K, all of K is added up in int32.

Exact: a product is at most ``128 * 128`` in size, the code being multiplied by 16 or less an integer zero point, so a
block of 128 sums to at most 2**21: exact in int32, and when it becomes float32. All of K fits int32 because
`qcore_triton.host.blocking` has larger ones scaled block by block.

Grid: at most one program per multiprocessor; programs loop over tiles of 128 rows of the weight by BM = 32, 64 or 128
tokens, K in stages of 128 columns. Inputs: x int8 codes with columns in the order of planar16 blocks of 32; w planar16
in blocks of 128; scales, zero points and code sums ``(G, pitch_of(N))``; y ``(M, N)`` contiguous. Floor:
``2 * M * N * K`` operations at the int8 peak of the tensor cores.
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

from qcore_triton.kernels.int8_common import ended, tile_order
from qcore_triton.kernels.rounding import begin

from .hopper import advance, ring
from .operands_hopper import ROWS, load_words, row_numbers, words_layout

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"


@gluon.jit
def _codes(words, zero, ZERO: gl.constexpr, DOT: gl.constexpr):
    """Operand A (64, 128) of words (64, 16): 16 times the codes, or the codes less ``zero`` (64,) if ZERO."""
    # Four copies of a word make an operand for every four bytes: of them, the first is read.
    raw = gl.join(words, words)
    raw = gl.join(raw, raw)
    OUT: gl.constexpr = (gl.int8, gl.int8)
    if ZERO:
        zero = zero[:, None].broadcast_to(words.shape)
        zero = gl.join(zero, zero)
        zero = gl.join(zero, zero)
        # The top bit is borrowed from, so that four bytes are subtracted at once.
        low, high = gl.inline_asm_elementwise(
            "{ .reg .b32 h, a, b; shr.u32 h, $2, 4; lop3.b32 a, $2, 0x0F0F0F0F, 0x80808080, 0xEA;"
            " lop3.b32 b, h, 0x0F0F0F0F, 0x80808080, 0xEA; sub.u32 a, a, $6; sub.u32 b, b, $6;"
            " xor.b32 $0, a, 0x80808080; xor.b32 $1, b, 0x80808080; }",
            "=&r,=&r,r,r,r,r,r,r,r,r", [raw, zero],
            dtype=OUT, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $2, 4; lop3.b32 $0, t, 0xF0F0F0F0, 0x80808080, 0x6A;"
            " lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A; }",
            "=&r,=&r,r,r,r,r", [raw], dtype=OUT, is_pure=True, pack=4,
        )  # fmt: skip
    # Thread t of four has byte b of word 4 t + j: x, whose columns are in the order of `order` for blocks of 32, has it
    # at 16 j + 4 t + b, and those of high nibbles behind 64.
    codes = gl.join(low, high).reshape([ROWS, 4, 4, 4, 2]).permute((0, 4, 2, 1, 3)).reshape([ROWS, 128])
    return gl.convert_layout(codes, DOT, assert_trivial=True)


@gluon.jit
def _held(codes):
    """Keeps the registers of codes from being written up to here; `warpgroup_mma_wait` cannot do that for int8."""
    gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [codes], dtype=gl.int8, is_pure=False, pack=4)


@gluon.jit
def _prepare(at, ws, ss, zs, ms, WG: gl.constexpr, EACH: gl.constexpr, ZERO: gl.constexpr, MOVED: gl.constexpr,
             ACC: gl.constexpr):  # fmt: skip
    """A stage's words, and of its rows zero points, scales and sums of codes."""
    words = load_words(ws.index(2 * at + WG), 128)
    zero = words
    if ZERO:
        # In all four bytes of a word, and moved as the codes are.
        zero = (row_numbers(zs.index(at), WG, words_layout()).to(gl.int32) + 8) * 0x01010101
    s = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, ACC))
    total = s
    if EACH:
        s = row_numbers(ss.index(at), WG, ACC).to(gl.float32)
    if EACH and MOVED:
        total = row_numbers(ms.index(at), WG, ACC).to(gl.float32)
    return words, zero, s, total


@gluon.jit
def _produce(x, w, scale, zero, sums, xs, ws, ss, zs, ms, full, empty, N, M, KB, PER, BM: gl.constexpr,
             STAGES: gl.constexpr, GROUP: gl.constexpr, EACH: gl.constexpr, ZERO: gl.constexpr, MOVED: gl.constexpr,
             PDL: gl.constexpr):  # fmt: skip
    """Fill stages of 128 columns, in the order of their use."""
    BN: gl.constexpr = 2 * ROWS
    SCALES: gl.constexpr = BN * scale.dtype.primitive_bitwidth // 8 if EACH else 0
    SUMS: gl.constexpr = 4 * BN if EACH and MOVED else 0
    # Bytes of a stage: BM rows of 128 codes of x, 128 rows of 64 bytes of w, and the rows of parameters that apply.
    STAGE: gl.constexpr = (BM + ROWS) * 128 + SCALES + SUMS + (BN if ZERO else 0)
    tiles_n = gl.cdiv(N, BN)
    tiles_m = gl.cdiv(M, BM)
    # 1. Let the next kernel be scheduled early: it waits for this one's result by itself.
    if PDL:
        gdc_launch_dependents()
    # 2. The first weights, as many as the ring holds, before the previous kernel has ended: that one has waited for any
    #    kernel that wrote them. They arrive while x cannot be read yet.
    first = gl.program_id(0)
    ahead = gl.minimum(KB, STAGES)
    _, first_n = tile_order(first, tiles_m, tiles_n, GROUP)
    for b in range(ahead):
        mbarrier.expect(full.index(b), STAGE)
        for g in gl.static_range(2):
            tma.async_copy_global_to_shared(w, [first_n * 8 + 4 * g, b * 256], full.index(b), ws.index(2 * b + g))
    # 3. x may be the previous kernel's result.
    if PDL:
        gdc_wait()
    at = gl.to_tensor(0)
    turn = gl.to_tensor(1)
    # 4. Stages in the order of their use, as far ahead as the ring allows: also across the end of a tile.
    for tile in range(first, tiles_n * tiles_m, gl.num_programs(0)):
        tile_m, tile_n = tile_order(tile, tiles_m, tiles_n, GROUP)
        m0 = tile_m * BM
        n0 = tile_n * BN
        # The row of scales, and the blocks left until the next row: no division in the loop.
        group = 0
        left = PER
        for b in range(KB):
            # The weights of the first ``ahead`` stages, and the expected bytes of the whole stages, were announced in
            # step 2.
            fresh = (tile > first) | (b >= ahead)
            mbarrier.wait(empty.index(at), turn)
            here = full.index(at)
            mbarrier.expect(here, STAGE, pred=fresh)
            for g in gl.static_range(2):
                rows = [tile_n * 8 + 4 * g, b * 256]
                tma.async_copy_global_to_shared(w, rows, here, ws.index(2 * at + g), pred=fresh)
            if EACH:
                tma.async_copy_global_to_shared(scale, [group, n0], here, ss.index(at))
            if EACH and MOVED:
                tma.async_copy_global_to_shared(sums, [group, n0], here, ms.index(at))
            if ZERO:
                tma.async_copy_global_to_shared(zero, [group, n0], here, zs.index(at))
            tma.async_copy_global_to_shared(x, [m0, b * 128], here, xs.index(at))
            at, turn = advance(at, turn, STAGES)
            left -= 1
            group += gl.where(left == 0, 1, 0)
            left = gl.where(left == 0, PER, left)


@gluon.jit
def _blocks(U: gl.constexpr, left, acc, moved, words, zero, s, total, at, turn, fresh, PER, xs, ws, ss, zs, ms, full,
            empty, WG: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr, ZERO: gl.constexpr, MOVED: gl.constexpr,
            ACC: gl.constexpr, DOT: gl.constexpr):  # fmt: skip
    """U blocks, the words of the first given; returns those of the next one. left: blocks to come, those too.

    The sums of a block are scaled while the next one is multiplied. No product is under way from one call to the next:
    in a loop, ptxas would make them wait for each other. Nor does it use registers again before all products have
    ended, so the sums of U blocks have to fit. fresh: blocks of the group that are to come.
    """
    # From the second block on, the tensor cores have a product while this group unpacks (step 1), scales sums (step 3)
    # and loads words (step 4). ``before``, ``a``, ``b`` and ``done``: the sums, operand A, scales and stage of the
    # block that is being multiplied.
    none = gl.zeros(acc.shape, gl.int32, ACC)
    before = none
    a = none
    b = s
    done = at
    for u in gl.static_range(U):
        # 1. A, 64 rows by 128 columns of the weight, is unpacked into registers; B, BM tokens by 128 columns, stays in
        #    shared memory. With EACH a product starts from 0, else it adds to all of K so far.
        codes = _codes(words, zero, ZERO, DOT)
        x = xs.index(at).permute((1, 0))
        if EACH:
            d = warpgroup_mma(codes, x, none, use_acc=False, is_async=True)
        else:
            d = warpgroup_mma(codes, x, acc, is_async=True)
            acc = d
        # 2. Once per group, at its first block: the correction by zero points of x, scale times the sum of the group's
        #    codes.
        if MOVED and EACH:
            moved += gl.where(fresh == PER, s * total, 0.0)
            fresh = gl.where(fresh == 1, PER, fresh - 1)
        # 3. At most one product in flight: the previous block's has ended. Release its stage, then scale its sums while
        #    the tensor cores multiply this block.
        if u > 0:
            if EACH:
                before = warpgroup_mma_wait(1, deps=[before])
            else:
                acc = warpgroup_mma_wait(1, deps=[acc])
                d = acc
            _held(a)
            mbarrier.arrive(empty.index(done), count=1)
            if EACH:
                acc += before.to(gl.float32) * b[:, None]
        before = d
        a = codes
        b = s
        done = at
        at, turn = advance(at, turn, STAGES)
        # 4. Load the next block's words and parameters while this block is multiplied; behind the last block there is
        #    nothing to wait for, and what is read there is never used.
        mbarrier.wait(full.index(at), turn, pred=left > u + 1)
        words, zero, s, total = _prepare(at, ws, ss, zs, ms, WG, EACH, ZERO, MOVED, ACC)
    # 5. Drain: the last block's product, its stage, its scales.
    before = warpgroup_mma_wait(0, deps=[before])
    _held(a)
    mbarrier.arrive(empty.index(done), count=1)
    if EACH:
        acc += before.to(gl.float32) * b[:, None]
    else:
        acc = before
    return acc, moved, words, zero, s, total, at, turn, fresh


@gluon.jit
def leave_tokens(v, moved, x_scale, x_zero, m0, n0, M, N, bias, y, out_scale, out_zero, tiles_of_y, ys,
                 MOVED: gl.constexpr, HAS_BIAS: gl.constexpr, OUT: gl.constexpr):  # fmt: skip
    """Sums (64, BM) less zero points of x times ``moved``, scaled by token, on their way to y as `ended`."""
    LAYOUT: gl.constexpr = v.type.layout
    n = n0 + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    m = m0 + gl.arange(0, v.shape[1], gl.SliceLayout(0, LAYOUT))
    if MOVED:
        v -= moved[:, None] * gl.load(x_zero + m, mask=m < M, other=0.0)[None, :]
    v *= gl.load(x_scale + m, mask=m < M, other=0.0)[None, :]
    c = ended(v, m[None, :], n[:, None], M, N, bias, y, y, out_scale, out_zero, y, HAS_BIAS, OUT)
    # One buffer per group: the previous tile's copy must have read it. y is (tokens, N), so the tile is stored
    # transposed.
    tma.store_wait(0)
    ys.permute((1, 0)).store(c)
    fence_async_shared()
    tma.async_copy_shared_to_global(tiles_of_y, [m0, n0], ys)


@gluon.jit
def _consume(y, tiles_of_y, x_scale, x_zero, scale, sums, bias, ys, out_scale, out_zero, xs, ws, ss, zs, ms, full,
             empty, N, M, KB, PER, WG: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
             EACH: gl.constexpr, ZERO: gl.constexpr, MOVED: gl.constexpr, HAS_BIAS: gl.constexpr, OUT: gl.constexpr,
             U: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Group WG of two: 64 rows of each tile."""
    BN: gl.constexpr = 2 * ROWS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 32])
    DOT: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    begin(PDL)
    tiles_n = gl.cdiv(N, BN)
    tiles_m = gl.cdiv(M, BM)
    tiles = tiles_n * tiles_m
    step = gl.num_programs(0)
    # left: blocks to come in all tiles of this program, so that only the last one does not prefetch.
    left = gl.cdiv(tiles - gl.program_id(0), step) * KB
    at = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    # 1. Prologue: the words and parameters of the first block, so that every turn of the loop starts with a product.
    mbarrier.wait(full.index(0), 0)
    words, zero, s, total = _prepare(0, ws, ss, zs, ms, WG, EACH, ZERO, MOVED, ACC)
    for tile in range(gl.program_id(0), tiles, step):
        tile_m, tile_n = tile_order(tile, tiles_m, tiles_n, GROUP)
        acc = gl.zeros([ROWS, BM], gl.float32 if EACH else gl.int32, ACC)
        moved = gl.zeros([ROWS], gl.float32, ROW)
        fresh = PER
        # 2. U blocks per turn, then the remainder one at a time.
        for _ in range(KB // U):
            acc, moved, words, zero, s, total, at, turn, fresh = _blocks(
                U, left, acc, moved, words, zero, s, total, at, turn, fresh, PER, xs, ws, ss, zs, ms, full, empty, WG,
                STAGES, EACH, ZERO, MOVED, ACC, DOT)  # fmt: skip
            left -= U
        if U > 1:
            for _ in range(KB % U):
                acc, moved, words, zero, s, total, at, turn, fresh = _blocks(
                    1, left, acc, moved, words, zero, s, total, at, turn, fresh, PER, xs, ws, ss, zs, ms, full, empty,
                    WG, STAGES, EACH, ZERO, MOVED, ACC, DOT)  # fmt: skip
                left -= 1
        n0 = tile_n * BN + WG * ROWS
        # 3. Epilogue, in float32: codes were multiplied by 16 unless a zero point was subtracted; then the weight's
        #    scale, the zero points of x, and the scale of x. The copying warp fills stages for the next tile meanwhile.
        v = acc.to(gl.float32)
        if not ZERO:
            v *= 0.0625
        if not EACH:
            n = n0 + gl.arange(0, ROWS, ROW)
            by_row = gl.load(scale + n, mask=n < N, other=0.0).to(gl.float32)
            v *= by_row[:, None]
            if MOVED:
                moved = gl.load(sums + n, mask=n < N, other=0).to(gl.float32) * by_row
        leave_tokens(v, moved, x_scale, x_zero, tile_m * BM, n0, M, N, bias, y, out_scale, out_zero, tiles_of_y, ys,
                     MOVED, HAS_BIAS, OUT)  # fmt: skip
    # 4. Shared memory must outlive the last store, which reads it.
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "KB", "PER", "out_scale", "out_zero"])
def w4a8_hopper(x, x_scale, x_zero, w, scale, zero, sums, bias, y, tiles_of_y, out_scale, out_zero, M, N, KB, PER,
          BM: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, ALIGNED: gl.constexpr, EACH: gl.constexpr,
          ZERO: gl.constexpr, MOVED: gl.constexpr, HAS_BIAS: gl.constexpr, OUT: gl.constexpr, U: gl.constexpr,
          PDL: gl.constexpr):  # fmt: skip
    """``y[m, n] = x_scale[m] * sum_k (x[m, k] - x_zero[m]) * W[n, k] + bias[n]``, or its codes.

    x, w, tiles_of_y: descriptors, of codes of x in the order of blocks of 32 with blocks (BM, 128), of int4 words
    ``(N / 16, KB * 256)`` with blocks (4, 256), of y with blocks (BM, 64). KB: blocks of 128 columns;
    PER of them share a row of scales, zero points and sums. EACH: sums of a block are scaled, and scale is a descriptor
    with blocks (1, 128); else there is one scale per row. ZERO: zero is a descriptor likewise, of whole numbers. MOVED:
    x has zero points; sums of a group's codes are described as scales are. OUT, out_scale, out_zero: as for
    `int8_gemm.tiles`, numbers alone. U: blocks in a turn of the loop. GROUP: as for `gemm_hopper`. ALIGNED: N is
    a multiple of 16.
    """
    if ALIGNED:
        N = N // 16 * 16  # tells the compiler
    # 1. Shared memory: a ring of x, words, and the parameters that apply; a result buffer for each group.
    xs = gl.allocate_shared_memory(gl.int8, [STAGES, BM, 128], x.layout)
    ws = gl.allocate_shared_memory(gl.int32, [2 * STAGES, 4, 256], w.layout)
    # Parameters that do not apply stand for each other: a constexpr branch never reads them.
    ss = xs
    zs = xs
    ms = xs
    if EACH:
        ss = gl.allocate_shared_memory(scale.dtype, [STAGES, 1, 2 * ROWS], scale.layout)
    if ZERO:
        zs = gl.allocate_shared_memory(zero.dtype, [STAGES, 1, 2 * ROWS], zero.layout)
    if EACH and MOVED:
        ms = gl.allocate_shared_memory(sums.dtype, [STAGES, 1, 2 * ROWS], sums.layout)
    y0 = gl.allocate_shared_memory(tiles_of_y.dtype, [BM, ROWS], tiles_of_y.layout)
    y1 = gl.allocate_shared_memory(tiles_of_y.dtype, [BM, ROWS], tiles_of_y.layout)
    # 2. Each of the two consumers reads every stage.
    full, empty = ring(STAGES, 2)
    # TMA signals barriers through the async proxy; it has to see them initialized.
    fence_async_shared()
    # 3. Two consumers and a copying warp; warps and registers as in `gemm_hopper`.
    gl.warp_specialize([
        (_consume, (y, tiles_of_y, x_scale, x_zero, scale, sums, bias, y0, out_scale, out_zero, xs, ws, ss, zs, ms,
                    full, empty, N, M, KB, PER, 0, BM, STAGES, GROUP, EACH, ZERO, MOVED, HAS_BIAS, OUT, U, PDL)),
        (_consume, (y, tiles_of_y, x_scale, x_zero, scale, sums, bias, y1, out_scale, out_zero, xs, ws, ss, zs, ms,
                    full, empty, N, M, KB, PER, 1, BM, STAGES, GROUP, EACH, ZERO, MOVED, HAS_BIAS, OUT, U, PDL)),
        (_produce, (x, w, scale, zero, sums, xs, ws, ss, zs, ms, full, empty, N, M, KB, PER, BM, STAGES, GROUP, EACH,
                    ZERO, MOVED, PDL)),
    ], [4, 1], [240, 24])  # fmt: skip
