"""Biases in device memory: float32 buffers, made once per bias and used as long as the numbers stay the same."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qcore import FormatError

if TYPE_CHECKING:
    from .device import Buffer, Device

_KEPT = 4


@dataclass(eq=False)
class _Entry:
    """A bias seen: ``tensor`` at ``version`` held ``values``, which are in ``buffer``."""

    tensor: weakref.ref[Tensor]
    version: int | None
    values: Tensor
    buffer: Buffer


class Biases:
    """The last few biases ``(n,)`` that came with a weight."""

    def __init__(self, device: Device, n: int) -> None:
        self._device, self._n = device, n
        self._entries: list[_Entry] = []
        self._lock = threading.Lock()

    def buffer(self, bias: Tensor) -> Buffer:
        """The device's copy. Raises `FormatError` for a shape other than ``(n,)``."""
        version = None if bias.is_inference() else bias._version  # noqa: SLF001 - torch has no public name for it
        for entry in self._entries:
            if version is not None and entry.version == version and entry.tensor() is bias:
                return entry.buffer
        with self._lock:
            return self._compared(bias, version).buffer

    def _compared(self, bias: Tensor, version: int | None) -> _Entry:
        """By value: in a graph each call brings a new tensor, and inference tensors carry no version."""
        if tuple(bias.shape) != (self._n,):
            raise FormatError(f"bias has shape {tuple(bias.shape)}; this weight needs ({self._n},).")
        for entry in self._entries:
            if entry.values.dtype == bias.dtype and torch.equal(entry.values, bias):
                entry.tensor, entry.version = weakref.ref(bias), version
                return entry
        values = bias.detach().clone()
        made = _Entry(weakref.ref(bias), version, values, self._device.upload(values.float().contiguous()))
        # A new list: readers without the lock see the old one or this one.
        self._entries = [*self._entries[-(_KEPT - 1) :], made]
        return made
