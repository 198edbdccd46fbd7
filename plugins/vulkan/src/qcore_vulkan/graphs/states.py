"""States on the device: tensors that graphs mutate, above all KV caches; see `qcore.graphs.states` for the rule.

A state's values are in device memory from its first use on, and torch's tensor is behind until `synchronize`; small
ones (`lowering.small`) come back with each call. What torch writes in between is noticed by the tensor's version
counter, and uploaded.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from qcore import PluginError, QcoreWarning
from qcore.plugin_api import Stamp, why_shared

from ..builder import Builder, Place, Program, Ref
from ..device import Buffer, Device
from .numbers import host_dtype, words_of
from .residents import static

_SMALL = 4096
"""Bytes up to which states are uploaded together."""


class State:
    """The device's copy of a tensor; ``ahead``: whether the tensor's own memory is behind."""

    def __init__(self, device: Device, tensor: Tensor) -> None:
        self.device, self.buffer = device, static(device, tensor)
        self.stamp, self.ahead = Stamp(tensor), False

    def is_stale(self, tensor: Tensor) -> bool:
        """Whether torch has written to the tensor."""
        return not self.stamp.fits(tensor)

    def refreshed(self, tensor: Tensor) -> None:
        """Note that the device has the tensor's values."""
        self.stamp, self.ahead = Stamp(tensor), False

    def write_back(self, tensor: Tensor) -> None:
        """Bring the tensor up to date."""
        if self.ahead and self.stamp.fits(tensor):
            self.take(tensor, words_in(self.buffer, tensor))

    def take(self, tensor: Tensor, words: Tensor) -> None:
        """Bring the tensor up to date with ``words``, those of `buffer`."""
        with torch.no_grad():
            tensor.copy_(words)
        self.stamp, self.ahead = Stamp(tensor), False


def words_in(buffer: Buffer, like: Tensor) -> Tensor:
    """The words of a device buffer that stand for the values of a tensor."""
    return torch.from_numpy(buffer.read()).view(host_dtype(like.dtype)).view(like.shape)


Stale = tuple[State, Tensor]
"""A state, and the tensor that torch has written to."""


def read_into(buffer: Buffer, tensor: Tensor) -> None:
    """Write the values of a device buffer to a tensor."""
    with torch.no_grad():
        tensor.copy_(words_in(buffer, tensor))


def why_not(tensor: Tensor) -> str:
    """Why a tensor cannot stay on the device between calls, a sentence; empty if it can."""
    if tensor.is_inference():
        return "torch does not count writes to a tensor made in inference mode"
    return why_shared(tensor)


_known: dict[int, tuple[weakref.ref[Tensor], State]] = {}


@lru_cache(maxsize=1)
def _warn_of_inference() -> None:
    """Say once why a cache is copied at each call."""
    warnings.warn(
        "qcore_vulkan: a tensor that the model writes, such as a KV cache, was made in torch.inference_mode(). Torch "
        "does not count writes to it, so it is copied to the device and back at each call. Make it before, or use "
        "torch.no_grad().",
        QcoreWarning,
        stacklevel=2,
    )


def get(device: Device, tensor: Tensor, stale: list[Stale]) -> State | None:
    """The state of a tensor; None if it must be copied in and out at each call.

    ``stale`` gets it if torch has written to the tensor since: for a `Refresher`.
    """
    found = peek(tensor)
    if found is not None and found.device is device and not device.lost:
        if found.is_stale(tensor):
            stale.append((found, tensor))
        return found
    if found is not None:
        _leave(found, tensor)
    if why_not(tensor):
        if tensor.is_inference():
            _warn_of_inference()
        return None
    key, state = id(tensor), State(device, tensor)
    _known[key] = (weakref.ref(tensor, lambda ref: _forget(key, ref)), state)
    return state


class Refresher:
    """Uploads what torch has written to states: small ones together, as each submission takes long."""

    def __init__(self) -> None:
        self._last: tuple[list[int], Program] | None = None

    def __call__(self, device: Device, stale: Sequence[Stale]) -> None:
        """Take what torch has written to states of the device."""
        small = [one for one in stale if one[0].buffer.nbytes <= _SMALL]
        together = len(small) > 1 and not device.description.local_input  # else the host writes the memory itself
        if together:
            self._upload(device, small)
        for state, tensor in stale:
            if not (together and state.buffer.nbytes <= _SMALL):
                state.buffer.write(words_of(tensor))
            state.refreshed(tensor)

    def _upload(self, device: Device, stale: Sequence[Stale]) -> None:
        buffers = [state.buffer for state, _ in stale]
        numbers = [buffer.number for buffer in buffers]
        if self._last is None or self._last[0] != numbers:
            self._last = numbers, _uploads(device, buffers)
        self._last[1].run([words_of(tensor) for _, tensor in stale])

    def clear(self) -> None:
        """Let go of the states."""
        self._last = None


def _uploads(device: Device, buffers: Sequence[Buffer]) -> Program:
    """A program that takes the words of each buffer."""
    b, places = Builder(device), []
    for buffer in buffers:
        ref = b.input(buffer.nbytes)
        b.copy(ref, Ref(buffer, 0, buffer.nbytes))
        places.append(Place(ref, 1, buffer.nbytes, buffer.nbytes))
    return b.program(places)


def peek(tensor: Tensor) -> State | None:
    """The state of a tensor, if it has one."""
    found = _known.get(id(tensor))
    return found[1] if found is not None and found[0]() is tensor else None


def are_among(keys: Iterable[int]) -> bool:
    """Whether one of the tensors with these identities is a state."""
    return not _known.keys().isdisjoint(keys)


def current(tensor: Tensor) -> Tensor:
    """The tensor, with its values on a device written back if it is a state whose memory is behind."""
    state = peek(tensor)
    if state is not None and state.ahead and not state.device.lost:
        state.write_back(tensor)
    return tensor


def _leave(state: State, tensor: Tensor) -> None:
    """Let go of the copy on another device, or on one that was lost."""
    _known.pop(id(tensor), None)
    if not state.device.lost:
        state.write_back(tensor)
    elif state.ahead and state.stamp.fits(tensor):
        raise PluginError(
            f"the Vulkan device {state.device.description.name!r} was lost, and with it the values of a state "
            f"{tuple(tensor.shape)}, such as a KV cache.\nIt has its values of the last qcore.graphs.synchronize "
            f"again: reset it, or run the prompt once more."
        )


def _forget(key: int, ref: weakref.ref[Tensor]) -> None:
    found = _known.get(key)
    if found is not None and found[0] is ref:  # the id may belong to another tensor by now
        del _known[key]


def synchronize(tensors: Iterable[Tensor]) -> None:
    """Write the values of states among ``tensors`` to the memory that torch sees."""
    for tensor in tensors:
        state = peek(tensor)
        if state is not None and not state.device.lost:
            state.write_back(tensor)


def advance(states: Sequence[State]) -> None:
    """Note that a program has written the states."""
    for state in states:
        state.ahead = True
