"""Codes in bytes: nibbles packed by two, and columns that take turns."""

from __future__ import annotations

import torch
from torch import Tensor


def pad_columns(codes: Tensor, multiple: int) -> Tensor:
    """Add columns of codes 0 behind ``(N, K)`` until their number is a multiple."""
    missing = -codes.shape[1] % multiple
    return torch.nn.functional.pad(codes, (0, missing)) if missing else codes


def pack_nibbles(low: Tensor, high: Tensor) -> Tensor:
    """Two integer tensors into uint8: ``low`` in bits 0-3, ``high`` in bits 4-7. Only their low four bits count."""
    return ((low & 15) | ((high & 15) << 4)).to(torch.uint8)


def unpack_nibbles(data: Tensor) -> tuple[Tensor, Tensor]:
    """The (low, high) nibbles of a uint8 tensor, sign-extended from four bits to int8."""
    signed = data.view(torch.int8)
    return _shifted(signed << 4), _shifted(signed)


def unpack_unsigned_nibbles(data: Tensor) -> tuple[Tensor, Tensor]:
    """The (low, high) nibbles of a uint8 tensor as they are, uint8 0 to 15."""
    return data & 15, data >> 4


def _shifted(signed: Tensor) -> Tensor:
    # On XLA tensors >> of a negative number divides, towards zero; this function shifts, but its result is wider.
    return torch.bitwise_right_shift(signed, 4).to(torch.int8)


def interleave(even: Tensor, odd: Tensor) -> Tensor:
    """``(N, J)`` and ``(N, J)`` to ``(N, 2J)``: columns even[0], odd[0], even[1], ..."""
    return torch.stack((even, odd), dim=-1).flatten(-2)


def raw(t: Tensor) -> Tensor:
    """A float8 tensor as its bytes, uint8, any other as it is; ``.view(t.dtype)`` undoes it.

    torch neither compares, joins nor indexes float8 on every device, and cannot unpickle it.
    """
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t


def has_values(tensor: Tensor) -> bool:
    """Whether the numbers of ``tensor`` can be looked at: not meta, not fake, not under a trace."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not (tensor.device.type == "meta" or isinstance(tensor, FakeTensor) or torch.compiler.is_compiling())
