"""Convert codes in 32-bit words, as stored by GPTQ, AWQ and compressed-tensors, to codes and to the bytes of PLAIN."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats.bits import pack_columns, pack_nibbles
from ...weights.qtensor import contiguous

SIGN_OF_NIBBLES = 0x88
"""Flips the highest bit of both nibbles of a byte: offset-binary codes to two's complement."""


def unpack_words(words: Tensor, bits: int, count: int, dim: int, *, whole: bool = False) -> Tensor:
    """Unsigned codes, uint8, from int32 words: consecutive codes of ``bits`` bits, the first in the lowest bits.

    ``words``: 2-D, packed along ``dim``; ``count``: number of codes along ``dim`` to keep; ``whole``: no code crosses
    words, so that 3, 5, 6 and 7 bits leave the highest bits of a word empty.
    """
    rows = contiguous(words if dim == 1 else words.t())
    if bits == 8:
        codes = rows.view(torch.uint8)
    elif whole or bits in (2, 4):
        # With 2 and 4 bits, a byte holds whole codes: shifting bytes needs a quarter of the memory.
        narrow = rows.view(torch.uint8) if bits in (2, 4) else rows
        codes = _shifted(narrow, bits, narrow.dtype.itemsize * 8 // bits)
    else:
        codes = _shifted(_eights(rows.view(torch.uint8), bits), bits, 8)
    codes = codes[:, :count]
    return codes if dim == 1 else codes.t()


def _shifted(fields: Tensor, bits: int, each: int) -> Tensor:
    """``each`` codes from every integer of ``(rows, fields)``, in order, uint8 ``(rows, fields * each)``."""
    codes = torch.empty(*fields.shape, each, dtype=torch.uint8)
    for place in range(each):
        codes[..., place] = (fields >> (bits * place)) & ((1 << bits) - 1)
    return codes.flatten(1)


def _eights(raw: Tensor, bits: int) -> Tensor:
    """Bytes ``(rows, bytes)`` as int64 ``(rows, ceil(bytes / bits))``, each with eight codes of ``bits`` bits."""
    padded = torch.nn.functional.pad(raw, (0, -raw.shape[1] % bits))
    parts = padded.view(raw.shape[0], -1, bits)
    found = torch.zeros(parts.shape[:2], dtype=torch.int64)
    for place in range(bits):
        found |= parts[..., place].to(torch.int64) << (8 * place)
    return found


def signed(codes: Tensor, bits: int) -> Tensor:
    """Offset-binary codes ``0 .. 2**bits - 1``, uint8, as int8 ``-2**(bits-1) ..``."""
    return (codes ^ 128).view(torch.int8) if bits == 8 else codes.to(torch.int8) - (1 << (bits - 1))


def plain_int4(codes: Tensor, order: Tensor | None = None) -> Tensor:
    """Unsigned codes 0..15, uint8 ``(N, K)``, as the bytes of PLAIN int4, uint8 ``(N, ceil(K/2))``.

    ``order``: the column of ``codes`` at each position, int32 ``(K,)``.
    """
    if codes.shape[1] % 2:  # PLAIN is padded with code 0, which is 8 here
        codes = torch.nn.functional.pad(codes, (0, 1), value=8)
        if order is not None:
            order = torch.cat((order, order.new_tensor([codes.shape[1] - 1])))
    if order is None:
        return pack_columns(codes) ^ SIGN_OF_NIBBLES
    low, high = (codes.index_select(1, order[first::2]) for first in (0, 1))
    return pack_nibbles(low, high) ^ SIGN_OF_NIBBLES
