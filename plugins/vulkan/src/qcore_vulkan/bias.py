"""Biases in device memory: float32 buffers, used as long as the numbers stay the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qcore import FormatError

if TYPE_CHECKING:
    from .device import Buffer, Device

_KEPT = 4
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Biases:
    """The last few biases ``(n,)`` that came with a weight.

    They are told apart by their values, which takes a microsecond or two: a tensor's identity and version do not show
    what is written through ``.data``, and in a graph each call brings a new tensor. Threads need no lock: two that
    bring the same new bias at once upload it twice.
    """

    def __init__(self, device: Device, n: int) -> None:
        self._device, self._n = device, n
        self._entries: tuple[tuple[Tensor, Buffer], ...] = ()

    def buffer(self, bias: Tensor) -> Buffer:
        """The device's copy. Raises `FormatError` for a shape other than ``(n,)``."""
        for values, buffer in self._entries:
            if values.dtype == bias.dtype and torch.equal(values, bias):
                return buffer
        return self._found(bias) or self._uploaded(bias)

    def _found(self, bias: Tensor) -> Buffer | None:
        """By its bits: a bias that holds NaN equals no other number, not even itself."""
        bits = _bits(bias)
        entries = (buffer for values, buffer in self._entries if values.dtype == bias.dtype)
        known = (_bits(values) for values, _ in self._entries if values.dtype == bias.dtype)
        return next((buffer for buffer, own in zip(entries, known, strict=True) if torch.equal(own, bits)), None)

    def _uploaded(self, bias: Tensor) -> Buffer:
        if tuple(bias.shape) != (self._n,):
            raise FormatError(f"bias has shape {tuple(bias.shape)}; this weight needs ({self._n},).")
        values = bias.detach().clone()
        buffer = self._device.upload(values.float())
        self._entries = (*self._entries[-(_KEPT - 1) :], (values, buffer))
        return buffer


def _bits(values: Tensor) -> Tensor:
    return values.detach().view(_BITS[values.itemsize])
