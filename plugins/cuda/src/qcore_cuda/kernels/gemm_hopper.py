"""``gemm_hopper``: weight-only product for many rows on Hopper, in Gluon: one warp copies, others unpack and multiply.

One warp copies x and the packed weight through tensor descriptors into a ring of stages. Two or three warpgroups wait
for the stages: each unpacks its 64 rows of the weight into registers and multiplies them by BM tokens, which stay in
shared memory, with ``wgmma``. A group unpacks one half of a block while the tensor cores work on the other half, or for
another group.

Grid: at most one program per multiprocessor, one-dimensional; programs loop over tiles (`schedule.tail_spread`), and
the operands of the next tile arrive while a result is stored. Tiles: 128 rows of the weight by BM = 32, 64, 128 or 256
tokens, or 192 rows by up to 128, K in blocks of 128 columns, x in stages of 64; or 64 rows, whose blocks two groups
take in turn.
Inputs: x ``(M, K)`` 16-bit floats with contiguous rows; w planar16 (int4) or rows16 (int8); scales and zero points
``(G, pitch_of(N))``; y ``(M, N)`` contiguous, of 16-bit floats.
Floor: ``2 * M * N * K`` operations at the 16-bit peak of the tensor cores.
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

from qcore_triton.kernels.elements import scale_value
from qcore_triton.kernels.int8_common import tile_order

from .hopper import advance, my_steps, ring, summed
from .operands_hopper import (
    ROWS,
    from_halves,
    from_pairs,
    from_words,
    half_numbers,
    in_halves,
    load_words,
    pair_numbers,
    pairs_layout,
    quarter_numbers,
    row_numbers,
    scales_of,
    word_numbers,
    words_layout,
    zero_point,
)
from .parts import segment

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

UNITS = gl.constexpr(3)
"""A kind of zero points beside those of `Weight`: instead of any, factors that scales of a row are multiplied by."""


@gluon.jit
def _produce(x, w, scale, zero, xs, ws, ss, zs, full, empty, tiles, tiles_m, tiles_n, KB, PER, waves, share,
             BITS: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr,
             EACH: gl.constexpr, SCALED: gl.constexpr, ZERO: gl.constexpr, GROUPS: gl.constexpr,
             PDL: gl.constexpr):  # fmt: skip
    """Fill stages, in the order of their use.

    A stage is 64 columns of x, and of an int8 weight. Data of a whole block of 128 columns - int4 words, scales,
    zero points - has slots of its own and arrives with the block's first stage.
    """
    BN: gl.constexpr = GROUPS * ROWS
    PAIRS: gl.constexpr = pairs_of(GROUPS)
    # Bytes that the full barrier of a stage expects: BM rows of 64 16-bit values, and BN rows of 64 int8 codes. BLOCK:
    # bytes that come with the first stage of a block only.
    STAGE: gl.constexpr = BM * 128 + (BN * 64 if BITS == 8 else 0)
    # Parameters are those of pairs of groups, 128 rows, whatever a tile has: copies go to multiples of 128 bytes.
    SCALES: gl.constexpr = EACH * ROWS * scale.dtype.primitive_bitwidth // 4 if SCALED else 0
    ZEROS: gl.constexpr = (1 if ZERO == UNITS else EACH) * ROWS * zero.dtype.primitive_bitwidth // 4 if ZERO else 0
    BLOCK: gl.constexpr = (BN * 64 if BITS == 4 else 0) + PAIRS * (SCALES + ZEROS)
    program, programs, steps = my_steps(tiles, waves, share, KB)
    step = steps * 0
    # 1. x may be the previous kernel's result: no copy begins before that kernel has ended. (To copy the first weights
    #    before that gained nothing.)
    if PDL:
        gdc_wait()
    # at, turn: stage of the ring and parity of its barriers; slot: place of the data of a block. Slots need no
    # barriers: the stage that is awaited before a slot is refilled belongs to the block that used the slot last, and
    # consumers hold the words of a block in registers when they release a stage of it.
    at = 0
    turn = 1
    slot = 0
    # 2. Tiles and blocks in the consumers' order. Nothing here waits for a copy to arrive: up to STAGES stages are in
    #    flight, and this warp runs ahead of the consumers into their next tile.
    while step < steps:
        tile, begin, end = segment(step, steps, program, programs, waves, share, KB)
        tile_m, tile_n = tile_order(tile, tiles_m, tiles_n, GROUP)
        m0 = tile_m * BM
        n0 = tile_n * BN
        for b in range(begin, end):
            for half in gl.static_range(2):
                # 3. Wait until all groups that read the stage have released it; then announce the bytes before the
                #    copies that deliver them.
                mbarrier.wait(empty.index(at), turn)
                here = full.index(at)
                mbarrier.expect(here, STAGE + (BLOCK if half == 0 else 0))
                # 4. Begin the copies: w, with a block's first stage its scales and zero points, and x.
                for g in gl.static_range(GROUPS):
                    n = n0 + g * ROWS
                    # Each group has its own 64 rows of w: int16 pairs (64, 32) per stage, int4 words (4, 256) per
                    # block.
                    if BITS == 8:
                        tma.async_copy_global_to_shared(w, [n, b * 64 + half * 32], here, ws.index(GROUPS * at + g))
                    elif half == 0:
                        tma.async_copy_global_to_shared(w, [n // 16, b * 256], here, ws.index(GROUPS * slot + g))
                row = b * EACH if EACH > 1 else b // PER
                for pair in gl.static_range(PAIRS if half == 0 else 0):
                    n = n0 + pair * 2 * ROWS
                    place = PAIRS * slot + pair
                    if SCALED:
                        tma.async_copy_global_to_shared(scale, [row, n], here, ss.index(place))
                    if ZERO:
                        tma.async_copy_global_to_shared(zero, [0 if ZERO == UNITS else row, n], here, zs.index(place))
                tma.async_copy_global_to_shared(x, [m0, b * 128 + half * 64], here, xs.index(at))
                at, turn = advance(at, turn, STAGES)
            slot = advance(slot, 0, SLOTS)[0]
        step += end - begin


@gluon.constexpr_function
def pairs_of(groups):
    """The number of copies of 128 rows that parameters of so many groups of 64 take."""
    return (groups + 1) // 2


@gluon.jit
def _numbers(stored, HALF: gl.constexpr, WG: gl.constexpr, LAYOUT: gl.constexpr, BITS: gl.constexpr,
             EACH: gl.constexpr):  # fmt: skip
    """Scales or zero points of one half of a block, as its codes take them."""
    if BITS == 4 and EACH > 1:
        found = half_numbers(stored, HALF, WG, 128 // EACH)
    elif EACH == 4:
        found = pair_numbers(stored, HALF, WG)
    elif EACH > 1:
        found = row_numbers(stored.slice(HALF, 1, dim=0), WG, LAYOUT)
    else:
        found = row_numbers(stored, WG, LAYOUT)
    return found


@gluon.jit
def first_half(at, slot, ws, ss, zs, DT: gl.constexpr, BITS: gl.constexpr, WG: gl.constexpr, EACH: gl.constexpr,
               SCALED: gl.constexpr, ZERO: gl.constexpr, DOT: gl.constexpr, ELEMENT: gl.constexpr,
               GROUPS: gl.constexpr = 2):  # fmt: skip
    """The first half of a block as operand A, and the input of the second half: words, scales, zero points.

    All that the slot holds is read here: it may be filled again when the block's first stage is released.
    """
    SIDE: gl.constexpr = WG % 2  # of the pair of groups whose parameters are copied together
    mine = pairs_of(GROUPS) * slot + WG // 2
    LAYOUT: gl.constexpr = words_layout() if BITS == 4 else pairs_layout()
    raw = (
        load_words(ws.index(GROUPS * slot + WG), 32 if EACH == 8 else 128 // EACH)
        if BITS == 4
        else ws.index(GROUPS * at + WG).load(LAYOUT)
    )
    second = raw
    if BITS == 4 and EACH > 1:
        raw, second = in_halves(raw)
    s = raw
    z = raw
    next_s = second
    next_z = second
    if EACH == 8:  # scales of low nibbles, and of high ones in the place of zero points
        s, z = quarter_numbers(ss.index(mine), 0, SIDE)
        next_s, next_z = quarter_numbers(ss.index(mine), 1, SIDE)
        s = scales_of(s, DT)
        z = scales_of(z, DT)
        next_s = scales_of(next_s, DT)
        next_z = scales_of(next_z, DT)
    elif SCALED:
        s = _numbers(ss.index(mine), 0, SIDE, LAYOUT, BITS, EACH)
        next_s = s
        if EACH > 1:
            next_s = _numbers(ss.index(mine), 1, SIDE, LAYOUT, BITS, EACH)
        if ZERO == UNITS:
            unit = word_numbers(zs.index(mine), SIDE)
            s = (s.to(gl.float32) * unit).to(DT)
            next_s = (next_s.to(gl.float32) * unit).to(DT)
        else:
            s = scales_of(s, DT)
            next_s = scales_of(next_s, DT)
    if ZERO == 1 or ZERO == 2:
        z = zero_point(_numbers(zs.index(mine), 0, SIDE, LAYOUT, BITS, EACH), DT, BITS, ZERO)
        next_z = z
        if EACH > 1:
            next_z = zero_point(_numbers(zs.index(mine), 1, SIDE, LAYOUT, BITS, EACH), DT, BITS, ZERO)
    low = _operand(raw, s, z, DT, BITS, False, EACH, SCALED, ZERO, DOT, ELEMENT)
    return low, second, next_s, next_z


@gluon.jit
def _operand(raw, s, z, DT: gl.constexpr, BITS: gl.constexpr, HIGH: gl.constexpr, EACH: gl.constexpr,
             SCALED: gl.constexpr, KIND: gl.constexpr, DOT: gl.constexpr, ELEMENT: gl.constexpr):  # fmt: skip
    """64 columns of the weight as operand A."""
    ZERO: gl.constexpr = 0 if KIND == UNITS else KIND
    if BITS == 8:
        a = from_pairs(raw, s, z, DT, SCALED, ZERO, DOT, ELEMENT)
    elif EACH > 1:
        a = from_halves(raw, s, z, DT, 64 if EACH == 2 else 32, SCALED, ZERO, DOT, ELEMENT, EACH == 8)
    else:
        a = from_words(raw, s, z, DT, HIGH, SCALED, ZERO, DOT, ELEMENT)
    return a


@gluon.jit
def blocks(U: gl.constexpr, left, acc, low, raw, s, z, at, turn, slot, xs, ws, ss, zs, full, empty,
            BITS: gl.constexpr, WG: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, EACH: gl.constexpr,
            SCALED: gl.constexpr, ZERO: gl.constexpr, DOT: gl.constexpr, ELEMENT: gl.constexpr,
            GROUPS: gl.constexpr = 2):  # fmt: skip
    """U blocks, the first half of the first in ``low``; returns that of the next one. left: blocks to come, those too.

    GROUPS: of 64 rows in a tile; 1: every second block in the ring is that of the other warpgroup.

    No product is under way from one call to the next: in a loop, ptxas would make them wait for each other.
    """
    DT: gl.constexpr = xs.dtype
    # The tensor cores always have a product while this group unpacks: the first half's during step 3, the second half's
    # during step 5. Products read operand A from registers, which must not change meanwhile: ``low`` and ``high`` take
    # turns.
    high = low
    done = at
    for u in gl.static_range(U):
        first = at
        # 1. First half: A, 64 rows of the weight by 64 columns, is in registers; B, BM tokens by 64 columns, is read
        #    from shared memory while this group goes on.
        acc = warpgroup_mma(low, xs.index(first).permute((1, 0)), acc, is_async=True)
        # 2. At most one product in flight: the previous block's second half has ended, so its stage and the registers
        #    of ``high`` are free.
        if u > 0:
            acc, high = warpgroup_mma_wait(1, deps=[acc, high])
            mbarrier.arrive(empty.index(done), count=1)
        at, turn = advance(at, turn, STAGES)
        # 3. Unpack the second half while the tensor cores work on the first. int4 words are in registers already; int8
        #    codes come with the stage, which has to be awaited first.
        if BITS == 4:
            high = _operand(raw, s, z, DT, BITS, True, EACH, SCALED, ZERO, DOT, ELEMENT)
            mbarrier.wait(full.index(at), turn)
        else:
            mbarrier.wait(full.index(at), turn)
            raw = ws.index(GROUPS * at + WG).load(pairs_layout())
            high = _operand(raw, s, z, DT, BITS, True, EACH, SCALED, ZERO, DOT, ELEMENT)
        acc = warpgroup_mma(high, xs.index(at).permute((1, 0)), acc, is_async=True)
        # 4. The first half has ended: release its stage, so that the copying warp is not held up by the second half.
        acc, low = warpgroup_mma_wait(1, deps=[acc, low])
        mbarrier.arrive(empty.index(first), count=1)
        done = at
        at, turn = advance(at, turn, STAGES)
        slot = advance(slot, 0, SLOTS)[0]
        if GROUPS == 1:
            at, turn = skip(at, turn, STAGES)
            slot = advance(slot, 0, SLOTS)[0]
        # 5. Unpack the first half of the next block while the second half of this one is multiplied. Behind the
        #    program's last block there is nothing to wait for; what is read there is never used.
        mbarrier.wait(full.index(at), turn, pred=left > u + 1)
        low, raw, s, z = first_half(at, slot, ws, ss, zs, DT, BITS, WG, EACH, SCALED, ZERO, DOT, ELEMENT, GROUPS)
    # 6. Drain: the last block's second half, and its stage.
    acc, high = warpgroup_mma_wait(0, deps=[acc, high])
    mbarrier.arrive(empty.index(done), count=1)
    return acc, low, raw, s, z, at, turn, slot


@gluon.jit
def _leave(acc, y, scale, zero, factor, bias, tokens, sums, ys, m0, n0, M, N, SCALED: gl.constexpr,
           FACTOR: gl.constexpr, BIAS: gl.constexpr, PIECES: gl.constexpr, ZERO: gl.constexpr, TOKENS: gl.constexpr,
           SUMS: gl.constexpr):  # fmt: skip
    """A group's sums of a tile, scaled and rounded, on their way to y."""
    PIECE: gl.constexpr = acc.shape[1] // PIECES
    # acc has one row per output column. Rows behind N are clamped here; TMA does not store them.
    n = gl.minimum(n0 + gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout)), N - 1)
    if not SCALED:
        acc *= scale_value(gl.load(scale + n), scale.dtype.element_ty)[:, None]
    if ZERO == UNITS:
        # The inverse of a power of two: its exponent is 254 less the other one.
        unit = (254 << 23) - gl.load(factor + n).to(gl.int32, bitcast=True)
        acc *= unit.to(gl.float32, bitcast=True)[:, None]
    m = m0 + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    if SUMS:
        acc += gl.load(zero + n).to(gl.float32)[:, None] * gl.load(sums + m, mask=m < M, other=0.0)[None, :]
    if TOKENS:
        acc *= gl.load(tokens + m, mask=m < M, other=0.0)[None, :]
    if FACTOR:
        acc *= gl.load(factor)
    if BIAS:
        acc += gl.load(bias + n).to(gl.float32)[:, None]
    first = acc.to(y.dtype)
    second = first
    if PIECES == 2:
        first, second = first.reshape([ROWS, 2, PIECE]).permute((0, 2, 1)).split()
    for i in gl.static_range(PIECES):
        # One buffer per group: the copy of the previous piece or tile must have read it. y is (tokens, N), so the piece
        # is stored transposed.
        tma.store_wait(0)
        ys.permute((1, 0)).store(first if i == 0 else second)
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [m0 + i * PIECE, n0], ys)


@gluon.jit
def skip(at, turn, STAGES: gl.constexpr):
    """The ring behind a block, two stages, of the other group."""
    at, turn = advance(at, turn, STAGES)
    return advance(at, turn, STAGES)


@gluon.jit
def _together(acc, meeting, turn, WG: gl.constexpr):
    """Both groups' sums of a tile, in the first group; the second one hands its own over. turn: see `advance`."""
    shared, full, empty = meeting
    if WG == 1:
        mbarrier.wait(empty.index(0), turn)
        shared.store(acc)
        mbarrier.arrive(full.index(0), count=1)
    else:
        mbarrier.wait(full.index(0), turn)
        acc += shared.load(acc.type.layout)
        mbarrier.arrive(empty.index(0), count=1)
    return acc


@gluon.jit
def _consume(y, scale, zero, factor, bias, tokens, sums, parts, counts, ys, meeting, xs, ws, ss, zs, full, empty, N, M,
             tiles, tiles_m, tiles_n, KB, waves, share, WG: gl.constexpr, BITS: gl.constexpr, BM: gl.constexpr,
             STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, EACH: gl.constexpr, SCALED: gl.constexpr,
             ZERO: gl.constexpr, BIAS: gl.constexpr, PIECES: gl.constexpr, U: gl.constexpr, SPREAD: gl.constexpr,
             ELEMENT: gl.constexpr, FACTOR: gl.constexpr, TOKENS: gl.constexpr, SUMS: gl.constexpr,
             GROUPS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Group WG: 64 rows of each tile, or, if tiles have no more, every second block of the program's."""
    DT: gl.constexpr = xs.dtype
    SPLIT_K: gl.constexpr = GROUPS == 1
    OF: gl.constexpr = 0 if SPLIT_K else WG  # the group's rows of a tile
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    program, programs, steps = my_steps(tiles, waves, share, KB)
    step = steps * 0
    # left: blocks to come in all tiles of this program, so that only the last one does not prefetch.
    left = (steps + 1 - WG) // 2 if SPLIT_K else steps
    at = 0
    turn = 0
    slot = 0
    met = WG
    if SPLIT_K and WG == 1:
        at, turn = skip(0, 0, STAGES)
        slot = advance(0, 0, SLOTS)[0]
    if PDL and (TOKENS or SUMS):  # the previous kernel computes what the epilogue scales tokens by, or adds to them
        gdc_wait()
    # 1. Prologue: unpack the first half of the first block, so that every turn of the loop starts with a product.
    mbarrier.wait(full.index(at), turn, pred=left > 0)
    low, raw, s, z = first_half(at, slot, ws, ss, zs, DT, BITS, OF, EACH, SCALED, ZERO, DOT, ELEMENT, GROUPS)
    while step < steps:
        tile, begin, end = segment(step, steps, program, programs, waves, share, KB)
        own = end - begin
        if SPLIT_K:  # of the program's blocks, the even ones are the first group's
            own = (step + own + 1 - WG) // 2 - (step + 1 - WG) // 2
        step += end - begin
        tile_m, tile_n = tile_order(tile, tiles_m, tiles_n, GROUP)
        acc = gl.zeros([ROWS, BM], gl.float32, ACC)
        # 2. U blocks per turn, then the remainder one at a time. The last one unpacks the next tile's first half, so
        #    that the tensor cores start at once after the epilogue.
        for _ in range(own // U):
            acc, low, raw, s, z, at, turn, slot = blocks(
                U, left, acc, low, raw, s, z, at, turn, slot, xs, ws, ss, zs, full, empty, BITS, OF, STAGES, SLOTS,
                EACH, SCALED, ZERO, DOT, ELEMENT, GROUPS)  # fmt: skip
            left -= U
        if U > 1:
            for _ in range(own % U):
                acc, low, raw, s, z, at, turn, slot = blocks(
                    1, left, acc, low, raw, s, z, at, turn, slot, xs, ws, ss, zs, full, empty, BITS, OF, STAGES, SLOTS,
                    EACH, SCALED, ZERO, DOT, ELEMENT, GROUPS)  # fmt: skip
                left -= 1
        # 3. Epilogue, while the copying warp fills stages for the next tile: add up a shared tile, scale, round, store.
        complete = True
        if SPLIT_K:
            acc = _together(acc, meeting, met, WG)
            met ^= 1
        if OF == WG:
            if SPREAD:
                acc, complete = summed(
                    acc, parts, counts, tile, begin, end, program, programs, waves, share, KB, WG, max(2, GROUPS)
                )
            if complete:
                _leave(acc, y, scale, zero, factor, bias, tokens, sums, ys, tile_m * BM,
                       tile_n * (GROUPS * ROWS) + OF * ROWS, M, N, SCALED, FACTOR, BIAS, PIECES, ZERO, TOKENS,
                       SUMS)  # fmt: skip
    # 4. Shared memory must outlive the last store, which reads it.
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "tiles", "tiles_m", "tiles_n", "KB", "PER", "waves", "share"])
def gemm_hopper(
    x, w, scale, zero, factor, bias, tokens, sums, y, parts, counts, M, N, tiles, tiles_m, tiles_n, KB, PER, waves,
    share, BITS: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, EACH: gl.constexpr,
    SCALED: gl.constexpr, ZERO: gl.constexpr, BIAS: gl.constexpr, PIECES: gl.constexpr, U: gl.constexpr,
    SPREAD: gl.constexpr, PDL: gl.constexpr, ELEMENT: gl.constexpr, FACTOR: gl.constexpr, TOKENS: gl.constexpr,
    SUMS: gl.constexpr, GROUPS: gl.constexpr = 2,
):  # fmt: skip
    """``y[m, n] = sum_k x[m, k] * W[n, k] + bias[n]``.

    x, w, y: descriptors, of x with blocks (BM, 64), of int4 words ``(N / 16, KB * 256)`` with blocks (4, 256), of pairs
    of int8 with blocks (64, 32), of y with blocks (BM / PIECES, 64). tiles: all, tiles_m of tokens by tiles_n of rows
    of the weight; computed here, they would be kept from the start, where registers are few. KB: blocks of 128 columns;
    PER of them share a row of scales and zero points, or each has EACH rows, 2, 4 or 8 (groups of 64, 32 or 16), if
    EACH is not 1. SCALED: these are multiplied with the weight and scale is a descriptor with blocks (EACH, 128); else
    there is one scale per row, for the sum over K. zero: likewise a descriptor, if there is one; if ZERO is `UNITS`, of
    float32 ``(1, N)``, powers of two that the scales of a row are multiplied by, and the sum divided by; factor holds
    the same powers.
    TOKENS: x are codes, scaled by tokens, float32 ``(M,)``. SUMS: zero holds one float zero point per row, which sums
    of x, float32 ``(M,)``, are multiplied by; ZERO is 0.
    GROUPS: of 64 rows in a tile, 2 or 3, each with a warpgroup of its own; 1: two warpgroups take the blocks of the
    same rows in turn; STAGES is a multiple of 4, so that a stage is always of the same one, which sees all phases of
    its barriers.
    SPREAD: tiles are shared, see `parts`, with a block for a step: parts are float32, BM times 64 for each warpgroup,
    of each program and each tile that is left; counts, one for each warpgroup and each of these tiles, are zero before
    and after. The order of sums is fixed.
    ELEMENT, FACTOR: see `Weight`. U: blocks in a turn of the loop. GROUP: tiles of tokens whose programs share the
    weight in the second-level cache.
    """
    # 1. Let the next kernel be scheduled early: it waits for this one's result by itself.
    if PDL:
        gdc_launch_dependents()
    # 2. Shared memory: STAGES stages of x, and of int8 codes; two stages are a block, and share one slot for the
    #    block's words, scales and zero points.
    SPLIT_K: gl.constexpr = GROUPS == 1
    gl.static_assert(not SPLIT_K or STAGES % 4 == 0)
    SLOTS: gl.constexpr = (STAGES + 1) // 2
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, 64], x.layout)
    COUNT: gl.constexpr = GROUPS * (SLOTS if BITS == 4 else STAGES)
    ws = gl.allocate_shared_memory(w.dtype, [COUNT, w.block_shape[0], w.block_shape[1]], w.layout)
    ss = ws
    zs = ws
    PLACES: gl.constexpr = pairs_of(GROUPS) * SLOTS
    if SCALED:
        ss = gl.allocate_shared_memory(scale.dtype, [PLACES, EACH, 2 * ROWS], scale.layout)
    if ZERO:
        zs = gl.allocate_shared_memory(zero.dtype, [PLACES, 1 if ZERO == UNITS else EACH, 2 * ROWS], zero.layout)
    # A result buffer for each group: none waits until another one's store has read its buffer. If groups do not have
    # rows of their own, the first one stores, and a buffer for the second one's sums takes the place.
    y0 = gl.allocate_shared_memory(y.dtype, [BM // PIECES, ROWS], y.layout)
    y1 = y0
    meeting = y0
    if SPLIT_K:
        EXCHANGE: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
        handed, taken = ring(1, 1)
        meeting = (gl.allocate_shared_memory(gl.float32, [ROWS, BM], EXCHANGE), handed, taken)
    else:
        y1 = gl.allocate_shared_memory(y.dtype, [BM // PIECES, ROWS], y.layout)
    # 3. Each of the consumers reads every stage, or each of two every second pair of them.
    full, empty = ring(STAGES, GROUPS)
    # TMA signals barriers through the async proxy; it has to see them initialized.
    fence_async_shared()
    # 4. The first consumer runs on the launch's four warps, the others on four more each, the copies on one; the
    #    copying warp keeps 24 or 32 registers per thread and leaves 240 to each of two consumers, 160 to each of three.
    if GROUPS == 3:
        y2 = gl.allocate_shared_memory(y.dtype, [BM // PIECES, ROWS], y.layout)
        gl.warp_specialize([
            (_consume, (y, scale, zero, factor, bias, tokens, sums, parts, counts, y0, meeting, xs, ws, ss, zs, full,
                        empty, N, M, tiles, tiles_m, tiles_n, KB, waves, share, 0, BITS, BM, STAGES, SLOTS, GROUP, EACH,
                        SCALED, ZERO, BIAS, PIECES, U, SPREAD, ELEMENT, FACTOR, TOKENS, SUMS, GROUPS, PDL)),
            (_consume, (y, scale, zero, factor, bias, tokens, sums, parts, counts, y1, meeting, xs, ws, ss, zs, full,
                        empty, N, M, tiles, tiles_m, tiles_n, KB, waves, share, 1, BITS, BM, STAGES, SLOTS, GROUP, EACH,
                        SCALED, ZERO, BIAS, PIECES, U, SPREAD, ELEMENT, FACTOR, TOKENS, SUMS, GROUPS, PDL)),
            (_consume, (y, scale, zero, factor, bias, tokens, sums, parts, counts, y2, meeting, xs, ws, ss, zs, full,
                        empty, N, M, tiles, tiles_m, tiles_n, KB, waves, share, 2, BITS, BM, STAGES, SLOTS, GROUP, EACH,
                        SCALED, ZERO, BIAS, PIECES, U, SPREAD, ELEMENT, FACTOR, TOKENS, SUMS, GROUPS, PDL)),
            (_produce, (x, w, scale, zero, xs, ws, ss, zs, full, empty, tiles, tiles_m, tiles_n, KB, PER, waves, share,
                        BITS, BM, STAGES, SLOTS, GROUP, EACH, SCALED, ZERO, GROUPS, PDL)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (y, scale, zero, factor, bias, tokens, sums, parts, counts, y0, meeting, xs, ws, ss, zs, full,
                        empty, N, M, tiles, tiles_m, tiles_n, KB, waves, share, 0, BITS, BM, STAGES, SLOTS, GROUP, EACH,
                        SCALED, ZERO, BIAS, PIECES, U, SPREAD, ELEMENT, FACTOR, TOKENS, SUMS, GROUPS, PDL)),
            (_consume, (y, scale, zero, factor, bias, tokens, sums, parts, counts, y1, meeting, xs, ws, ss, zs, full,
                        empty, N, M, tiles, tiles_m, tiles_n, KB, waves, share, 1, BITS, BM, STAGES, SLOTS, GROUP, EACH,
                        SCALED, ZERO, BIAS, PIECES, U, SPREAD, ELEMENT, FACTOR, TOKENS, SUMS, GROUPS, PDL)),
            (_produce, (x, w, scale, zero, xs, ws, ss, zs, full, empty, tiles, tiles_m, tiles_n, KB, PER, waves, share,
                        BITS, BM, STAGES, SLOTS, GROUP, EACH, SCALED, ZERO, GROUPS, PDL)),
        ], [4, 1], [240, 24])  # fmt: skip
