"""Codes in bytes: two nibbles per byte, and interleaved columns."""

from __future__ import annotations

import torch
from torch import Tensor


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


def interleave(even: Tensor, odd: Tensor) -> Tensor:
    """``(N, J)`` and ``(N, J)`` to ``(N, 2J)``: columns even[0], odd[0], even[1], ..."""
    return torch.stack((even, odd), dim=-1).flatten(-2)


def raw(t: Tensor) -> Tensor:
    """A float8 tensor as its bytes, uint8, any other unchanged; ``.view(t.dtype)`` undoes it.

    torch cannot compare, concatenate or index float8 on every device, and cannot unpickle it.
    """
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t


def has_values(tensor: Tensor) -> bool:
    """Whether the values of ``tensor`` can be read: it is not meta, not fake, and not traced."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not (tensor.device.type == "meta" or isinstance(tensor, FakeTensor) or torch.compiler.is_compiling())
