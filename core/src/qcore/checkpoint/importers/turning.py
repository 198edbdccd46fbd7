"""Turn packed weights whose rows are input features into PLAIN, whose rows are output features, without unpacking them.

A weight is far larger than a cache, and neighbours of a column lie a row apart. So a band of columns is copied to a
tile that fits into the second level of caches, everything else happens there on words of several codes, and the rows
of the result are written once. That is near the speed of copying memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .packing import SIGN_OF_NIBBLES

_TILE_BYTES = 1 << 18
"""Of a tile. There are up to six of its size at a time."""
_LINE = 16
"""Words in a line of the cache: bands are no narrower, and rows of a tile are a line longer than a power of two."""


def turned(words: Tensor, flipped: int = 0) -> Tensor:
    """The transpose of int32 words (R, C), contiguous (C, R). ``flipped``: a byte whose bits are flipped in each."""
    rows, columns = words.shape
    found = torch.empty(columns, rows, dtype=torch.int32)
    for start, stop in _bands(rows, columns):
        tile = torch.empty(rows, stop - start + _LINE, dtype=torch.int32)[:, : stop - start]
        tile.copy_(words[:, start:stop])
        if flipped:
            tile ^= _every_byte(flipped)
        found[start:stop] = tile.t()
    return found


def turned_awq(words: Tensor) -> Tensor:
    """``qweight`` of AWQ's gemm, int32 (K, N / 8), as the bytes of PLAIN int4, uint8 (N, ceil(K / 2))."""
    k, columns = words.shape
    if k % 8:  # PLAIN is padded with code 0, which is 8 here
        rest = torch.full((-k % 8, columns), _every_byte(SIGN_OF_NIBBLES), dtype=torch.int32)
        words = torch.cat((words, rest))
    rows = words.shape[0] // 8
    source = words.view(rows, 8, columns).transpose(0, 1)
    # Nibble i belongs to output [0, 2, 4, 6, 1, 3, 5, 7][i] of eight: an index (2, 4) over i is (4, 2) over outputs.
    found = torch.empty(columns, 4, 2, rows, dtype=torch.int32)
    for start, stop in _bands(8 * rows, columns):
        tile = source[:, :, start:stop].contiguous()  # [row of eight, rows, band]
        for distance in (1, 2, 4):
            _exchange(tile, distance, 4 * distance)
        tile ^= _every_byte(SIGN_OF_NIBBLES)  # [nibble, rows, band]: of eight rows, one output
        found[start:stop] = tile.view(2, 4, rows, stop - start).permute(3, 1, 0, 2)
    data = found.view(torch.uint8).view(8 * columns, 4 * rows)
    return data if k % 8 == 0 else data[:, : -(-k // 2)].contiguous()


def turned_by_order(words: Tensor, bits: int, order: Tensor) -> Tensor:
    """Codes of 4 or 8 bits, packed along the rows of int32 words (K * bits / 32, N), as the bytes of PLAIN, uint8.

    ``order``: the column of the weight that comes at each place, int32 (K,). Returns (N, K * bits / 8).
    """
    rows, columns = words.shape
    rank = _rank(order, rows, bits)
    found = torch.empty(columns, rows, dtype=torch.int32)
    flipped = _every_byte(SIGN_OF_NIBBLES if bits == 4 else 128)
    for start, stop in _bands(rows, columns):
        width = -(-(stop - start) // 4)
        quarters = [(at, min(at + width, stop)) for at in range(start, stop, width)]
        tile = torch.empty(4, rows, width, dtype=torch.int32)
        for place, (first, last) in enumerate(quarters):
            tile[place, :, : last - first] = words[:, first:last]
        _turn_bytes(tile)  # [byte, rows, width]: a word holds this byte of one row of words in four columns
        if bits == 8:
            tile = tile.view(-1, width).index_select(0, rank).view(4, rows, width)
        else:
            codes = torch.stack((tile & _every_byte(15), (tile >> 4) & _every_byte(15)))
            low, high = codes.view(-1, width).index_select(0, rank).view(2, 4, rows, width)
            tile = high.bitwise_left_shift_(4).bitwise_or_(low)
        _turn_bytes(tile)
        tile ^= flipped
        for place, (first, last) in enumerate(quarters):
            found[first:last] = tile[place, :, : last - first].t()
    return found.view(torch.uint8)


def _rank(order: Tensor, rows: int, bits: int) -> Tensor:
    """Where the rows of codes come from, int64 (K,), when those of a tile lie by half, byte and row of words.

    With 8 bits there are no halves. The same places, in the same order, are those of the result.
    """
    halves = 8 // bits
    codes = torch.arange(order.shape[0])
    row, byte, half = codes // (4 * halves), codes // halves % 4, codes % halves
    place = (half * 4 + byte) * rows + row
    rank = torch.empty_like(codes)
    rank[place] = place[order.long()]
    return rank


def _bands(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of columns of int32 (rows, columns), each of which makes a tile."""
    width = max(_LINE, _TILE_BYTES // (4 * max(rows, 1)) // _LINE * _LINE)
    for start in range(0, columns, width):
        yield start, min(start + width, columns)


def _turn_bytes(tile: Tensor) -> None:
    """Transpose the bytes of each four words in int32 (4, ...), in place."""
    _exchange(tile, 1, 8)
    _exchange(tile, 2, 16)


def _exchange(tile: Tensor, distance: int, shift: int) -> None:
    """Exchange the high fields of ``shift`` bits in plane i of int32 (planes, ...) with the low ones of i + distance."""
    pairs = tile.view(-1, 2, distance, *tile.shape[1:])
    first, second = pairs[:, 0], pairs[:, 1]
    changed = (first >> shift).bitwise_xor_(second).bitwise_and_(_LOW_FIELDS[shift])
    second ^= changed
    first ^= changed.bitwise_left_shift_(shift)


_LOW_FIELDS = {4: 0x0F0F0F0F, 8: 0x00FF00FF, 16: 0x0000FFFF}


def _every_byte(byte: int) -> int:
    """An int32 of four equal bytes."""
    return int.from_bytes(bytes([byte]) * 4, "little", signed=True)
