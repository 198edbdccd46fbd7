"""Biases in device memory: float32 buffers, reused as long as the values stay the same."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qcore import FormatError
from qcore.plugin_api import contiguous

if TYPE_CHECKING:
    from .device import Buffer, Device

_KEPT = 4
# Five to ten times as fast as torch.equal, and a NaN equals itself.
_differ = ctypes.CDLL(None).memcmp
_differ.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, eq=False)
class _Known:
    """A known bias: a copy of its ``values``, which ``buffer`` holds as float32."""

    values: Tensor
    address: int
    buffer: Buffer


class Biases:
    """The last few biases of ``shape`` used with a weight: ``(n,)``, with experts ``(experts, n)``.

    They are compared by value, which takes a microsecond: a tensor's identity and version do not reveal writes through
    ``.data``, and in a graph each call has a new tensor. Threads need no lock: two that use the same new bias at once
    upload it twice.
    """

    def __init__(self, device: Device, *shape: int) -> None:
        self._device, self._shape = device, torch.Size(shape)
        self._known: tuple[_Known, ...] = ()

    def buffer(self, bias: Tensor) -> Buffer:
        """The device's copy. Raises `FormatError` for another shape."""
        if bias.shape != self._shape:
            raise FormatError(f"bias has shape {tuple(bias.shape)}; this weight needs {tuple(self._shape)}.")
        bias = contiguous(bias) if bias.is_neg() or not bias.is_contiguous() else bias
        dtype, address, nbytes = bias.dtype, bias.data_ptr(), bias.nbytes
        for known in self._known:
            if known.values.dtype is dtype and not _differ(known.address, address, nbytes):
                return known.buffer
        return self._uploaded(bias.detach().clone())

    def _uploaded(self, values: Tensor) -> Buffer:
        made = _Known(values, values.data_ptr(), self._device.upload(values.float()))
        self._known = (*self._known[-(_KEPT - 1) :], made)
        return made.buffer
