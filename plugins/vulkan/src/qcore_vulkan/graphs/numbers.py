"""Numbers on the host and on the device, where every element of a value is one 32-bit word.

Floats are float32, whatever their dtype in torch, but for weights of products and tables, which may have 16 bits;
integers are int32, booleans int32 of 0 and 1. Values are converted where they cross over. Integers that do not fit 32
bits are an `OverflowError`, whether they cross over or are computed; arithmetic that could leave them unnoticed stays
on the host. Torch's int32 wraps around on the device as in torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sentinels import check

FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
INTEGERS = frozenset({torch.int64, torch.int32})
SMALL = frozenset({torch.int8, torch.uint8, torch.int16})
"""Integers that only come from the host: arithmetic would wrap around elsewhere than in torch."""
TOO_LARGE = "an integer does not fit the 32 bits in which qcore_vulkan computes integers."
DTYPES = FLOATS | INTEGERS | SMALL | {torch.bool}


def on_device(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a value on the device: float32, int32 or bool."""
    return dtype if dtype == torch.bool else torch.float32 if dtype in FLOATS else torch.int32


def words_of(tensor: Tensor) -> Tensor:
    """A tensor as the device takes it: contiguous, float32 or int32.

    Raises `OverflowError` for too large integers, `StaleValuesError` for what torch made from stale memory of a state.
    """
    dense = tensor.detach().contiguous()
    dense = dense.resolve_neg() if dense.is_neg() else dense
    if dense.dtype in FLOATS:
        check(dense)
        return dense.to(torch.float32)
    if dense.dtype != torch.int64:
        return dense.to(torch.int32)
    narrow = dense.to(torch.int32)
    if dense.numel() and not torch.equal(narrow.to(torch.int64), dense):
        check(dense)
        raise OverflowError(TOO_LARGE)
    return narrow


def halves_of(tensor: Tensor) -> Tensor:
    """A tensor of 16-bit floats as the device takes it for a product or a table: as it is, in whole words.

    Raises `StaleValuesError` as `words_of` does.
    """
    check(tensor.detach())
    bits = tensor.detach().contiguous().view(torch.int16).reshape(-1)
    return torch.nn.functional.pad(bits, (0, bits.numel() % 2))


def host_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the words that a value of the device is read as."""
    return torch.float32 if on_device(dtype) == torch.float32 else torch.int32
