"""Tensors in device memory: parameters, buffers and quantized weights, uploaded once and kept while they live."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from qcore import QcoreWarning
from qcore.plugin_api import QTensor, Resident, layers_of, weight_of

from ..device import Buffer, Device
from ..layout import DeviceWeight, upload
from ..native import OutOfMemory
from ..weights import known
from .numbers import halves_of, words_of


class Weight:
    """A quantized weight on a device, or those of experts.

    ``order``: int32 ``(K,)``, of experts ``(E, K)``: where its columns are in x; None if they are in x's order.
    """

    def __init__(self, device: Device, weight: DeviceWeight, order: Buffer | None = None) -> None:
        self.device, self.weight, self.order = device, weight, order


class Residents:
    """What one device holds of the tensors of graphs."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._statics: Resident[Buffer] = Resident(lambda tensor: self._uploaded(self._statics, tensor, words_of))
        self._halves: Resident[Buffer] = Resident(lambda tensor: self._uploaded(self._halves, tensor, halves_of))
        self._weights: Resident[Weight] = Resident(partial(_weight, device))

    def static(self, tensor: Tensor) -> Buffer:
        """The words of a parameter or buffer. Raises `OutOfMemory`, `OverflowError`."""
        return self._statics.get(tensor)

    def half(self, tensor: Tensor) -> Buffer:
        """A parameter of 16-bit floats as it is. Raises `OutOfMemory`."""
        return self._halves.get(tensor)

    def _uploaded(self, own: Resident[Buffer], tensor: Tensor, words: Callable[[Tensor], Tensor]) -> Buffer:
        """A new buffer, or that of an earlier version of the tensor: recorded programs that name it stay valid."""
        if tensor.is_inference():
            _warn_of_uncounted_writes()
        known = own.peek(tensor)
        if known is not None and known.nbytes == (made := words(tensor)).nbytes:
            known.write(made)
            return known
        return static(self._device, tensor, words)

    def weight(self, marker: Tensor) -> Weight:
        """The weight that ``marker`` stands for. Raises `OutOfMemory`."""
        return self._weights.get(marker)


@lru_cache(maxsize=1)
def _warn_of_uncounted_writes() -> None:
    """Say once that a compiled model does not follow writes to some of its weights."""
    warnings.warn(
        "qcore_vulkan: weights of a compiled model were made in torch.inference_mode(). Torch does not count writes to "
        "them, so the copy on the device stays as it is now even if they are written to. If they will be, load the "
        "model outside of inference mode, or under torch.no_grad().",
        QcoreWarning,
        stacklevel=2,
    )


_residents: weakref.WeakKeyDictionary[Device, Residents] = weakref.WeakKeyDictionary()


def on(device: Device) -> Residents:
    """The residents of a device."""
    found = _residents.get(device)
    if found is None:
        found = _residents.setdefault(device, Residents(device))
    return found


def static(device: Device, tensor: Tensor, words: Callable[[Tensor], Tensor] = words_of) -> Buffer:
    """A copy of a tensor on the device. Raises `OutOfMemory` with what was wanted."""
    try:
        return device.upload(words(tensor))
    except OutOfMemory as error:
        raise OutOfMemory(_wanted(device, f"{tensor.dtype} {tuple(tensor.shape)}", error)) from error


def _weight(device: Device, marker: Tensor) -> Weight:
    """The weight itself if a layer is bound to this device's kernels, else a copy of it."""
    resident = known(marker)
    if resident is not None and resident.device is device:
        return Weight(device, resident.weight, _order(device, layers_of(marker)[0].weight.order))
    return _placed(device, weight_of(marker))


def _placed(device: Device, weight: QTensor) -> Weight:
    order = weight.order
    try:
        placed = upload(device, weight if order is None else weight.derived(order=None))
        return Weight(device, placed, _order(device, order))
    except OutOfMemory as error:
        raise OutOfMemory(_wanted(device, _text(weight), error)) from error


def _order(device: Device, order: Tensor | None) -> Buffer | None:
    return None if order is None else device.upload(order.to(torch.int32))


def _text(weight: QTensor) -> str:
    return f"{weight.format} weight {tuple(weight.shape)}"


def _wanted(device: Device, what: str, error: Exception) -> str:
    stats = device.stats()
    return (
        f"no room for a {what} of a compiled model in the memory of {device.description.name}: {error}.\n"
        f"{stats.bytes >> 20} MiB are in use. Free other models, quantize to fewer bits, or choose another device."
    )
