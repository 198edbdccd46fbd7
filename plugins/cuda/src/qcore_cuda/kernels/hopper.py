"""Building blocks of the warp-specialized Gluon kernels for sm_90: rings of stages, and the store of a result tile.

A program has one warp that only copies (TMA), in some kernels four warps that only convert, and two warpgroups that
multiply, each for half of a tile's rows. They hand stages of shared memory to each other through two barriers per
stage: the writer arrives on "full", the readers arrive on "empty". Gluon's interface is unstable, so `runtime.hopper`
limits these kernels to the versions of Triton that they were tested with.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .parts import add_at, put, steps_of, value_at, zeros_like

WIDEST: gl.constexpr = gl.constexpr(128)
"""The most columns of an int8 ``wgmma`` that Triton issues and that a register layout can have."""


WRITTEN = gl.constexpr(1 << 16)
"""What the count of a shared tile grows by when a part is in memory."""


@gluon.jit
def ring(STAGES: gl.constexpr, READERS: gl.constexpr):
    """The barriers (full, empty) of STAGES stages that one warp or warpgroup fills and READERS warpgroups read."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty


@gluon.jit
def advance(slot, phase, STAGES: gl.constexpr):
    """The next stage and the parity to wait for on its barriers. A reader starts at (0, 0), a writer at (0, 1).

    A barrier that nobody has arrived on counts as having completed a phase of parity 1: the writer's first round over
    the ring does not block.
    """
    slot += 1
    wrap = slot == STAGES
    return gl.where(wrap, 0, slot), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def my_steps(tiles, waves, share, KB):
    """This program, all programs, and the steps of this one."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    return program, programs, steps_of(program, programs, tiles, waves, share, KB)


@gluon.jit
def cut(acc, PIECES: gl.constexpr):
    """A tile split along its columns into 1, 2 or 4 pieces, without moving values between threads."""
    M: gl.constexpr = acc.shape[0]
    Q: gl.constexpr = acc.shape[1] // PIECES
    if PIECES == 1:
        pieces = (acc,)
    elif PIECES == 2:
        a, b = acc.reshape((M, 2, Q)).permute((0, 2, 1)).split()
        pieces = (a, b)
    else:
        a, b = acc.reshape((M, 2, 2 * Q)).permute((0, 2, 1)).split()
        a0, a1 = a.reshape((M, 2, Q)).permute((0, 2, 1)).split()
        b0, b1 = b.reshape((M, 2, Q)).permute((0, 2, 1)).split()
        pieces = (a0, a1, b0, b1)
    return pieces


@gluon.jit
def leave(c, tiles, at, buffers, PIECE: gl.constexpr, PIECES: gl.constexpr):
    """Store piece c of a tile through one of two buffers of shared memory; TMA may still be reading the other one.

    If there is only one piece, it always takes the same buffer.
    """
    # The copy that last read this buffer was issued two pieces ago: at most the newest one may be unfinished.
    tma.store_wait(1 if PIECES > 1 else 0)
    buffer = buffers.index(PIECE % 2)
    buffer.reshape(c.shape).store(c)
    # TMA reads shared memory through the async proxy; the fence orders the stores above before it.
    fence_async_shared()
    tma.async_copy_shared_to_global(tiles, at, buffer)


@gluon.jit
def summed(acc, parts, counts, tile, begin, end, program, programs, waves, share, KB, WG: gl.constexpr,
           GROUPS: gl.constexpr = 2):  # fmt: skip
    """Leave a warpgroup's part of a tile's sums for another program, or add up all parts.

    Each of GROUPS warpgroups has as many of a tile's rows. Returns the sum, and whether it is complete. See `parts`.
    """
    MINE: gl.constexpr = acc.shape[0]
    OF: gl.constexpr = GROUPS * MINE
    BM: gl.constexpr = acc.shape[1]
    i = WG * MINE + gl.arange(0, MINE, gl.SliceLayout(1, acc.type.layout))
    j = gl.arange(0, BM, gl.SliceLayout(0, acc.type.layout))
    SIZE: gl.constexpr = OF * BM
    complete = end - begin == KB
    if not complete:
        # 1. Tiles behind the whole waves are numbered from 0; programs left..right have steps of this one. Each group
        #    has its own counter: groups never wait for each other. Along the line of steps the part or the program
        #    grows at each boundary, so part + program is a slot of its own.
        part = tile - waves * programs
        left = part * KB // share
        right = ((part + 1) * KB - 1) // share
        count = counts + GROUPS * part + WG
        if right - left == 1:
            # 2. Of two, whoever comes first leaves its part; the second keeps its own in registers and waits for the
            #    first, which has come and is writing. a + b is b + a: the result does not depend on who came first.
            complete = gl.atomic_add(count, 1, sem="relaxed") % WRITTEN == 1
            if complete:
                there = gl.atomic_add(count, 0, sem="acquire")
                while there < WRITTEN:
                    there = gl.atomic_add(count, 0, sem="acquire")
                acc = add_at(acc, value_at(parts, part + left + right - program, i, j, OF, BM), 0, SIZE, True)
                gl.store(count, 0)  # ready for the next launch
            else:
                put(value_at(parts, part + program, i, j, OF, BM), acc, True)
                count_in(count, WRITTEN)
        else:
            # 3. Of several, the last to come sums the slots in their order, its own part included: again the result
            #    does not depend on who that was.
            put(value_at(parts, part + program, i, j, OF, BM), acc, True)
            complete = count_in(count, 1) == right - left
            if complete:
                acc = zeros_like(acc, True)
                for p in range(left, right + 1, 4):
                    acc = add_at(acc, value_at(parts, part + p, i, j, OF, BM), right - p, SIZE, True)
                gl.store(count, 0)
    return acc, complete


@gluon.jit
def count_in(count, BY: gl.constexpr):
    """Count when all threads of the group have stored; acq_rel makes the stores visible to who reads the count."""
    gl.thread_barrier()
    return gl.atomic_add(count, BY, sem="acq_rel")
