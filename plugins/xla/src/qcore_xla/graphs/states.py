"""States of programs, above all KV caches: arrays that torch's tensors share the memory of.

XLA updates in place what a caller donates, but only memory of its own. So a state's first use copies its values to an
array, and gives the torch tensor that memory: from then on both see the same bytes, before and after each call.

On a mesh every device has the whole state, and the tensor has the memory of torch's device. What torch writes there
the other devices do not see: then the state is made anew.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

from qcore.plugin_api import Stamp, why_shared

from ..engines.crossing import array_of_bytes, in_pairs
from .meshes import part_on, placed


class State:
    """The array of one state, replaced by the program's result after each call.

    **Attributes:** ``stamp``: of the tensor when all devices of a mesh last had its values; None on one device.
    """

    def __init__(self, tensor: Tensor, sharding: Any, here: Any) -> None:
        """``sharding``, ``here``: the mesh and torch's device of it; None on one device."""
        self._sharding, self._here = sharding, here
        self.array = placed(_copied(tensor), sharding)
        self.array.block_until_ready()
        self.pointer = self._pointer()
        _adopt(tensor, self)
        # At once, as the call that makes a state may end before its program: what torch writes then must be seen.
        self.stamp = None if sharding is None else Stamp(tensor)

    def replace(self, array: Any, tensor: Tensor) -> None:
        """Take the result of a call, which XLA has written to the same memory unless it could not."""
        self.array = array
        pointer = self._pointer()
        if pointer != self.pointer:
            self.pointer = pointer
            _adopt(tensor, self)

    def fits(self, tensor: Tensor, sharding: Any) -> bool:
        """Whether the tensor has this memory, and the devices of ``sharding`` have its values."""
        same = self.pointer == tensor.data_ptr() and self._sharding == sharding
        return same and (self.stamp is None or self.stamp.fits(tensor))

    def _pointer(self) -> int:
        own = self.array if self._here is None else part_on(self.array, self._here)
        return int(own.unsafe_buffer_pointer())


def why_not(tensor: Tensor) -> str:
    """Why a tensor cannot share an array's memory, a sentence; empty if it can."""
    return why_shared(tensor)


def _copied(tensor: Tensor) -> Any:
    if tensor.is_cuda:
        return jax.numpy.array(array_of_bytes(tensor), copy=True)
    tensor = in_pairs(tensor)
    same = jax.dlpack.from_dlpack(tensor) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    return jax.device_put(same, may_alias=False)


class _Memory:
    """The memory of a state for NumPy or torch, which keeps the state's array alive as long as a tensor uses it."""

    def __init__(self, state: State, tensor: Tensor) -> None:
        self.owner = state
        interface = {"data": (state.pointer, False), "shape": (tensor.nbytes,), "typestr": "|u1", "version": 3}
        if tensor.is_cuda:
            self.__cuda_array_interface__ = interface
        else:
            self.__array_interface__ = interface


class _MemoryOnGpu(_Memory):
    """The same on a GPU, where JAX may give the memory to others while torch's kernels still read it."""

    _is_finalizing = staticmethod(sys.is_finalizing)  # a name of the module may be gone by then

    def __del__(self) -> None:
        if not self._is_finalizing() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()


def _adopt(tensor: Tensor, state: State) -> None:
    """Give ``tensor`` the memory of ``state``."""
    if tensor.is_cuda:
        flat = torch.as_tensor(_MemoryOnGpu(state, tensor), device=tensor.device)
    else:
        flat = torch.from_numpy(np.asarray(_Memory(state, tensor)))
    with torch.no_grad():
        tensor.set_(flat.view(tensor.dtype).view(tensor.shape))  # type: ignore[call-overload]


class States:
    """States by tensor, held as long as the tensor lives."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], State]] = {}

    def get(self, tensor: Tensor, sharding: Any = None, here: Any = None) -> State | None:
        """The state of a tensor, made at its first use; None if its memory cannot be shared.

        ``sharding``: that of a mesh, ``here``: its device that torch's tensors are on. The other devices need to know
        of torch's writes, which nobody counts for inference tensors and for what other tensors of the same memory do.
        """
        if sharding is not None and (here is None or tensor.is_inference() or why_not(tensor)):
            return None
        found = self._known.get(id(tensor))
        if found is not None and found[0]() is tensor and found[1].fits(tensor, sharding):
            return found[1]
        if why_not(tensor):
            return None
        key, state = id(tensor), State(tensor, sharding, here)
        self._known[key] = (weakref.ref(tensor, lambda ref: self._forget(key, ref)), state)
        return state

    def _forget(self, key: int, ref: weakref.ref[Tensor]) -> None:
        found = self._known.get(key)
        if found is not None and found[0] is ref:  # the id may belong to another tensor by now
            del self._known[key]
