"""Values computed from a tensor once and kept as long as the tensor lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")

# ruff: noqa: SLF001 - torch has a tensor's version counter only under a private name


_WITH_ADDRESSES = frozenset({"cpu", "cuda"})


class Memo(Generic[T]):
    """Values by tensor, held weakly. A value is computed again once its tensor was written to or got other memory."""

    def __init__(self, make: Callable[..., tuple[T, bool]]) -> None:
        """``make(tensor, *rest)`` gives the value, and whether it shares the tensor's memory and so sees writes."""
        self._make = make
        self._known: dict[Any, tuple[weakref.ref[Tensor], int, int, T]] = {}

    def get(self, tensor: Tensor, *rest: Any) -> T:
        """The value for a tensor and the rest of the arguments of ``make``, which are part of the key."""
        key = (id(tensor), *rest)
        found = self._known.get(key)
        # `tensor.data = ...` replaces the memory, and counts no version.
        address = tensor.data_ptr() if tensor.device.type in _WITH_ADDRESSES else 0
        same = found is not None and found[0]() is tensor and found[2] == address
        if found is not None and same and (found[1] < 0 or found[1] == tensor._version):
            return found[3]
        value, shared = self._make(tensor, *rest)
        if shared or not tensor.is_inference():  # writes to an inference tensor are not counted
            ref = weakref.ref(tensor, partial(self._forget, key))
            self._known[key] = (ref, -1 if shared else tensor._version, address, value)
        return value

    def drop(self, tensor: Tensor, *rest: Any) -> None:
        """Forget the value of a tensor that was written to without being counted."""
        self._known.pop((id(tensor), *rest), None)

    def _forget(self, key: Any, ref: weakref.ref[Tensor]) -> None:
        found = self._known.get(key)
        if found is not None and found[0] is ref:  # the id may belong to another tensor by now
            del self._known[key]
