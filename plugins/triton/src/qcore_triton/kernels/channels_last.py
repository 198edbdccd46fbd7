"""Images with their channels last in memory, from images in any order.

Floor: the bytes of the images, read and written once at memory bandwidth. Grid: one program per BP positions of one
image and BC channels, which it reads in one order and writes in the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import begin


@triton.jit(do_not_specialize=["W", "tiles"])
def channels_last(
    x,
    y,
    size,
    C,
    W,
    tiles,
    batch_stride,
    channel_stride,
    row_stride,
    column_stride,
    FLAT: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
    PDL: tl.constexpr,
):
    """X ``(B, C, H, W)`` of any strides to y ``(B, H, W, C)``; ``size``: H * W; ``tiles``: programs per image.

    FLAT: the lines of x follow each other, positions have one stride.
    """
    image, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    p = tile.to(tl.int64) * BP + tl.arange(0, BP)[None, :]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[:, None]
    at = p * column_stride if FLAT else p // W * row_stride + p % W * column_stride
    x += image.to(tl.int64) * batch_stride + at + c.to(tl.int64) * channel_stride
    begin(PDL)
    v = tl.load(x, mask=(p < size) & (c < C), other=0)
    p, c = tl.trans(p), tl.trans(c)
    tl.store(y + (image.to(tl.int64) * size + p) * C + c, tl.trans(v), mask=(p < size) & (c < C))
