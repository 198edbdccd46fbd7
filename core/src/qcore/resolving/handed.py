"""Tensors that a packed weight was unpacked to, and that their receiver may change in place.

``state_dict()`` of a packed layer returns unpacked copies. torch.distributed.checkpoint loads into the tensors of a
state dict in place, which for a float layer changes the layer. So the copies are watched: by their version counters
while they are alive, and once more when they are dropped. The layer takes over what was written, at its next call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..weights.qtensor import QTensor

# ruff: noqa: SLF001 - torch has no public name for the version counter of a tensor


class Handed:
    """The tensors of one weight that were handed out.

    **Arguments:** ``weight``: made for the receiver; ``put``: a weak method that takes over a changed weight; ``left``:
    tensors that are still alive.
    """

    def __init__(self, weight: QTensor, put: weakref.WeakMethod[Callable[[QTensor], None]], left: int) -> None:
        tensors = weight.tensors()
        # They share memory and version counter with the tensors, and are not those that the receiver drops.
        self._aliases = {name: tensor.detach() for name, tensor in tensors.items()}
        self._versions = [alias._version for alias in self._aliases.values()]
        self._facts = weight.shape, weight.format, weight.quantizer
        self.put = put
        self.left = left

    def is_changed(self) -> bool:
        """Whether a tensor was written to since the last call of `taken`; takes a fraction of a microsecond."""
        return [alias._version for alias in self._aliases.values()] != self._versions

    def taken(self) -> QTensor:
        """The weight as it is now, in memory of its own. Raises `FormatError` if what was written is invalid."""
        versions = [alias._version for alias in self._aliases.values()]
        weight = QTensor.from_tensors({name: t.clone() for name, t in self._aliases.items()}, *self._facts)
        self._versions = versions
        return weight


class Watch:
    """What a weight's store has handed out and is still alive, or was changed before it was dropped."""

    def __init__(self) -> None:
        self.handed: tuple[Handed, ...] = ()

    def add(self, weight: QTensor, packed: Iterable[Tensor], put: Callable[[QTensor], None]) -> None:
        """Watch the tensors of ``weight``, but for those that are ``packed``: what is written there is seen anyway."""
        own = {tensor.untyped_storage().data_ptr() for tensor in packed if tensor.layout is torch.strided}
        tensors = list(weight.tensors().values())
        if any(tensor.is_inference() or tensor.is_meta for tensor in tensors):
            return  # without version counters; torch refuses to write to the former
        copies = [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in own]
        if not copies:
            return
        handed = Handed(weight, weakref.WeakMethod(put), len(copies))
        self.handed = (*self.handed, handed)
        watch = weakref.ref(self)
        # Our own aliases must not outlive the tensors, so the finalizers decide when `handed` is dropped.
        for tensor in copies:
            weakref.finalize(tensor, _dropped, watch, handed).atexit = False

    def is_changed(self) -> bool:
        """Whether anything that was handed out has been written to."""
        return any(handed.is_changed() for handed in self.handed)

    def absorb(self) -> bool:
        """Take over what was written; returns whether anything was."""
        found = False
        for handed in self.handed:
            if handed.is_changed():
                put = handed.put()
                weight = handed.taken()
                if put is not None:
                    put(weight)
                    found = True
            if not handed.left:
                self._remove(handed)
        return found

    def forget(self) -> None:
        """Ignore what was handed out: the weight was replaced since."""
        self.handed = ()

    def drop(self, handed: Handed) -> None:
        """A tensor of ``handed`` was dropped."""
        handed.left -= 1
        if not handed.left and not handed.is_changed():
            self._remove(handed)

    def _remove(self, handed: Handed) -> None:
        self.handed = tuple(other for other in self.handed if other is not handed)


def _dropped(watch: weakref.ref[Watch], handed: Handed) -> None:
    found: Any = watch()
    if found is not None:
        found.drop(handed)
