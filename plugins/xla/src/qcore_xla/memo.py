"""Values computed from a tensor once and kept as long as the tensor lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")

# ruff: noqa: SLF001 - torch has a tensor's version counter only under a private name


_WITH_STORAGES = frozenset({"cpu", "cuda"})


class Memo(Generic[T]):
    """Values by tensor, held weakly. A value is computed again once its tensor was written to or got other memory."""

    def __init__(self, make: Callable[..., tuple[T, bool]]) -> None:
        """``make(tensor, *rest)`` gives the value, and whether it shares the tensor's memory and so sees writes."""
        self._make = make
        self._known: dict[Any, tuple[weakref.ref[Tensor], int, int, StorageWeakRef | None, T]] = {}

    def get(self, tensor: Tensor, *rest: Any) -> T:
        """The value for a tensor and the rest of the arguments of ``make``, which are part of the key."""
        key = (id(tensor), *rest)
        found = self._known.get(key)
        # `tensor.data = ...` replaces the memory, and counts no version. The new one may be where the old one was: the
        # storage is held weakly, so that it keeps its identity.
        storage = tensor.untyped_storage() if tensor.device.type in _WITH_STORAGES else None
        memory = 0 if storage is None else storage._cdata
        same = found is not None and found[0]() is tensor and found[2] == memory
        if found is not None and same and (found[1] < 0 or found[1] == tensor._version):
            return found[4]
        value, shared = self._make(tensor, *rest)
        if shared or not tensor.is_inference():  # writes to an inference tensor are not counted
            ref = weakref.ref(tensor, partial(self._forget, key))
            held = None if storage is None else StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._known[key] = (ref, -1 if shared else tensor._version, memory, held, value)
        return value

    def drop(self, tensor: Tensor, *rest: Any) -> None:
        """Forget the value of a tensor that was written to without being counted."""
        self._known.pop((id(tensor), *rest), None)

    def _forget(self, key: Any, ref: weakref.ref[Tensor]) -> None:
        found = self._known.get(key)
        if found is not None and found[0] is ref:  # the id may belong to another tensor by now
            del self._known[key]
