"""Codes in words of 32 bits, as GPTQ, AWQ and compressed-tensors store them, to codes and to the bytes of PLAIN."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats.bits import pack_nibbles

SIGN_OF_NIBBLES = 0x88
"""Flips the highest bit of both nibbles of a byte: offset-binary codes to two's complement."""


def unpack_words(words: Tensor, bits: int, count: int, dim: int) -> Tensor:
    """Unsigned codes, uint8, of int32 words in which code ``i`` of ``bits`` bits lies at bit ``bits * i``.

    ``words``: 2-D, packed along ``dim``; 3 bits run across words (32 codes in three words). ``count``: codes along
    ``dim`` that are kept.
    """
    rows = words if dim == 1 else words.t()
    raw = rows.contiguous().view(torch.uint8)
    codes = raw if bits == 8 else _unpack_bytes(raw, bits)
    codes = codes[:, :count]
    return codes if dim == 1 else codes.t()


def _unpack_bytes(raw: Tensor, bits: int) -> Tensor:
    """Codes of 2, 3 or 4 bits of a little-endian stream of bytes ``(rows, bytes)``."""
    mask = (1 << bits) - 1
    if bits in (2, 4):
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return ((raw.unsqueeze(-1) >> shifts) & mask).flatten(1)
    # Eight codes of 3 bits are 24 bits: three bytes.
    first, second, third = raw.view(raw.shape[0], -1, 3).to(torch.int32).unbind(-1)
    word = first | second << 8 | third << 16
    shifts = torch.arange(0, 24, 3, dtype=torch.int32)
    return ((word.unsqueeze(-1) >> shifts) & mask).to(torch.uint8).flatten(1)


def signed(codes: Tensor, bits: int) -> Tensor:
    """Offset-binary codes ``0 .. 2**bits - 1``, uint8, as int8 ``-2**(bits-1) ..``."""
    return (codes ^ 128).view(torch.int8) if bits == 8 else codes.to(torch.int8) - (1 << (bits - 1))


def plain_int4(codes: Tensor) -> Tensor:
    """Unsigned codes 0..15, uint8 ``(N, K)``, as the bytes of PLAIN int4, uint8 ``(N, ceil(K/2))``."""
    if codes.shape[1] % 2:  # PLAIN is padded with code 0, which is 8 here
        codes = torch.nn.functional.pad(codes, (0, 1), value=8)
    return pack_nibbles(codes[:, ::2], codes[:, 1::2]) ^ SIGN_OF_NIBBLES
