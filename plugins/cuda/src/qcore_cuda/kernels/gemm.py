"""``gemm``: weight-only product in tiles, for any M.

W is the first operand (rows of the tensor core's instruction), so that it can be dequantized in registers; the tokens
are its columns. The steps along K of all tiles can be spread evenly among the programs: then a tile is the sum of the
parts of several programs.

Grid: one-dimensional, one program per tile, or as `schedule.spread` says. Tiles: BN rows of the weight by BM tokens, K
in steps of U blocks of P columns. Inputs: x ``(M, K)`` 16-bit floats, zero up to whole steps; w planar16 or rows16;
scales and zero points ``(G, pitch_of(N))``; y ``(M, N)``. Floor: few tokens read the packed weight once; many take
``2 * M * N * K`` operations at the 16-bit peak of the tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qcore_triton.kernels.elements import factor_of
from qcore_triton.kernels.order import position_of

from .parts import add_parts, part_at, put, zeros_like
from .unpack import as_float, load_raw, scale_of, unpack_bytes, unpack_nibbles

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


@triton.jit
def _settled(b, ON: tl.constexpr):
    """Bytes b, available only when the tensor cores have read the registers that hold W.

    Triton lets the products of one iteration run on into the next one, but nothing keeps that one from unpacking into
    the same registers: this has given wrong sums.
    """
    if ON:
        b = tl.inline_asm_elementwise(
            "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;",
            "=r,=r,=r,=r,r,r,r,r",
            [b],
            dtype=b.dtype,
            is_pure=False,
            pack=16,
        )
    return b


@triton.jit
def _rows(BN: tl.constexpr, NW: tl.constexpr, U: tl.constexpr, FRAG: tl.constexpr):
    """Of U * BN short rows, each a block of W: the row of the tile, and the block.

    FRAG: in the order in which `_weight` can make a tile of their codes where they are, in each thread's registers.
    """
    i = tl.arange(0, U * BN)
    if FRAG:
        row = i // (16 * NW * U) * (16 * NW) + 16 * (i // 8 % NW) + 8 * (i // (8 * NW * U) % 2) + i % 8
        block = i // (8 * NW) % U
    else:
        row = i // U
        block = i % U
    return row, block


@triton.jit
def _weight(b, zero, DT: tl.constexpr, BITS: tl.constexpr, BN: tl.constexpr, P: tl.constexpr, U: tl.constexpr,
            NW: tl.constexpr, FRAG: tl.constexpr, ASM: tl.constexpr, ELEMENT: tl.constexpr):  # fmt: skip
    """Bytes of the rows of `_rows` as codes (BN, U * P).

    FRAG: bytes are in the order of the tensor core's registers, see `packing`; int8, which is not, meets an x whose
    columns are. zero: see `unpack_nibbles`.
    """
    # FRAG: the axes below are of the row (row block, half, block, warp, row of 8), of the byte (thread t of four, j, h,
    # e) and, for int4, the nibble. They become the row (row block, warp, half, row of 8) and the column (block, nibble,
    # j, h, t, e): column 16 j + 8 h + 2 t + e of a block, or of one half of it.
    G: tl.constexpr = BN // (16 * NW)
    if BITS == 4:
        low, high = unpack_nibbles(b, zero, ELEMENT, DT, ASM)
        q = tl.join(low, high)
        if FRAG:
            q = tl.reshape(q, [G, 2, U, NW, 8, 4, P // 32, 2, 2, 2])
            q = tl.trans(q, 0, 3, 1, 4, 2, 9, 6, 7, 5, 8)
        else:
            q = tl.trans(q, 0, 2, 1)
    else:
        q = unpack_bytes(b, ELEMENT, DT, ASM)
        if FRAG:
            q = tl.reshape(q, [G, 2, U, NW, 8, 4, P // 16, 2, 2])
            q = tl.trans(q, 0, 3, 1, 4, 2, 6, 7, 5, 8)
    return tl.reshape(q, [BN, U * P])


@triton.jit
def _wide(v, EACH: tl.constexpr):
    """Scales of rows, or of rows and blocks, for each value of a weight."""
    return v[:, :, None] if EACH else v[:, None]


@triton.jit
def tile_sum(x, w, scale, zero, n0, m0, first, last, M, N, NP, line, KB, PER, eighths, pitch, plane,
             BITS: tl.constexpr, P: tl.constexpr, U: tl.constexpr, ZERO: tl.constexpr, BN: tl.constexpr,
             BM: tl.constexpr, NW: tl.constexpr, STAGES: tl.constexpr, FRAG: tl.constexpr, SCALES: tl.constexpr,
             EACH: tl.constexpr, TERMS: tl.constexpr, ASM: tl.constexpr, HOPPER: tl.constexpr, WIDE: tl.constexpr,
             PDL: tl.constexpr, ELEMENT: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """The steps ``first`` to ``last`` of the tile at row n0 of W and row m0 of x; see `gemm`.

    plane: values from a matrix of x to the next; line: scales of a group in memory.
    """
    DT: tl.constexpr = tl.float32 if WIDE else x.dtype.element_ty
    BYTES: tl.constexpr = P // 2 if BITS == 4 else P
    STEP: tl.constexpr = U * 16 * BYTES if BITS == 4 else U * BYTES
    # 1. Pointers to w: U * BN short rows of one block each (BYTES bytes), so that FRAG can keep every code in the
    #    thread that loads it.
    row, block = _rows(BN, NW, U, FRAG)
    row = tl.minimum(n0 + row, NP - 1)
    if BITS == 4:
        at = (row // 16).to(tl.int64) * (KB * U * 16 * BYTES) + (row % 16) * BYTES + block * (16 * BYTES)
    else:
        at = row.to(tl.int64) * (pitch * 32) + block * BYTES
    wp = w + at[:, None] + tl.arange(0, BYTES)[None, :] + first.to(tl.int64) * STEP
    # Rows beyond M are other rows again: many that read the same one would queue up for it.
    rm = (m0 + tl.arange(0, BM)) % M
    xp = x + rm.to(tl.int64)[:, None] * (eighths * 8) + tl.arange(0, U * P)[None, :] + first * (U * P)
    rn = tl.minimum(n0 + tl.arange(0, BN), N - 1)
    acc = tl.zeros([BN, BM], tl.float32)
    S: tl.constexpr = scale.dtype.element_ty
    Z: tl.constexpr = zero.dtype.element_ty
    # The tensor cores truncate sums, which shows in long ones if the result is float32.
    APART: tl.constexpr = SCALES == 0 or TERMS > 1
    FOLDED: tl.constexpr = ZERO == 1 and BITS == 4  # subtracted when nibbles are unpacked, in their order
    scales = first // PER * line + rn
    if EACH:
        scales = (first * (U * G) + tl.arange(0, U * G))[None, :] * line + rn[:, None]
    zeros = (first * U + block if EACH else first // PER) * line + tl.minimum(row, N - 1) if FOLDED else scales
    sp = scale + scales
    zp = zero + zeros
    left = (first // PER + 1) * PER - first
    # 2. Scales are too narrow for asynchronous copies. Those applied before a step's product are loaded a step ahead,
    #    those applied after it at the step's start. The first ones need not wait for the previous kernel; x, which may
    #    be its result, does.
    s = load_raw(sp, ASM)
    z = load_raw(zp, ASM) if ZERO else s
    if PDL:
        gdc_wait()
    for b in tl.range(first, last, num_stages=STAGES):
        # 3. Parameters that are applied to the sum are read for this step, those applied to the weight for the next
        #    one. The pointers move on when a group ends, but not behind the last step.
        if SCALES != 2:
            if SCALES == 0:
                s = load_raw(sp, ASM)
                if ZERO == 2:
                    z = load_raw(zp, ASM)
            left -= 1
            move = tl.where((left == 0) & (b + 1 < last), U * G * line if EACH else line, 0)
            left = tl.where(left == 0, PER, left)
            sp += move
            zp += move
        s_next = load_raw(sp, ASM) if SCALES == 1 else s
        z_next = load_raw(zp, ASM) if (ZERO == 1 and SCALES != 2) or (ZERO == 2 and SCALES == 1) else z
        # 4. Operands. Triton's pipeline keeps the copies of x and w STAGES - 1 steps ahead in shared memory.
        xt = ()
        for p in tl.static_range(TERMS):
            xt = xt + (tl.load(xp + p * plane).to(DT),)
        data = _settled(tl.load(wp), HOPPER and not APART)
        q = _weight(
            data, z[:, None] if FOLDED else tl.zeros([1, 1], tl.int32), DT, BITS, BN, P, U, NW, FRAG, ASM, ELEMENT
        )
        # 5. Dequantize in registers. Codes less integer zero points are exact in 16-bit floats; multiplied by a scale
        #    (SCALES 1) they are rounded to x's dtype.
        wp += STEP
        xp += U * P
        if EACH:
            q = tl.reshape(q, [BN, U * G, P // G])
        if ZERO == 1 and not FOLDED:  # at most 255: exact
            q -= _wide(as_float(z, Z, ASM).to(DT), EACH)
        if SCALES == 1:
            q *= _wide(scale_of(s, S, ASM).to(DT), EACH)
            if ZERO == 2:
                q += _wide(as_float(z, Z, ASM).to(DT), EACH)
        if EACH:
            q = tl.reshape(q, [BN, U * P])
        # 6. Products: on top of the sum so far, or of this step alone, added in float32 after scaling.
        d = tl.zeros([BN, BM], tl.float32) if APART else acc
        for p in tl.static_range(TERMS):
            d = tl.dot(q, tl.trans(xt[p]), d)
        if SCALES == 0:
            acc += d * scale_of(s, S, ASM)[:, None]
        else:
            acc = acc + d if APART else d
        if ZERO == 2 and SCALES == 0:
            # 7. Float zero points times sums of x, last. x is read into registers while products read the same slot of
            #    shared memory, and Triton's pipeliner copies into it once the registers are there: only products that
            #    were waited for (``d`` above) may stand here.
            sums = tl.zeros([BM], tl.float32)
            for p in tl.static_range(TERMS):
                sums += tl.sum(xt[p].to(tl.float32), 1)
            acc += as_float(z, Z, ASM)[:, None] * sums[None, :]
        s = s_next
        z = z_next
    if SCALES == 2:
        acc *= scale_of(s, S, ASM)[:, None]
    return acc


@triton.jit(do_not_specialize=["M", "N", "NP", "KB", "PER", "eighths", "pitch", "waves", "share"])
def gemm(x, w, scale, zero, factor, bias, sums, y, parts, counts, M, N, NP, KB, PER, eighths, pitch, waves, share,
         BITS: tl.constexpr, P: tl.constexpr, U: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr,
         BN: tl.constexpr, BM: tl.constexpr, NW: tl.constexpr, STAGES: tl.constexpr, FRAG: tl.constexpr,
         SCALES: tl.constexpr, EACH: tl.constexpr, TERMS: tl.constexpr, ALIGNED: tl.constexpr, GROUP_M: tl.constexpr,
         ASM: tl.constexpr, HOPPER: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
         ELEMENT: tl.constexpr, FACTOR: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """``y[m, n] = sum_k x[m, k] * W[n, k] + bias[n]``, in KB steps of U blocks of P columns.

    x: rows ``8 * eighths`` values apart (said so, because Triton then knows that they are aligned), zero from K to
    ``KB * U * P``. pitch: 32 times that many bytes are a row of rows16. PER: steps per group.
    SCALES: 0: applied to sums over a step; 1: to the weight, which is rounded to x's dtype; 2: to the whole sum (one
    group); float zero points then meet ``sums`` of x, float32 ``(M,)``. EACH: each block of a step has scales of its
    own, or each of G groups in it. ELEMENT, FACTOR: see `Weight`. TERMS: x is the sum of so many matrices that follow
    each other; their products are added up in order. ALIGNED: 16 or 8, which N is a multiple of, or 0. WIDE: products
    of float32 numbers (Triton's interpreter multiplies no bfloat16).

    A program computes ``waves`` whole tiles, and ``share`` steps of the tiles that are left, which lie in a row. Of a
    tile that several have steps of, each leaves its sum in ``parts`` (float32) and counts itself in ``counts`` (zero
    before and after); the last one adds them up, always in the same order.
    """
    if PDL:
        gdc_launch_dependents()
    if ALIGNED:
        N = N // ALIGNED * ALIGNED  # tells the compiler
    # A group has as many parameters as the packed weight has rows; if that is N, one register less is live.
    line = N if ALIGNED == 16 else NP
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles_n = tl.cdiv(N, BN)
    tiles_m = tl.cdiv(M, BM)
    # 1. The program's work: ``waves`` whole tiles, then its ``share`` of the line of steps of the remaining tiles.
    whole = waves * programs
    start = program * share
    steps = waves * KB + tl.maximum(0, tl.minimum(share, (tiles_n * tiles_m - whole) * KB - start))
    step = steps * 0
    while step < steps:
        # 2. The next piece of work: a tile, and its steps first..last. ``step * 0`` keeps both branches of one type.
        if step < waves * KB:
            tile = step // KB * programs + program
            first = step * 0
            last = KB + step * 0
        else:
            place = start + step - waves * KB
            tile = place // KB
            first = place - tile * KB
            last = tl.minimum(first + steps - step, KB)
            tile += whole
        # 3. GROUP_M rows of tiles are walked column by column: those that run together share weights and x.
        group = tile // (GROUP_M * tiles_n)
        height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
        inside = tile % (GROUP_M * tiles_n)
        n0 = inside // height * BN
        m0 = (group * GROUP_M + inside % height) * BM
        acc = tile_sum(x, w, scale, zero, n0, m0, first, last, M, N, NP, line, KB, PER, eighths, pitch,
                       M.to(tl.int64) * (eighths * 8), BITS, P, U, ZERO, BN, BM, NW, STAGES, FRAG, SCALES, EACH, TERMS,
                       ASM, HOPPER, WIDE, PDL, ELEMENT, G)  # fmt: skip
        complete = last - first == KB
        if not complete:
            # 4. Programs left..right share the tile. Each puts its part into the slot part + program, which no other
            #    pair has.
            part = tile - whole
            left = part * KB // share
            right = (part * KB + KB - 1) // share
            put(part_at(parts, part + program, BN, BM), acc, ASM)
            # 5. All threads have stored their part before the program counts itself; acq_rel makes it visible to the
            #    last.
            tl.debug_barrier()
            complete = tl.atomic_add(counts + part, 1, sem="acq_rel") == right - left
            if complete:
                # 6. The last program adds up. Of two parts, the other one is added to its own sum: a + b = b + a. Of
                #    more, all are read back and added in the order of the slots: the result does not depend on who came
                #    last.
                if right - left == 1:
                    acc = add_parts(acc, parts, part + left + right - program, 0, BN, BM, ASM)
                else:
                    acc = zeros_like(acc, ASM)
                    for p in tl.range(left, right + 1, 4, num_stages=1):
                        acc = add_parts(acc, parts, part + p, right - p, BN, BM, ASM)
                # Ready for the next launch.
                tl.store(counts + part, 0)
        if complete:
            # 7. Whoever has the whole sum adds the bias, rounds once and stores.
            n = n0 + tl.arange(0, BN)
            m = m0 + tl.arange(0, BM)
            if SCALES == 2 and ZERO == 2:
                total = tl.load(sums + m, mask=m < M, other=0.0)
                acc += tl.load(zero + tl.minimum(n, N - 1)).to(tl.float32)[:, None] * total[None, :]
            if FACTOR:
                acc *= factor_of(factor, FACTOR)
            if BIAS:
                acc += tl.load(bias + tl.minimum(n, N - 1)).to(tl.float32)[:, None]
            out = y + m.to(tl.int64)[None, :] * N + n[:, None]
            tl.store(out, acc.to(y.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])
        step += last - first


@triton.jit(do_not_specialize=["M", "pairs", "eighths"])
def arrange_columns(x, out, M, pairs, eighths, B: tl.constexpr, PDL: tl.constexpr):
    """X with columns in the order in which `gemm` meets those of rows16 that a thread loads: ``out[m, i] = x[m, j]``.

    x: rows ``8 * eighths`` values of 2 bytes apart, ``2 * pairs`` of them, as a row of ``out`` has.
    """
    if PDL:
        gdc_launch_dependents()
    x = x.to(tl.pointer_type(tl.int32))
    out = out.to(tl.pointer_type(tl.int32))
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    m = at // pairs
    column = position_of((at % pairs).to(tl.int32) * 2, 128)
    if PDL:
        gdc_wait()
    value = tl.load(x + m * (eighths * 4) + column // 2, mask=m < M, other=0)
    tl.store(out + at, value, mask=m < M)
