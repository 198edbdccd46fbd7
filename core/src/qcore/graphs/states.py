"""States: tensors that a captured graph mutates, above all KV caches, and what torch sees of them.

**The rule.** A state belongs to the device while compiled graphs run, and is never copied between two calls.

* *Reads by torch.* With a backend whose `GraphBackend.defers_writes` is false, a state holds its new values as soon as
  a call returns (XLA: torch's tensor is given the device's memory). With any other backend, host memory of a state that
  has changed since the last `synchronize` holds no values. Torch must not compute with it unseen: such a backend fills
  it with NaN (qcore_vulkan: with `qcore_vulkan.graphs.sentinels`, and refuses what torch has made of these). What runs
  on the host in captured graphs sees current values in any case, and so does code that torch runs by itself because it
  follows a graph break (`breaks`) or has been compiled too often (`limits`): states come back with each call.
* *Writes by torch* (``cache.zero_()``) are noticed at the next call by the tensor's version counter, which every write
  through torch's API advances, and replace the device's values where they were written: all, or a part.
* *Aliases.* A state must own its memory. A tensor whose storage other tensors share is copied in and out at each call
  (``explain`` says so).
* *Lifetime.* The device's copy is freed with the tensor.

`Resident` keeps device copies of tensors by identity and `Stamp`, for weights and states alike.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .backends import GraphBackend

T = TypeVar("T")

_FREE = 2
"""References to a storage that nothing shares: the tensor's and the one that counts."""

# ruff: noqa: SLF001 - torch has version counters, storages and their counts only under private names

backends: dict[str, GraphBackend] = {}
"""Every backend of this process, by name."""


class Resident(Generic[T]):
    """Device copies of tensors, each kept as long as its tensor lives, and made again once its `Stamp` does not fit."""

    def __init__(self, make: Callable[[Tensor], T]) -> None:
        """``make``: uploads a tensor."""
        self._make = make
        self._known: dict[int, tuple[weakref.ref[Tensor], Stamp, T]] = {}

    def get(self, tensor: Tensor) -> T:
        """The device copy of a tensor."""
        found = self._known.get(id(tensor))
        if found is not None and found[0]() is tensor and found[1].fits(tensor):
            return found[2]
        return self.put(tensor, self._make(tensor))

    def put(self, tensor: Tensor, value: T) -> T:
        """Keep ``value`` as the device copy of a tensor in its present version."""
        key = id(tensor)
        self._known[key] = (weakref.ref(tensor, partial(self._forget, key)), Stamp(tensor), value)
        return value

    def peek(self, tensor: Tensor) -> T | None:
        """The device copy of a tensor if there is one, even if torch has written to the tensor since."""
        found = self._known.get(id(tensor))
        return found[2] if found is not None and found[0]() is tensor else None

    def __len__(self) -> int:
        return len(self._known)

    def _forget(self, key: int, ref: weakref.ref[Tensor]) -> None:
        found = self._known.get(key)
        if found is not None and found[0] is ref:  # the id may belong to another tensor by now
            del self._known[key]


def version(tensor: Tensor) -> int:
    """How often torch has written to a tensor; 0 for inference tensors, whose writes are not counted."""
    return 0 if tensor.is_inference() else tensor._version


class Stamp:
    """The versions and storages of tensors at one time, to detect changes.

    ``parameter.data = ...`` counts no write, but gives a tensor other memory. That may be at the old address: the stamp
    holds the old storages weakly, which frees their memory and keeps their identity.
    """

    __slots__ = ("_held", "_numbers")

    def __init__(self, *tensors: Tensor) -> None:
        self._numbers = _numbers(tensors)
        self._held = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]  # type: ignore[no-untyped-call]

    def fits(self, *tensors: Tensor) -> bool:
        """Whether the same tensors, in the same order, have not changed."""
        return self._numbers == _numbers(tensors)

    @staticmethod
    def fit_each(stamps: Sequence[Stamp], tensors: Sequence[Tensor]) -> bool:
        """Whether none of the tensors has changed, of which each has a stamp of its own."""
        return [stamp._numbers for stamp in stamps] == _numbers_of_each(tensors)

    @staticmethod
    def renew_each(stamps: Sequence[Stamp], tensors: Sequence[Tensor]) -> None:
        """Let the stamps of single tensors be those of now, in a part of the time that new ones take."""
        for stamp, tensor, numbers in zip(stamps, tensors, _numbers_of_each(tensors), strict=True):
            if stamp._numbers[1] != numbers[1]:
                stamp._held = [StorageWeakRef(tensor.untyped_storage())]  # type: ignore[no-untyped-call]
            stamp._numbers = numbers


def _numbers(tensors: Sequence[Tensor]) -> list[int]:
    """Versions, then identities of storages: this runs at every call of a model, for all of its weights."""
    memories = map(_identity, map(Tensor.untyped_storage, tensors))
    try:
        return [*map(_version, tensors), *memories]
    except RuntimeError:  # there are inference tensors
        return [*map(version, tensors), *map(_identity, map(Tensor.untyped_storage, tensors))]


def _numbers_of_each(tensors: Sequence[Tensor]) -> list[list[int]]:
    numbers, count = _numbers(tensors), len(tensors)
    return [*map(list, zip(numbers[:count], numbers[count:], strict=True))]


_version, _identity = operator.attrgetter("_version"), operator.attrgetter("_cdata")


def why_shared(tensor: Tensor) -> str:
    """Why a tensor cannot stay on the device as a state: it does not own its memory; a sentence, empty if it does."""
    storage = tensor.untyped_storage()
    if not tensor.is_contiguous() or storage.nbytes() != tensor.nbytes:
        return "it does not own its memory"
    if torch._C._storage_Use_Count(storage._cdata) > _FREE:
        return "other tensors share its memory"
    return ""


class TorchWrites:
    """Lets version counters tell of writes by torch only, for a backend that defers its own, or counts them itself.

    AOT autograd counts what a graph will write to its inputs before it runs it. That is taken back in between:
    ``outer`` wraps what AOT autograd makes of the graph, ``inner`` what it calls. ``written``: positions of the inputs.
    """

    def __init__(self) -> None:
        self.written: Sequence[int] = ()
        self._before = threading.local()

    def outer(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, which notes the counters first."""
        if not self.written:
            return run

        def noting(*values: Any) -> Any:
            states = tuple([values[i] for i in self.written])
            try:
                versions = tuple(map(_version, states))
            except RuntimeError:  # there are inference tensors
                states = tuple([one for one in states if not one.is_inference()])
                versions = tuple(map(_version, states))
            self._before.counters = states, versions
            return run(*values)

        return noting

    def inner(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, which starts from the counters that were noted."""
        if not self.written:
            return run

        def restoring(*values: Any) -> Any:
            torch._C._autograd._unsafe_set_version_counter(*self._before.counters)
            del self._before.counters
            return run(*values)

        return restoring


def synchronized(run: Callable[..., Any], read: Iterable[int] | None = None) -> Callable[..., Any]:
    """``run``, a call on the host, after `synchronize` of its arguments at the positions ``read``, by default all."""
    places = None if read is None else [*read]

    def reading(*values: Any) -> Any:
        synchronize(values if places is None else [values[i] for i in places])
        return run(*values)

    return reading


def synchronize(tensors: torch.nn.Module | Iterable[Any] | Tensor) -> None:
    """Bring host memory of states up to date: of a tensor, of tensors, or of all buffers of a module.

    Does nothing for backends that do not defer writes.
    """
    if isinstance(tensors, Tensor):
        tensors = [tensors]
    elif isinstance(tensors, torch.nn.Module):
        tensors = [*tensors.buffers(), *tensors.parameters()]
    found = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    for backend in backends.values():
        if backend.defers_writes:
            backend.synchronize(found)
