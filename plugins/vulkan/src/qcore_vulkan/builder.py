"""Programs: steps on a device that are recorded once and run many times."""

from __future__ import annotations

import ctypes
import operator
import struct
import threading
from collections.abc import Callable, Hashable, Sequence
from ctypes import byref, c_double, c_void_p
from dataclasses import dataclass
from typing import SupportsFloat, SupportsIndex, TypeVar

import torch

from . import access, native
from .device import Array, Buffer, Device, dense

ALIGN = 256
"""Alignment of every range, in bytes: the largest that any device requires."""
_KINDS = {native.DISPATCH: "dispatch", native.COPY: "copy", native.FILL: "fill"}
_T = TypeVar("_T")
_MOST_GROUPS = 65535
"""Workgroups along one axis that every device supports."""


@dataclass(frozen=True)
class Ref:
    """Bytes of a buffer, or of ARENA, INPUT or OUTPUT (see `native`)."""

    buffer: Buffer | int
    offset: int
    bytes: int

    def part(self, offset: int, nbytes: int) -> Ref:
        """A part of these bytes; ``offset``: a multiple of the device's ``limits.storage_align``."""
        if offset + nbytes > self.bytes:
            raise ValueError(f"{nbytes} bytes at offset {offset} are out of range: there are {self.bytes}")
        return Ref(self.buffer, self.offset + offset, nbytes)


@dataclass(frozen=True)
class StepInfo:
    """A step of a program: the variant of its shader, "copy" or "fill", its workgroups, if it waits for the others."""

    name: str
    groups: tuple[int, ...]
    barrier: bool


@dataclass(frozen=True)
class Place:
    """The place of a tensor in INPUT or OUTPUT: ``pitch`` bytes from one row to the next."""

    ref: Ref
    rows: int
    row_bytes: int
    pitch: int


def fold(groups: int) -> tuple[int, int, int]:
    """Workgroups along x and y for a count that may be too large for x; shaders use x + y * groups_x."""
    if groups <= _MOST_GROUPS:
        return groups, 1, 1
    y = -(-groups // _MOST_GROUPS)
    return -(-groups // y), y, 1


class Builder:
    """Collects the steps of a program."""

    def __init__(self, device: Device):
        self.device = device
        self._steps: list[native.Step] = []
        self._names: list[str] = []
        self._uses: list[list[access.Use]] = []
        self._hazards = access.Hazards()
        self._in_order = False
        self._atomic: set[access.Span] = set()
        self._buffers: dict[int, Buffer] = {}
        self._used = {native.ARENA: 0, native.INPUT: 0, native.OUTPUT: 0}
        self._top = 0
        self._zeros: Ref | None = None

    def scratch(self, nbytes: int) -> Ref:
        """Memory on the device until the end of the program, or until `rewind`."""
        ref = Ref(native.ARENA, self._top, words(nbytes))
        self._top += aligned(nbytes)
        self._used[native.ARENA] = max(self._used[native.ARENA], self._top)
        return ref

    def mark(self) -> int:
        """How much scratch memory is in use: for `rewind`."""
        return self._top

    def rewind(self, mark: int) -> None:
        """Let later scratch memory reuse that allocated since `mark`; steps that use it wait for those before."""
        self._top = mark
        if self._zeros is not None and self._zeros.offset >= mark:
            self._zeros = None

    def zeros(self, nbytes: int) -> Ref:
        """Memory of zeros, for steps that leave it as they find it."""
        if self._zeros is None or self._zeros.bytes < nbytes:
            self._zeros = self.scratch(max(nbytes, ALIGN))
            self.fill(self._zeros)
        return self._zeros

    def prepared(self, source: Ref, key: Hashable, make: Callable[[], _T]) -> _T:
        """The result of ``make``, which appends steps that derive something from the memory ``source``.

        Builders that know how long memory lives append equal steps (of equal ``key``) once for several readers.
        """
        del source, key
        return make()

    def input(self, nbytes: int) -> Ref:
        """Memory that the host writes before a run."""
        return self._staged(native.INPUT, nbytes)

    def output(self, nbytes: int) -> Ref:
        """Memory that the host reads after a run."""
        return self._staged(native.OUTPUT, nbytes)

    def _staged(self, buffer: int, nbytes: int) -> Ref:
        ref = Ref(buffer, self._used[buffer], words(nbytes))
        self._used[buffer] += aligned(nbytes)
        return ref

    def atomic(self, ref: Ref) -> None:
        """Promise that shaders which write to ``ref`` from here on only set bits in it, atomically."""
        buffer, offset, nbytes = self._range(ref)
        self._atomic.add((buffer, offset, offset + nbytes))

    def dispatch(
        self,
        variant: str,
        constants: Sequence[int],
        groups: tuple[int, int, int],
        push: Sequence[int | float],
        refs: Sequence[Ref | Buffer | None],
        *,
        subgroup: int = 0,
    ) -> None:
        """Run a variant of a shader; raises `native.Unsupported` if the device cannot.

        ``push``: words of its push constants, floats as float32. ``refs``: its storage buffers 0... It waits for the
        steps before it if one writes what it uses, or reads what it writes.
        """
        pipeline = self.device.pipeline(variant, constants, subgroup)
        step = self._step(native.DISPATCH, refs, access.of_variant(variant))
        _describe(step, pipeline, groups, push)
        self._names[-1] = variant

    def launch(
        self,
        pipeline: int,
        groups: tuple[int, int, int],
        push: Sequence[int | float],
        refs: Sequence[Ref | Buffer | None],
        *,
        barrier: bool = True,
    ) -> None:
        """As `dispatch`, for a pipeline of `Device.compile`. Without ``barrier`` it does not wait.

        Steps of a program with such a step run in the order in which they were appended.
        """
        step = self._step(native.DISPATCH, refs, [access.READ | access.WRITE] * len(refs), barrier=barrier)
        self._in_order = True
        _describe(step, pipeline, groups, push)

    def copy(self, source: Ref, target: Ref) -> None:
        """Copy bytes on the device."""
        self._step(native.COPY, (source, target), (access.READ, access.WRITE))

    def fill(self, target: Ref, word: int = 0) -> None:
        """Set every 32-bit word."""
        self._step(native.FILL, (target,), (access.WRITE,)).push[0] = word

    def _step(
        self, kind: int, refs: Sequence[Ref | Buffer | None], used: Sequence[int], *, barrier: bool | None = None
    ) -> native.Step:
        """``used``: flags of each range; ``barrier``: whether to wait, by default if it must."""
        step = native.Step(kind=kind, bindings=len(refs))
        spans: list[access.Span | None] = [None] * len(refs)
        for i, (place, ref) in enumerate(zip(step.ranges, refs, strict=False)):
            if ref is not None:
                place.buffer, place.offset, place.bytes = self._range(ref)
                spans[i] = place.buffer, place.offset, place.offset + place.bytes
        self._uses.append(access.uses(spans, used))
        if kind == native.DISPATCH and self._atomic:
            own = self._uses[-1]
            self._uses[-1] = [access.Use(one.span, access.ATOMIC) if one.span in self._atomic else one for one in own]
        if self._hazards.waits(self._uses[-1], barrier):
            self.waited()
        else:
            step.flags = native.NO_BARRIER
        self._steps.append(step)
        self._names.append(_KINDS[kind])
        return step

    def waited(self) -> None:
        """Called for each step that would wait for those before it if steps ran in the order of their calls."""

    def _range(self, ref: Ref | Buffer) -> tuple[int, int, int]:
        whole = Ref(ref, 0, words(ref.nbytes)) if isinstance(ref, Buffer) else ref
        if isinstance(whole.buffer, int):
            return whole.buffer, whole.offset, whole.bytes
        if whole.buffer.device is not self.device:
            raise ValueError(f"a buffer of {whole.buffer.device} cannot be used in a program of {self.device}")
        self._buffers[whole.buffer.number] = whole.buffer
        return whole.buffer.number, whole.offset, whole.bytes

    def program(
        self, inputs: Sequence[Place] = (), outputs: Sequence[Place] = (), *, timed: bool = False, each: bool = False
    ) -> Program:
        """Record the steps. ``inputs`` and ``outputs``: the tensors that each run exchanges.

        ``timed``: runs return their time on the device; ``each``: also that of each step, see `Program.times`.
        """
        return Program(self, inputs, outputs, timed, each)

    def recorded(self, timed: bool, each: bool) -> c_void_p:
        """The native program of the steps so far."""
        self._schedule()
        device, handle = self.device, c_void_p()
        steps = (native.Step * len(self._steps))(*self._steps)
        flags = native.STEP_TIMES if each else native.TIMESTAMPS if timed else 0
        sizes = (self._used[native.ARENA], self._used[native.INPUT], self._used[native.OUTPUT])
        device.check(device.library.qv_program(device.handle, steps, len(steps), *sizes, flags, byref(handle)))
        return handle

    def _schedule(self) -> None:
        """Put each step as early as what it uses allows: those that need not wait for each other run side by side."""
        if self._in_order:
            return
        levels = access.levels(self._uses)
        order = sorted(range(len(levels)), key=levels.__getitem__)
        for at, before in zip(order[1:], order, strict=False):
            self._steps[at].flags = 0 if levels[at] > levels[before] else native.NO_BARRIER
        self._steps = [self._steps[at] for at in order]
        self._names = [self._names[at] for at in order]
        self._uses = [self._uses[at] for at in order]

    def described(self) -> list[StepInfo]:
        """The steps so far."""
        return [
            StepInfo(name, tuple(step.groups), not step.flags & native.NO_BARRIER)
            for name, step in zip(self._names, self._steps, strict=True)
        ]

    def buffers(self) -> list[Buffer]:
        """The buffers that the steps use."""
        return list(self._buffers.values())


_Field = tuple[native.Copy, int, int]
"""A copy, its bytes, and those of a row: read once, because reading ctypes fields takes time."""


class Program:
    """Recorded steps. Runs on one device are serialized, from any thread."""

    def __init__(self, builder: Builder, inputs: Sequence[Place], outputs: Sequence[Place], timed: bool, each: bool):
        self.device = builder.device
        self._free = self.device.library.qv_program_free
        self._run = self.device.library.qv_run
        self._handle = builder.recorded(timed, each)
        self.steps = builder.described()
        self._buffers = builder.buffers()  # kept while the program may run
        self._inputs, self._outputs = _copies(inputs), _copies(outputs)
        self._each_input, self._each_output = _fields(self._inputs), _fields(self._outputs)
        self._kept: list[Array] = []
        self._elapsed = c_double() if timed or each else None
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._free(self._handle)

    def keep_outputs(self, arrays: Sequence[Array]) -> None:
        """Let each run write the last outputs to these arrays, so that `run` takes only the others."""
        count = len(self._each_output) - len(arrays)
        _set_addresses(self._each_output[count:], arrays)
        self._each_output, self._kept = self._each_output[:count], [*arrays]

    def run(self, inputs: Sequence[Array] = (), outputs: Sequence[Array] = ()) -> float | None:
        """Copy the inputs in, run the steps, copy the outputs out. Returns a timed program's microseconds."""
        self.device.check_process()
        with self._lock:
            _set_addresses(self._each_input, inputs)
            _set_addresses(self._each_output, outputs)
            elapsed = self._elapsed
            code = self._run(
                self._handle,
                self._inputs,
                len(self._inputs),
                self._outputs,
                len(self._outputs),
                None if elapsed is None else byref(elapsed),
            )
            if code:
                self.device.check(code)
            return None if elapsed is None or elapsed.value < 0 else elapsed.value

    def times(self) -> list[float]:
        """Microseconds of each of `steps` in the last run, if the program was made with ``each``.

        Raises `VulkanError` if it was not, or if the device does not measure time.
        """
        values = (c_double * len(self.steps))()
        with self._lock:
            self.device.check(self.device.library.qv_times(self._handle, values, len(values)))
        return list(values)


def _copies(places: Sequence[Place]) -> ctypes.Array[native.Copy]:
    copies = [
        native.Copy(None, place.ref.offset, place.rows, place.row_bytes, place.row_bytes, place.pitch)
        for place in places
    ]
    return (native.Copy * len(copies))(*copies)


def _fields(copies: ctypes.Array[native.Copy]) -> list[_Field]:
    return [(copy, copy.rows * copy.row_bytes, copy.row_bytes) for copy in copies]


def _set_addresses(fields: Sequence[_Field], arrays: Sequence[Array]) -> None:
    for (copy, nbytes, row_bytes), array in zip(fields, arrays, strict=True):
        if array.nbytes != nbytes:
            raise ValueError(f"got {array.nbytes} bytes; expected {copy.rows} rows of {row_bytes} bytes")
        if array.is_contiguous() if isinstance(array, torch.Tensor) else array.flags.c_contiguous:
            copy.host, copy.host_pitch = dense(array)[0], row_bytes
        else:
            copy.host, copy.host_pitch = _rows(array, copy.rows)


def _rows(array: Array, rows: int) -> tuple[int, int]:
    """Address and pitch of a tensor (rows, n) whose rows are dense but not adjacent."""
    if not isinstance(array, torch.Tensor) or array.ndim != 2 or len(array) != rows or array.stride(1) != 1:
        raise ValueError("a program takes contiguous arrays, or two-dimensional tensors with dense rows")
    return array.data_ptr(), array.stride(0) * array.itemsize


def _describe(step: native.Step, pipeline: int, groups: tuple[int, int, int], push: Sequence[int | float]) -> None:
    """Fill in a dispatch."""
    step.pipeline = pipeline
    step.groups[:] = groups
    step.push_bytes = 4 * len(push)
    step.push[: len(push)] = [_word(value) for value in push]


def _word(value: SupportsIndex | SupportsFloat) -> int:
    """The 32 bits of an int (modulo 2**32) or of a float32."""
    if isinstance(value, SupportsIndex):
        return operator.index(value) & 0xFFFFFFFF
    return int.from_bytes(struct.pack("<f", value), "little")


def words(nbytes: int) -> int:
    """Bytes of whole 32-bit words, at least one: the unit of a binding."""
    return max(4, (nbytes + 3) // 4 * 4)


def aligned(nbytes: int) -> int:
    """The bytes that a range of ``nbytes`` occupies."""
    return (max(nbytes, 1) + ALIGN - 1) // ALIGN * ALIGN
