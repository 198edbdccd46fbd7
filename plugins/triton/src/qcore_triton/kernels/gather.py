"""``gather``: rows of a packed table, dequantized, by index. Reads only the bytes of those rows."""

from __future__ import annotations

import triton
import triton.language as tl

from .elements import byte_value, factor_of, nibble_value, pitch_of, scale_value


@triton.jit
def _weights(codes, scale, zero, ZERO: tl.constexpr):
    """Weights of codes with their group's scale and zero point, all float32."""
    if ZERO == 1:
        w = (codes - zero) * scale
    elif ZERO == 2:
        w = codes * scale + zero
    else:
        w = codes * scale
    return w


@triton.jit
def _blocks(
    row, rows, line, block, here, inside, data, scale, zero, factor, out, v, d, group, blocks, stride,
    BITS: tl.constexpr, P: tl.constexpr, ZERO: tl.constexpr, NAN: tl.constexpr, ELEMENT: tl.constexpr,
    FACTOR: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Dequantize blocks of the table and store them in their rows of the result.

    ``block``, ``here``: ``(NB,)``; ``row``: of the table, one for all or ``(NB,)``; ``rows``: the same, ``line``: start
    of the result's row, one for all or ``(NB, 1)``. ``NAN``: blocks that are not ``inside`` become NaN.
    """
    H: tl.constexpr = P // 2
    SCALE: tl.constexpr = scale.dtype.element_ty
    by = factor_of(factor, FACTOR)
    pitch = pitch_of(v)
    at = (block * P // group).to(tl.int64) * pitch + row
    s = (scale_value(tl.load(scale + at, mask=here, other=0), SCALE) * by)[:, None]
    if NAN:
        s = tl.where(inside[:, None], s, float("nan"))
    # Of two groups in a block, the high nibbles are the second one, if there still is one.
    after = s
    if HALVES:
        there = here & ((block * P + H) < d)
        after = (scale_value(tl.load(scale + at + pitch, mask=there, other=0), SCALE) * by)[:, None]
        if NAN:
            after = tl.where(inside[:, None], after, float("nan"))
    z = s if ZERO == 0 else tl.load(zero + at, mask=here, other=0).to(tl.float32)[:, None]
    if BITS == 4:
        # Neighbouring bytes are read together and put in the order of their columns, see `dequant`; then all low
        # nibbles are neighbours in the result, and all high ones.
        V: tl.constexpr = P // 32
        NB: tl.constexpr = block.shape[0]
        i = tl.arange(0, H)[None, :]
        start = (rows // 16) * (blocks * 16 * H) + (rows % 16) * H
        codes = tl.load(data + start + (block[:, None] * (16 * H) + i), mask=here[:, None], other=0)
        codes = tl.reshape(tl.trans(tl.reshape(codes, [NB, 4, V, 2, 2]), 0, 2, 3, 1, 4), [NB, H])
        k = block[:, None] * P + i
        low, high = nibble_value(codes & 15, ELEMENT), nibble_value(codes >> 4, ELEMENT)
        tl.store(line + k, _weights(low, s, z, ZERO).to(out.dtype.element_ty), mask=k < d)
        tl.store(line + k + H, _weights(high, after, z, ZERO).to(out.dtype.element_ty), mask=k + H < d)
    else:
        k = block[:, None] * P + tl.arange(0, P)[None, :]
        codes = byte_value(tl.load(data + rows * stride + k, mask=k < d, other=0), ELEMENT)
        tl.store(line + k, _weights(codes, s, z, ZERO).to(out.dtype.element_ty), mask=k < d)


@triton.jit
def gather(
    indices, data, scale, zero, factor, out, v, d, group, blocks, stride,
    BITS: tl.constexpr, P: tl.constexpr, NB: tl.constexpr, ZERO: tl.constexpr, ELEMENT: tl.constexpr,
    FACTOR: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Program (t, j): columns ``j*NB*P ..`` of token t.

    ``indices``: integers ``(T,)`` in 0..v-1; ``data``: planar16 (``BITS`` 4, blocks of P, ``blocks`` per row) or rows16
    (8; rows are ``stride`` bytes apart); ``scale``, ``zero``: ``(G, pitch_of(v))``; ``out``: ``(T, d)``. ``ELEMENT``,
    ``FACTOR`` and ``HALVES`` (two groups in a block): see `dequant`. Compiled with ``debug``, an index out of range
    triggers the same device-side assertion as in torch.
    """
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(indices + token).to(tl.int64)
    inside = (row >= 0) & (row < v)
    tl.device_assert(inside, "qcore embedding: an index is out of range")
    row = tl.where(inside, row, 0)  # other threads continue after a failed assertion and must not read out of bounds
    block = tl.program_id(1) * NB + tl.arange(0, NB)
    line = out + token * d
    _blocks(
        row, row, line, block, block < blocks, inside, data, scale, zero, factor, out, v, d, group, blocks, stride,
        BITS, P, ZERO, False, ELEMENT, FACTOR, HALVES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pieces"])
def gather_pieces(
    indices, data, scale, zero, factor, out, v, d, group, blocks, stride, pieces,
    BITS: tl.constexpr, P: tl.constexpr, NB: tl.constexpr, ZERO: tl.constexpr, ELEMENT: tl.constexpr,
    FACTOR: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """`gather` for rows too short to fill a program: NB of the ``T * blocks`` blocks, of any tokens.

    If a device-side assertion has no effect, an index out of range gives a row of NaN.
    """
    piece = tl.minimum(tl.program_id(0).to(tl.int64) * NB + tl.arange(0, NB), pieces - 1)
    token = piece // blocks
    row = tl.load(indices + token).to(tl.int64)
    inside = (row >= 0) & (row < v)
    tl.device_assert(inside, "qcore embedding: an index is out of range")
    row = tl.where(inside, row, 0)
    block = piece % blocks
    line = out + token[:, None] * d
    _blocks(
        row, row[:, None], line, block, block < blocks, inside, data, scale, zero, factor, out, v, d, group, blocks,
        stride, BITS, P, ZERO, True, ELEMENT, FACTOR, HALVES,
    )  # fmt: skip
