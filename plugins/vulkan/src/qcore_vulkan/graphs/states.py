"""States on the device: tensors that graphs mutate, above all KV caches; see `qcore.graphs.states` for the rule.

A state's values are in device memory from its first use on, and the memory of torch's tensor holds `sentinels` until
`synchronize`; some (`lowering.undeferred`) come back with each call instead. What torch writes in between is noticed by
the tensor's version counter, and uploaded: all of it, or with the device's values where sentinels are left.
"""

from __future__ import annotations

import contextlib
import sys
import threading
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
from .sentinels import Sentinels

_SMALL = 4096
"""Bytes up to which states are uploaded together."""


class State:
    """The device's copy of a tensor.

    **Attributes:** ``sentinels``: what the tensor's own memory holds if the device is ahead of it; ``replaced``:
    whether another device has the tensor's values now; ``thread``: the thread that wrote it last.
    """

    def __init__(self, device: Device, tensor: Tensor) -> None:
        self.device, self.buffer = device, static(device, tensor)
        self.stamp, self.sentinels = Stamp(tensor), None  # type: Stamp, Sentinels | None
        self.replaced, self.thread = False, threading.get_ident()

    def is_stale(self, tensor: Tensor) -> bool:
        """Whether torch has written to the tensor."""
        return not self.stamp.fits(tensor)

    def refreshed(self, tensor: Tensor) -> None:
        """Note that the device has the tensor's values."""
        self.stamp, self.sentinels = Stamp(tensor), None

    def advance(self, tensor: Tensor) -> None:
        """Note that a program has written the state, whose tensor it does not bring up to date."""
        if self.sentinels is None:
            self.sentinels = Sentinels(tensor)
            self.stamp = Stamp(tensor)

    def write_back(self, tensor: Tensor) -> None:
        """Bring the tensor up to date, but for what torch has written to it: then it stays stale, to be uploaded.

        Raises `StaleValuesError`; `PluginError` if the values that it lacks were lost with the device.
        """
        if self.sentinels is None:
            return
        stale = self.is_stale(tensor)
        left = self.sentinels.left(tensor) if stale else None
        if stale and left is None:
            self.sentinels = None
            return
        if self.device.lost:
            raise PluginError(_lost(self.device, tensor))
        words = words_in(self.buffer, tensor)
        if left is None:
            self.take(tensor, words)
            return
        with torch.no_grad():
            tensor.copy_(torch.where(left, words.to(tensor.dtype), tensor))
        self.sentinels = None

    def take(self, tensor: Tensor, words: Tensor) -> None:
        """Bring the tensor up to date with ``words``, those of `buffer`."""
        with torch.no_grad():
            tensor.copy_(words)
        self.refreshed(tensor)


def take_each(held: list[State], tensors: list[Tensor], words: list[Tensor]) -> None:
    """`State.take` for several states at once."""
    if held:
        with torch.no_grad():
            torch._foreach_copy_(tensors, words)
        Stamp.renew_each([state.stamp for state in held], tensors)
        for state in held:
            state.sentinels = None


def _lost(device: Device, tensor: Tensor) -> str:
    return (
        f"the Vulkan device {device.description.name!r} was lost, and with it the values of a state "
        f"{tuple(tensor.shape)}, such as a KV cache.\nIts host memory holds NaN: write all of it (cache.reset()), and "
        f"run the prompt once more."
    )


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
            found.write_back(tensor)
            stale.append((found, tensor))
        return found
    if found is not None:
        found.write_back(tensor)
        del _known[id(tensor)]
        found.replaced = True
    if why_not(tensor):
        if tensor.is_inference():
            _warn_of_inference()
        current(tensor)  # it may be a view of a state
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
    """The tensor; if it is a state, or a view of one, whose memory is behind, with the device's values written back."""
    owner = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - torch has no public name for it
    state = peek(owner)
    if state is not None:
        state.write_back(owner)
    return tensor


def _forget(key: int, ref: weakref.ref[Tensor]) -> None:
    found = _known.get(key)
    if found is not None and found[0] is ref:  # the id may belong to another tensor by now
        del _known[key]
        if found[1].sentinels is not None and not sys.is_finalizing():
            found[1].sentinels.clear()


def synchronize(tensors: Iterable[Tensor]) -> None:
    """Write the values of states among ``tensors``, or that these are views of, to the memory that torch sees."""
    for tensor in tensors:
        current(tensor)


def synchronize_all() -> bool:
    """Write back all states that this thread wrote last: others may be in use. Whether the memory of one was behind.

    Leaves those whose values are lost, or that torch has written stale values to: what uses one next raises.
    """
    found, me = False, threading.get_ident()
    for ref, state in [*_known.values()]:
        tensor = ref()
        if tensor is not None and state.sentinels is not None and state.thread == me:
            with contextlib.suppress(PluginError):
                state.write_back(tensor)
                found = True
    return found
