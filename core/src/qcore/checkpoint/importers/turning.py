"""Transpose packed weights whose rows are input features to PLAIN, whose rows are output features, without unpacking.

A weight is far larger than a cache, and adjacent elements of a column are a row apart. So a band of columns is copied
to a tile that fits into the L2 cache, everything else happens there on words of several codes, and the rows of the
result are written once. That is almost as fast as copying memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .packing import SIGN_OF_NIBBLES

_TILE_BYTES = 1 << 19
"""Size of a tile. Up to five are allocated, once: mapping new memory by malloc would cost more than the work."""
_LINE = 16
"""Words in a cache line. Rows whose distance is a power of two would compete for the same few lines."""


def turned(words: Tensor, flipped: int = 0) -> Tensor:
    """The transpose of int32 words (R, C), contiguous (C, R). ``flipped``: bits to flip in each byte."""
    rows, columns = words.shape
    found = torch.empty(columns, rows, dtype=torch.int32)
    width = _band(rows, columns)
    tile = _padded(rows, width)
    for band in _bands(columns, width):
        torch.bitwise_xor(words[:, band], _every_byte(flipped), out=tile)
        found[band] = tile.t()
    return found


def turned_awq(words: Tensor) -> Tensor:
    """``qweight`` of AWQ's gemm, int32 (K, N / 8), as the bytes of PLAIN int4, uint8 (N, ceil(K / 2))."""
    k, columns = words.shape
    if k % 8:  # PLAIN is padded with code 0, which is 8 here
        rest = torch.full((-k % 8, columns), _every_byte(SIGN_OF_NIBBLES), dtype=torch.int32)
        return turned_awq(torch.cat((words, rest)))[:, : -(-k // 2)].contiguous()
    rows, width = k // 8, _band(k, columns)
    source = words.view(rows, 8, columns).transpose(0, 1)
    tile, spare = torch.empty(8, rows, width, dtype=torch.int32), torch.empty(4 * rows * width, dtype=torch.int32)
    ready = _padded(8, rows, width)
    # Nibble i belongs to output [0, 2, 4, 6, 1, 3, 5, 7][i] of eight: an index (2, 4) over i is (4, 2) over outputs.
    found = torch.empty(columns, 4, 2, rows, dtype=torch.int32)
    for band in _bands(columns, width):
        tile.copy_(source[:, :, band])  # eight rows of codes each
        for distance in (1, 2, 4):
            _exchange(tile, spare, distance, 4 * distance)
        torch.bitwise_xor(tile, _every_byte(SIGN_OF_NIBBLES), out=ready)  # eight outputs each, eight codes per word
        found[band] = ready.view(2, 4, rows, width).permute(3, 1, 0, 2)
    return found.view(torch.uint8).view(8 * columns, 4 * rows)


def turned_by_order(words: Tensor, bits: int, order: Tensor) -> Tensor:
    """Codes of 4 or 8 bits, packed along the rows of int32 words (K * bits / 32, N), as the bytes of PLAIN, uint8.

    ``order``: the column of the weight at each position, int32 (K,). Returns (N, K * bits / 8).
    """
    rows, columns = words.shape
    if columns < 4:
        return turned_by_order(torch.nn.functional.pad(words, (0, 4 - columns)), bits, order)[:columns].contiguous()
    rank, width = _rank(order, rows, bits), _band(rows, columns) // 4
    flipped = _every_byte(SIGN_OF_NIBBLES if bits == 4 else 128)
    tile, spare = torch.empty(4, rows, width, dtype=torch.int32), torch.empty(2 * rows * width, dtype=torch.int32)
    codes, sorted_codes = torch.empty(2, 8 // bits, 4, rows, width, dtype=torch.int32)
    ready = _padded(4, rows, width)
    found = torch.empty(columns, rows, dtype=torch.int32)
    for band in _bands(columns, 4 * width):
        tile.copy_(words[:, band].view(rows, 4, width).transpose(0, 1))
        _turn_bytes(tile, spare)  # a word holds the same byte of a row of words in four columns
        if bits == 4:
            torch.bitwise_and(tile, _every_byte(15), out=codes[0])
            torch.bitwise_right_shift(tile, 4, out=codes[1]).bitwise_and_(_every_byte(15))
        else:
            codes[0] = tile
        torch.index_select(codes.view(-1, width), 0, rank, out=sorted_codes.view(-1, width))
        if bits == 4:
            torch.bitwise_left_shift(sorted_codes[1], 4, out=tile).bitwise_or_(sorted_codes[0])
        else:
            tile.copy_(sorted_codes[0])
        _turn_bytes(tile, spare)
        torch.bitwise_xor(tile, flipped, out=ready)
        found[band].view(4, width, rows).copy_(ready.transpose(1, 2))
    return found.view(torch.uint8)


def _rank(order: Tensor, rows: int, bits: int) -> Tensor:
    """The source positions of the rows of codes, int64 (K,), if a tile's rows are ordered by half, byte and word row.

    With 8 bits there are no halves. The positions in the result follow the same order.
    """
    halves = 8 // bits
    codes = torch.arange(order.shape[0])
    row, byte, half = codes // (4 * halves), codes // halves % 4, codes % halves
    place = (half * 4 + byte) * rows + row
    rank = torch.empty_like(codes)
    rank[place] = place[order.long()]
    return rank


def _band(rows: int, columns: int) -> int:
    """The number of columns of int32 (rows, columns) in a tile: a multiple of four, or fewer than four."""
    width = max(_LINE, _TILE_BYTES // (4 * max(rows, 1)) // _LINE * _LINE)
    return min(width, columns // 4 * 4 or columns)


def _bands(columns: int, width: int) -> Iterator[slice]:
    """Ranges of ``width`` columns; the last may overlap the previous one, whose columns are then computed twice."""
    for start in range(0, columns, max(width, 1)):
        first = min(start, columns - width)
        yield slice(first, first + width)


def _padded(*shape: int) -> Tensor:
    """An int32 tensor whose row stride is one cache line longer than a row."""
    return torch.empty(*shape[:-1], shape[-1] + _LINE, dtype=torch.int32)[..., : shape[-1]]


def _turn_bytes(tile: Tensor, spare: Tensor) -> None:
    """Transpose the bytes of every four words in int32 (4, ...), in place."""
    _exchange(tile, spare, 1, 8)
    _exchange(tile, spare, 2, 16)


def _exchange(tile: Tensor, spare: Tensor, distance: int, shift: int) -> None:
    """Exchange the high fields of ``shift`` bits in plane i of int32 (planes, ...) with the low ones of i + distance.

    ``spare``: memory for half as many words.
    """
    pairs = tile.view(-1, 2, distance, *tile.shape[1:])
    first, second = pairs[:, 0], pairs[:, 1]
    changed = torch.bitwise_right_shift(first, shift, out=spare.view(first.shape))
    changed.bitwise_xor_(second).bitwise_and_(_LOW_FIELDS[shift])
    second ^= changed
    first ^= changed.bitwise_left_shift_(shift)


_LOW_FIELDS = {4: 0x0F0F0F0F, 8: 0x00FF00FF, 16: 0x0000FFFF}


def _every_byte(byte: int) -> int:
    """An int32 of four equal bytes."""
    return int.from_bytes(bytes([byte]) * 4, "little", signed=True)
