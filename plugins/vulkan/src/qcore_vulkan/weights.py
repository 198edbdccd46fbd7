"""Weights in device memory, and the tensors that stand for them.

``packed`` of a kernel here holds one tensor, a *handle*: int64 of shape (1,) on the CPU, the number of a `Resident`.
The handle's storage owns the resident: when the last tensor on that storage dies, so does the resident, and its device
memory is free again, however the tensor was passed around. A clone has a storage of its own and owns nothing: it finds
the weight as long as the original lives.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qcore import Format, FormatError, Kernel, PluginError, QTensor
from qcore.kernels import Packed

from . import device as devices
from .bias import Biases
from .layout import DeviceWeight, download, upload
from .programs import Programs

HOST_COPY = "QCORE_VULKAN_HOST_COPY"
"""Set to 1: weights stay in host memory as well, so that they survive the loss of a device."""

_alive: weakref.WeakValueDictionary[int, Resident] = weakref.WeakValueDictionary()
# From anywhere: a handle from another process must not name a weight of this one.
_numbers = iter(range(secrets.randbits(48) << 14, 1 << 63))


class Resident:
    """A weight in device memory, with what was made for it: programs and copies of biases.

    **Fields:** ``number``: what its handle holds; ``n`` and ``k``; ``nbytes``: on the device.
    """

    def __init__(self, weight: QTensor) -> None:
        self.number = next(_numbers)
        self.n, self.k = weight.shape
        self._host = weight if os.environ.get(HOST_COPY, "") not in {"", "0"} else None
        self._lock = threading.Lock()
        self._put(devices.get(), weight)
        _alive[self.number] = self

    def _put(self, device: devices.Device, weight: QTensor) -> None:
        self.device = device
        self.weight: DeviceWeight = upload(device, weight)
        self.nbytes = self.weight.nbytes
        self.programs: Programs[Hashable, Any] = Programs()
        self.biases = Biases(device, self.n)

    def ready(self) -> Resident:
        """Itself, on a device that lives. Raises `PluginError` where the device was lost, and the weight with it."""
        return self._again() if self.device.lost else self

    def _again(self) -> Resident:
        with self._lock:
            if not self.device.lost:  # another thread was quicker
                return self
            if self._host is None:
                raise PluginError(
                    f"the Vulkan device {self.device.description.name!r} was lost, and this weight with it.\n"
                    f"Load the checkpoint again (qcore.load_), or set {HOST_COPY}=1 beforehand: then weights are kept "
                    f"in host memory as well, and come back by themselves."
                )
            self._put(devices.get(self.device.description.index), self._host)
            return self


class _Owner(np.ndarray[Any, Any]):
    """An array that keeps a resident alive; torch keeps the array alive as long as a storage needs its memory."""

    resident: Resident


def handle(resident: Resident) -> Tensor:
    """A tensor that stands for ``resident`` and owns it."""
    array = np.array([resident.number], dtype=np.int64).view(_Owner)
    array.resident = resident
    return torch.from_numpy(array)


def find(tensor: Tensor) -> Resident:
    """The resident behind a handle. Raises `PluginError` where it is gone."""
    found = _alive.get(int(tensor.item()))
    if found is None:
        raise PluginError(
            "this handle stands for a weight in the memory of a Vulkan device that has been freed, or for one of "
            "another process.\nPack the weight again: qcore.save and qcore.load_, or kernel.pack(weight)."
        )
    return found.ready()


class HandleKernel(Kernel):
    """A kernel on weights that live in device memory: made for one `Format` and shape ``(n, k)``."""

    def __init__(self, name: str, format: Format, n: int, k: int) -> None:
        self.name, self.format, self.n, self.k = name, format, n, k

    @property
    def packing(self) -> str:
        """One layout serves every contract, so layers that are tied share the memory."""
        return "vulkan"

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """Put the weight on the device. Raises `FormatError` for one that the kernel was not made for."""
        if weight.format != self.format or tuple(weight.shape) != (self.n, self.k):
            raise FormatError(
                f"{self.name} was made for {self.format} of shape {(self.n, self.k)};\n"
                f"it cannot pack {weight.format} of shape {tuple(weight.shape)}."
            )
        return {"weight": handle(Resident(weight))}

    def unpack(self, packed: Packed) -> QTensor:
        return download(find(packed["weight"]).weight)

    def nbytes(self, tensor: Tensor) -> int:
        return find(tensor).nbytes
