"""What the warp-specialized kernels for sm_90 share, in Gluon: rings of stages, and how a tile leaves.

A program has a warp that only fetches (TMA), in some kernels four that only convert, and two warpgroups that multiply,
each half of the rows of a tile. They hand stages of shared memory on through barriers: "full" by who wrote a stage,
"empty" by who has read it. Gluon is no settled interface: `runtime.hopper` says where these kernels are used.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

WIDEST: gl.constexpr = gl.constexpr(128)
"""Columns of the widest int8 instruction that Triton issues and that a layout can have."""


@gluon.jit
def ring(STAGES: gl.constexpr, READERS: gl.constexpr):
    """Barriers of stages that one writes and READERS read: full and empty."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty


@gluon.jit
def advance(slot, phase, STAGES: gl.constexpr):
    """The next stage and the parity of its barriers. A reader starts at (0, 0), a writer at (0, 1)."""
    slot += 1
    wrap = slot == STAGES
    return gl.where(wrap, 0, slot), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def cut(acc, PIECES: gl.constexpr):
    """A tile cut along its columns into 1, 2 or 4 pieces."""
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
    """Store piece c of a tile by way of one of two buffers of shared memory; the other one may still be read.

    An only piece always takes the same buffer.
    """
    tma.store_wait(1 if PIECES > 1 else 0)
    buffer = buffers.index(PIECE % 2)
    buffer.reshape(c.shape).store(c)
    fence_async_shared()
    tma.async_copy_shared_to_global(tiles, at, buffer)
