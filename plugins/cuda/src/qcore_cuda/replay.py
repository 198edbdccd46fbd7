"""Calls made again by addresses alone.

What a call does on the host - choosing a kernel, counting its grid, asking Triton for what it compiled - depends on its
form alone: shapes, strides, dtypes, numbers. The first call of a form is recorded, and the next ones make its launches
with the addresses of their own tensors. That can be done where a call does nothing but allocate with `empty` and
`launch`, and where every tensor that it launches with, and its result, is an input or was allocated so. Any other call
goes the long way each time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, reduce
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

# ruff: noqa: SLF001 - the current device, the raw stream and the quickest way to allocate have no public names

_address = Tensor.data_ptr
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _index: 0)
_STREAMS = 64
"""Streams that a replay keeps its arguments for."""
_FORMS = 1024
"""Replays that are kept for one kind of call."""
_ALIGNED = 16
_SCRATCH = 256
"""Bytes that tensors in scratch memory start on."""


class Launch(NamedTuple):
    """One launch of a compiled kernel.

    **Fields:** ``run``: Triton's launcher; ``grid``, ``function``; ``flags``: what the launcher takes between function
    and arguments; ``tensors``: the first arguments; ``numbers``: the others.
    """

    run: Callable[..., object]
    grid: tuple[int, int, int]
    function: int
    flags: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    numbers: tuple[Any, ...]


class Recording:
    """Takes notes of one call: see `empty` and `launch`."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._inputs, self._made, self._launches = inputs, list[Tensor](), list[Launch]()
        self._possible = True
        self._index = inputs[0].get_device()

    def made(self, tensor: Tensor) -> None:
        """A tensor was allocated."""
        self._made.append(tensor)

    def launched(self, launch: Launch | None) -> None:
        """A kernel was launched; None: in a way that cannot be made again."""
        if launch is None:
            self._possible = False
        else:
            self._launches.append(launch)

    def replay(self, result: Tensor) -> Replay | None:
        """What makes the call again, where that is possible."""
        out = next((t for t in self._made if _same_memory(t, result)), None)
        if out is None or not (self._possible and self._launches and result.is_contiguous()):
            return None
        scratch = [t for t in self._made if t is not out]
        tensors = [*self._inputs, out, *scratch]
        slots = {t.data_ptr(): slot for slot, t in enumerate(tensors)}
        # Inputs that are one tensor now need not be one the next time.
        if len(slots) < len(tensors):
            return None
        try:
            calls = [(launch, [slots[t.data_ptr()] for t in launch.tensors]) for launch in self._launches]
        except KeyError:  # what torch computed
            return None
        return Replay(self._index, calls, result, [t.nbytes for t in scratch])


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.numel() == b.numel()


class Replay:
    """Makes a recorded call with other tensors of the same form, which stand in the order of the recording's inputs."""

    __slots__ = ("_allocate", "_calls", "_index", "_like", "_on", "_scratch")

    def __init__(
        self, index: int, calls: Sequence[tuple[Launch, Sequence[int]]], result: Tensor, scratch: Sequence[int]
    ) -> None:
        self._index, self._calls = index, calls
        self._allocate = _allocator(result.device.type)
        self._like = (tuple(result.shape), result.stride(), result.dtype)
        offsets = [0]
        for nbytes in scratch:
            offsets.append(offsets[-1] + -(-nbytes // _SCRATCH) * _SCRATCH)
        self._scratch = ((offsets[-1],), offsets[:-1]) if scratch else None
        self._on: dict[int, list[tuple[Any, ...]]] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The result; None where the call has to go the long way: odd addresses, or another current device."""
        addresses = [*map(_address, tensors)]
        if reduce(or_, addresses) % _ALIGNED or _current_device() != self._index:
            return None
        out = self._allocate(*self._like)
        addresses.append(out.data_ptr())
        if self._scratch is not None:
            size, offsets = self._scratch
            memory = self._allocate(size, (1,), torch.uint8)  # alive until everything is launched
            base = memory.data_ptr()
            addresses += [base + offset for offset in offsets]
        stream = _current_stream(self._index)
        for run, before, chosen, after in self._on.get(stream) or self._prepare(stream):
            run(*(before + chosen(addresses) + after))
        return out

    def _prepare(self, stream: int) -> list[tuple[Any, ...]]:
        """Launchers with their arguments before the addresses, what picks these, and the arguments after them."""
        if len(self._on) >= _STREAMS:
            self._on.clear()
        made = [
            (call.run, (*call.grid, stream, call.function, *call.flags), _picker(slots), call.numbers)
            for call, slots in self._calls
        ]
        self._on[stream] = made
        return made


def _picker(slots: Sequence[int]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    return itemgetter(*slots) if len(slots) > 1 else lambda addresses: tuple(addresses[slot] for slot in slots)


class Replays:
    """The replays of one kind of call, by a key: what they depend on beside what all of that kind have in common."""

    def __init__(self) -> None:
        self._found: dict[Any, Replay | None] = {}

    def call(self, key: Any, tensors: tuple[Tensor, ...], long_way: Callable[..., Tensor], *args: Any) -> Tensor:
        """``long_way(*args)``, or what it did the last time; ``tensors``: all of ``args`` that have an address."""
        replay = self._found.get(key)
        result = None if replay is None else replay(tensors)
        return self._first(key, tensors, long_way, *args) if result is None else result

    def _first(self, key: Any, tensors: tuple[Tensor, ...], long_way: Callable[..., Tensor], *args: Any) -> Tensor:
        if key in self._found or recording() is not None or reduce(or_, map(_address, tensors)) % _ALIGNED:
            return long_way(*args)
        with _recording(tensors) as notes:
            result = long_way(*args)
        if len(self._found) >= _FORMS:
            self._found.clear()
        self._found[key] = notes.replay(result)
        return result

    def clear(self) -> None:
        """Record anew."""
        self._found.clear()


_kinds: dict[tuple[Any, ...], Replays] = {}


def replays(*kind: Any) -> Replays:
    """The replays of calls that have ``kind`` in common."""
    return _kinds.setdefault(kind, Replays())


def again(function: Callable[..., Tensor], tensors: Sequence[Tensor | None], numbers: tuple[Any, ...]) -> Tensor:
    """``function(*tensors, *numbers)``, replayed where it can be; for calls that are known by nothing else."""
    forms = [t if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors]
    present = tuple(t for t in tensors if t is not None)
    return replays(function).call((*forms, *numbers), present, function, *tensors, *numbers)


def forget() -> None:
    """Drop all: kernels are chosen anew."""
    for found in list(_kinds.values()):
        found.clear()


_notes = threading.local()


def recording() -> Recording | None:
    """The recording that goes on in this thread."""
    return getattr(_notes, "current", None)


@contextlib.contextmanager
def _recording(inputs: Sequence[Tensor]) -> Iterator[Recording]:
    _notes.current = notes = Recording(inputs)
    try:
        yield notes
    finally:
        _notes.current = None


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, whose memory a replay allocates anew."""
    made = torch.empty(shape, dtype=dtype, device=device)
    notes = recording()
    if notes is not None:
        notes.made(made)
    return made


@lru_cache(maxsize=8)
def _allocator(kind: str) -> Callable[..., Tensor]:
    """A function of size, strides and dtype that gives a tensor on the current device: compiled graphs use it, too."""
    quick = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), f"_empty_strided_{kind}", None)
    return quick or (lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype, device=kind))
