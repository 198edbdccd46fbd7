"""Codes in bytes: two nibbles per byte, and interleaved columns."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from .tracing import is_batched, runs_now


def pad_columns(codes: Tensor, multiple: int) -> Tensor:
    """Append columns of codes 0 to ``(N, K)`` until their number is a multiple of ``multiple``."""
    missing = -codes.shape[1] % multiple
    return torch.nn.functional.pad(codes, (0, missing)) if missing else codes


def pack_nibbles(low: Tensor, high: Tensor) -> Tensor:
    """Pack two integer tensors into uint8: ``low`` in bits 0-3, ``high`` in bits 4-7. Uses only their low four bits."""
    return ((low & 15) | ((high & 15) << 4)).to(torch.uint8)


def unpack_nibbles(data: Tensor) -> tuple[Tensor, Tensor]:
    """The (low, high) nibbles of a uint8 tensor, sign-extended from four bits to int8."""
    signed = data.view(torch.int8)
    return _shifted(signed << 4), _shifted(signed)


def unpack_unsigned_nibbles(data: Tensor) -> tuple[Tensor, Tensor]:
    """The (low, high) nibbles of a uint8 tensor without sign extension, uint8 0 to 15."""
    return data & 15, data >> 4


def _shifted(signed: Tensor) -> Tensor:
    # On XLA tensors, >> of a negative number divides, rounding towards zero; this function shifts, but the result is
    # wider.
    return torch.bitwise_right_shift(signed, 4).to(torch.int8)


def pack_columns(codes: Tensor) -> Tensor:
    """Pack ``(N, K)`` codes, K even, into uint8 ``(N, K / 2)``: even columns in bits 0-3, odd ones in bits 4-7."""
    if not _has_words(codes):
        return pack_nibbles(codes[:, 0::2], codes[:, 1::2])
    data = codes.new_empty((codes.shape[0], codes.shape[1] // 2), dtype=torch.uint8)
    flat = codes.contiguous().flatten()  # `flatten` alone keeps one stride over all, which may not be 1
    if flat.storage_offset() % 2:  # no word begins there
        flat = flat.clone()
    words = flat.view(torch.int16)
    odds, evens = words.new_empty((2, min(_CHUNK, len(words))))
    for pairs, out in zip(torch.split(words, _CHUNK), torch.split(data.flatten(), _CHUNK), strict=True):
        odd, even = odds[: len(pairs)], evens[: len(pairs)]
        torch.bitwise_right_shift(pairs, 4, out=odd).bitwise_and_(0xF0)
        torch.bitwise_and(pairs, 0x0F, out=even)
        out.copy_(odd.bitwise_or_(even))
    return data


def unpack_columns(data: Tensor, *, signed: bool) -> Tensor:
    """The inverse of `pack_columns`: int8 codes, sign-extended from four bits, if ``signed``, else uint8 0 to 15."""
    if not _has_words(data):
        return interleave(*(unpack_nibbles if signed else unpack_unsigned_nibbles)(data))
    codes = data.new_empty((data.shape[0], data.shape[1] * 2), dtype=torch.int8 if signed else torch.uint8)
    words = codes.view(torch.int16).flatten()
    wide, signs = words.new_empty((2, min(_CHUNK, len(words))))
    for packed, out in zip(
        torch.split(data.view(torch.uint8).flatten(), _CHUNK), torch.split(words, _CHUNK), strict=True
    ):
        pairs = wide[: len(packed)].copy_(packed)
        torch.bitwise_left_shift(pairs, 4, out=out).bitwise_or_(pairs).bitwise_and_(0x0F0F)
        if signed:
            sign = signs[: len(packed)]
            out.bitwise_or_(torch.bitwise_and(out, 0x0808, out=sign).mul_(0xF0 // 8))
    return codes


_CHUNK = (1 << 15) - 64
"""Words at a time. What is written in between stays in the cache, in memory that is allocated once; and ops of torch on
fewer than 1 << 15 numbers use one thread: several would wait for each other thousands of times."""


def _has_words(tensor: Tensor) -> bool:
    """Whether two neighbouring bytes can be changed as one 16-bit word, of which the first is the lower one.

    Several times as fast on a CPU. Other devices have the bandwidth, and traced code needs plain operations.
    """
    plain = tensor.device.type == "cpu" and tensor.element_size() == 1 and tensor.numel() and runs_now(tensor)
    return bool(plain) and sys.byteorder == "little"


def interleave(even: Tensor, odd: Tensor) -> Tensor:
    """``(N, J)`` and ``(N, J)`` to ``(N, 2J)``: columns even[0], odd[0], even[1], ..."""
    return torch.stack((even, odd), dim=-1).flatten(-2)


def raw(t: Tensor) -> Tensor:
    """A float8 tensor as its bytes, uint8, any other unchanged; ``.view(t.dtype)`` undoes it.

    torch cannot compare, concatenate or index float8 on every device, and cannot unpickle it.
    """
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t


def has_values(tensor: Tensor) -> bool:
    """Whether the values of ``tensor`` can be read: it is not meta, not fake, not traced and no batch of ``vmap``."""
    from torch._subclasses.fake_tensor import FakeTensor

    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor) or torch.compiler.is_compiling():
        return False
    return not is_batched(tensor)
