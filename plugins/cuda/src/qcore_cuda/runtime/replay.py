"""Replay recorded launches with new pointers.

The host's work for a call - selecting a kernel, computing its grid, finding the compiled code - depends only on the
form of the call: shapes, strides, dtypes, numbers. The first call of a form is recorded; later ones repeat its launches
with the addresses of their own tensors. This is possible if a call only allocates with `empty`, takes tensors from
`tracked` sources and calls `launch`, and if every tensor of its launches, and its result, is an input or came from one
of those. Any other call takes the slow path each time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial, reduce
from itertools import accumulate
from operator import or_
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .device import enter_context

# ruff: noqa: SLF001 - the current device, the raw stream and the quickest way to allocate have no public names

_address = Tensor.data_ptr
_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _index: 0)
_FORMS = 1024
"""The most replays kept for one kind of call."""
_ALIGNED = 16
_SCRATCH = 256
"""Alignment of tensors in scratch memory, in bytes."""
_MAPS = 1024
"""The most tensor maps kept for one descriptor of a replay: weights of as many layers, or places of x."""


Replay = Callable[[Sequence[Tensor]], Tensor | None]
"""Repeats a recorded call with other tensors of the same form, in the order of the recording's inputs.

Returns the result, or None if the call has to take the slow path: unaligned addresses, or another current device.
"""


class Launch(NamedTuple):
    """One launch of a compiled kernel.

    **Fields:** ``run``: Triton's launcher; ``grid``; ``flags``: the launcher's parameters between stream and arguments;
    ``tensors``: the first arguments, tensors or their descriptors; ``numbers``: the others; ``maps``: if ``run`` takes
    tensor maps in place of descriptors, those of each descriptor, by its position.
    """

    run: Callable[..., object]
    grid: tuple[int, int, int]
    flags: tuple[Any, ...]
    tensors: tuple[Any, ...]
    numbers: tuple[Any, ...]
    maps: Mapping[int, TensorMaps] = MappingProxyType({})


class Descriptor(NamedTuple):
    """The fields of a tensor descriptor that Triton's launcher reads, for a tensor known only by its address."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str

    @property
    def base(self) -> Descriptor:
        """The object from which Triton's launcher reads the address."""
        return self

    def data_ptr(self) -> int:
        """The address."""
        return self.address


class TensorMaps(dict[int, Any]):
    """The tensor maps (TMA) of one descriptor of a replay, by address: all else that they encode is the same.

    ``encode``: makes the arguments for a descriptor and its ``meta``; ``sizes``: the numbers that follow a map
    among them.
    """

    def __init__(self, descriptor: Any, meta: Any, encode: Callable[[Any, Any], Sequence[Any]]) -> None:
        super().__init__()
        self._encode = encode
        self._fields = tuple(descriptor.shape), tuple(descriptor.strides), descriptor.padding
        self._meta = meta
        self.sizes = (*descriptor.shape, *descriptor.strides)

    def __missing__(self, address: int) -> Any:
        if len(self) >= _MAPS:
            self.clear()
        enter_context()
        made, *_ = self._encode(Descriptor(address, *self._fields), self._meta)
        self[address] = made
        return made


class Recording:
    """The recording of one call: see `empty` and `launch`."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._inputs, self._made, self._launches = inputs, list[Tensor](), list[Launch]()
        self._tracked = list[tuple[Tensor, Callable[[], Tensor]]]()
        self._possible = True
        self._index = inputs[0].get_device()

    def made(self, tensor: Tensor) -> None:
        """A tensor was allocated."""
        self._made.append(tensor)

    def had(self, tensor: Tensor, source: Callable[[], Tensor]) -> None:
        """A tensor came from ``source``."""
        self._tracked.append((tensor, source))

    def launched(self, launch: Launch | None) -> None:
        """A kernel was launched; None: in a way that cannot be replayed."""
        if launch is None:
            self._possible = False
        else:
            self._launches.append(launch)

    def replay(self, result: Tensor) -> Replay | None:
        """A function that repeats the call, or None if that is impossible."""
        out = next((t for t in self._made if _same_memory(t, result)), None)
        if out is None or not (self._possible and self._launches and result.is_contiguous()):
            return None
        scratch = [t for t in self._made if t is not out]
        tensors = [*self._inputs, out, *scratch, *(tensor for tensor, _ in self._tracked)]
        slots = {t.data_ptr(): slot for slot, t in enumerate(tensors)}
        # Inputs that are the same tensor now may be different ones in the next call.
        if len(slots) < len(tensors):
            return None
        try:
            calls = [(launch, [slots[_tensor(t).data_ptr()] for t in launch.tensors]) for launch in self._launches]
        except KeyError:  # a tensor that torch computed
            return None
        sources = [source for _, source in self._tracked]
        return _written(self._index, calls, len(self._inputs), result, [t.nbytes for t in scratch], sources)


def _tensor(argument: Any) -> Tensor:
    return argument if isinstance(argument, Tensor) else argument.base


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.numel() == b.numel()


def _written(
    index: int,
    calls: Sequence[tuple[Launch, Sequence[int]]],
    inputs: int,
    result: Tensor,
    scratch: Sequence[int],
    sources: Sequence[Callable[[], Tensor]],
) -> Replay:
    """Generate the function for one form of call, without loops, which would take as long as another launch.

    ``calls``: launches with the indices of their tensors in this order: the ``inputs``, the result, intermediate
    tensors (``scratch``: their bytes), and the results of ``sources``.
    """
    names = [f"x{i}" for i in range(inputs)]
    known: dict[str, Any] = {"like": (tuple(result.shape), result.stride(), result.dtype), "index": index}
    known |= {"allocate": _allocator(result.device.type), "address": _address, "Descriptor": Descriptor}
    known |= {"device": _device, "current": _current}
    lines = [
        f"{', '.join(names)}, = map(address, tensors)",
        f"if ({' | '.join(names)}) % {_ALIGNED} or device() != index: return None",
        "result = allocate(*like)",
        "y = address(result)",
    ]
    if scratch:
        starts = [0, *accumulate(-(-nbytes // _SCRATCH) * _SCRATCH for nbytes in scratch)]
        known["memory"] = ((starts[-1],), (1,), torch.uint8)
        lines += ["held = allocate(*memory)", "base = address(held)"]  # held until everything is launched
        lines += [f"s{i} = base + {start}" for i, start in enumerate(starts[:-1])]
    for i, source in enumerate(sources):
        known[f"source{i}"] = source
        lines += [f"own{i} = source{i}()", f"p{i} = address(own{i})"]
    names += ["y", *(f"s{i}" for i in range(len(scratch))), *(f"p{i}" for i in range(len(sources)))]
    lines.append("stream = current(index)")
    lines += [_line(i, launch, [names[place] for place in places], known) for i, (launch, places) in enumerate(calls)]
    body = "\n    ".join([*lines, "return result"])
    exec(f"def replay(tensors):\n    {body}", known)  # noqa: S102 - names and numbers from above, nothing else
    return known["replay"]  # type: ignore[no-any-return]


def _line(i: int, launch: Launch, addresses: list[str], known: dict[str, Any]) -> str:
    """The i-th launch; ``addresses``: variables of its tensors' addresses; other names are added to ``known``."""
    known |= {f"run{i}": launch.run, f"grid{i}": launch.grid, f"numbers{i}": launch.numbers}
    flags = {f"f{i}_{j}": flag for j, flag in enumerate(launch.flags)}
    described = {j: t for j, t in enumerate(launch.tensors) if not isinstance(t, Tensor)}
    fields = {f"d{i}_{j}": (tuple(t.shape), tuple(t.strides), t.padding) for j, t in described.items()}
    maps = {f"m{i}_{j}": found for j, found in launch.maps.items()}
    known |= {**flags, **fields, **maps}
    tensors = [f"Descriptor({a}, *d{i}_{j})" if j in described else a for j, a in enumerate(addresses)]
    for j, found in launch.maps.items():
        tensors[j] = ", ".join([f"m{i}_{j}[{addresses[j]}]", *map(str, found.sizes)])
    return f"run{i}(*(grid{i} + ({', '.join(['stream', *flags, *tensors])}) + numbers{i}))"


class Replays(dict[Any, "Replay | None"]):
    """The replays of one kind of call, by a key: all that they depend on and that varies within that kind.

    The value None marks a call that always takes the slow path.
    """

    def call(self, key: Any, tensors: tuple[Tensor, ...], slow_path: Callable[..., Tensor], *args: Any) -> Tensor:
        """``slow_path(*args)``, or its replay; ``tensors``: all tensors among ``args``."""
        replay = self.get(key)
        result = None if replay is None else replay(tensors)
        return self.first(key, tensors, slow_path, *args) if result is None else result

    def first(self, key: Any, tensors: tuple[Tensor, ...], slow_path: Callable[..., Tensor], *args: Any) -> Tensor:
        """``slow_path(*args)``, recorded if a replay may be possible."""
        if key in self or recording() is not None or reduce(or_, map(_address, tensors)) % _ALIGNED:
            return slow_path(*args)
        with _recording(tensors) as notes:
            result = slow_path(*args)
        if len(self) >= _FORMS:
            self.clear()
        self[key] = notes.replay(result)
        return result


_kinds: dict[tuple[Any, ...], Replays] = {}


def replays(*kind: Any) -> Replays:
    """The replays of calls that have ``kind`` in common."""
    return _kinds.setdefault(kind, Replays())


def replay_call(function: Callable[..., Tensor], tensors: Sequence[Tensor | None], numbers: tuple[Any, ...]) -> Tensor:
    """``function(*tensors, *numbers)``, replayed if possible; for calls outside of kernel objects."""
    forms = [t if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors]
    present = tuple(t for t in tensors if t is not None)
    return replays(function).call((*forms, *numbers), present, function, *tensors, *numbers)


def forget() -> None:
    """Clear the cache; kernels are selected again."""
    for found in list(_kinds.values()):
        found.clear()


_notes = threading.local()


def recording() -> Recording | None:
    """The recording in progress in this thread, or None."""
    return getattr(_notes, "current", None)


@contextlib.contextmanager
def _recording(inputs: Sequence[Tensor]) -> Iterator[Recording]:
    _notes.current = notes = Recording(inputs)
    try:
        yield notes
    finally:
        _notes.current = None


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`; each replay allocates this tensor again."""
    made = torch.empty(shape, dtype=dtype, device=device)
    notes = recording()
    if notes is not None:
        notes.made(made)
    return made


def tracked(source: Callable[..., Tensor], *args: Any) -> Tensor:
    """``source(*args)``, called again by each replay; ``args`` must not be tensors."""
    asked = partial(source, *args)
    tensor, notes = asked(), recording()
    if notes is not None:
        notes.had(tensor, asked)
    return tensor


@lru_cache(maxsize=8)
def _allocator(kind: str) -> Callable[..., Tensor]:
    """The allocator of compiled graphs: size, strides and dtype to a tensor on the current device."""
    quick = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), f"_empty_strided_{kind}", None)
    return quick or (lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype, device=kind))
