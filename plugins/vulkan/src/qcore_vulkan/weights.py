"""Weights in device memory, and the tensors that represent them.

``packed`` of a kernel here holds one tensor, a *handle*: int64 of shape (1,) on the CPU, the number of a `Holder`.
The handle's storage owns the holder: when the last tensor on that storage dies, the weight and its device memory are
freed, however the tensor was passed around. A clone has a storage of its own and owns nothing: it finds
the weight as long as the original lives.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qcore import PluginError, QTensor

from . import device as devices
from .bias import Biases
from .device import Device
from .layout import DeviceWeight, upload
from .native import Forked
from .programs import Programs

HOST_COPY = "QCORE_VULKAN_HOST_COPY"
"""Set to 1: weights stay in host memory as well, so that they survive the loss of a device."""

_alive: weakref.WeakValueDictionary[int, Holder] = weakref.WeakValueDictionary()
# From a random start: a handle from another process must not refer to a weight of this one.
_numbers = iter(range(secrets.randbits(48) << 14, 1 << 63))


@dataclass(frozen=True, eq=False)
class Resident:
    """A weight ``(n, k)``, or several of experts, on a device, with the programs and copies of biases made for it."""

    device: Device
    weight: DeviceWeight
    n: int
    k: int
    programs: Programs[Hashable, Any] = field(default_factory=Programs)

    @cached_property
    def biases(self) -> Biases:
        """Copies of biases on the same device."""
        experts = self.weight.experts
        return Biases(self.device, *([experts] if experts else []), self.n)


class Holder:
    """The owner of a resident; makes another one if the device was lost. ``number``: the value of its handle."""

    def __init__(self, weight: QTensor) -> None:
        self.number = next(_numbers)
        self._process = os.getpid()
        self._host = weight if os.environ.get(HOST_COPY, "") not in {"", "0"} else None
        self._lock = threading.Lock()
        self._resident = _placed(devices.get(), weight)
        _alive[self.number] = self

    def resident(self) -> Resident:
        """The weight on a live device. Raises `PluginError` if the device was lost, and the weight with it."""
        if os.getpid() != self._process:  # before any lock: another thread may have held it at the fork
            raise Forked(
                "this weight is on a Vulkan device that the parent of this process opened, and drivers do not "
                "work after a fork.\nStart workers with the 'spawn' method."
            )
        found = self._resident
        return self._again() if found.device.lost else found

    def _again(self) -> Resident:
        with self._lock:
            lost = self._resident.device
            if not lost.lost:  # another thread was faster
                return self._resident
            if self._host is None:
                raise PluginError(
                    f"the Vulkan device {lost.description.name!r} was lost, and this weight with it.\n"
                    f"Load the checkpoint again (qcore.load_), or set {HOST_COPY}=1 beforehand: then weights are also "
                    f"kept in host memory and restored automatically."
                )
            # In one assignment: another thread sees the old one, which is lost, or the new one.
            self._resident = _placed(devices.get(lost.description.index), self._host)
            return self._resident


def _placed(device: Device, weight: QTensor) -> Resident:
    n, k = weight.shape[-2:]
    return Resident(device, upload(device, weight), n, k)


class _Owner(np.ndarray[Any, Any]):
    """An array that keeps a holder alive; torch keeps the array alive as long as a storage needs its memory."""

    holder: Holder


def handle(weight: QTensor) -> Tensor:
    """Put a weight on the device: a tensor that represents and owns it."""
    holder = Holder(weight)
    array = np.array([holder.number], dtype=np.int64).view(_Owner)
    array.holder = holder
    return torch.from_numpy(array)


def find(tensor: Tensor) -> Resident:
    """The resident behind a handle. Raises `PluginError` if it is gone."""
    found = _alive.get(int(tensor.item()))
    if found is None:
        raise PluginError(
            "this handle refers to a weight in the memory of a Vulkan device that has been freed, or to one of "
            "another process.\nPack the weight again: qcore.save and qcore.load_, or kernel.pack(weight)."
        )
    return found.resident()


def known(tensor: Tensor) -> Resident | None:
    """The resident behind a tensor if it is a handle of this process, else None."""
    if tensor.dtype != torch.int64 or tensor.shape != (1,) or not tensor.is_cpu:
        return None
    found = _alive.get(int(tensor.item()))
    return None if found is None else found.resident()
