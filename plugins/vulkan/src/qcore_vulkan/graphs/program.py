"""A part of a captured graph as one recorded program over buffers that stay on the device.

Weights, parameters and states are in device memory; per call only fresh arguments and results cross over. A program is
recorded for the buffers of its weights and states, as layers of one kind share a graph: the last few are kept.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from qcore.plugin_api import GraphPart, PartRefused, Role, Stamp

from .. import device as devices
from ..device import Buffer, Device
from ..programs import Programs
from ..weights import known
from . import residents, states
from .constants import folded
from .lowering import OUT_OF_RANGE, OVERFLOW, Given, Lowering, Recorded, halves, undeferred
from .numbers import TOO_LARGE, host_dtype, words_of
from .rules import rule_of
from .sentinels import StaleValuesError
from .states import State

_Seen = tuple[list[int], Stamp, list[Given]]
"""Identities and versions of tensors when they were last seen, and what the inputs were; their ends are watched."""


class Program:
    """See the module. Called with one tensor or number per input of the part, it returns the part's results."""

    def __init__(self, part: GraphPart) -> None:
        self._part = part
        roles = [one.role for one in part.inputs]
        self._states = [i for i, role in enumerate(roles) if role is Role.STATE]
        back = set(undeferred(part))
        self._returned = [at for at, i in enumerate(self._states) if i in back]
        self._deferred = [at for at, i in enumerate(self._states) if i not in back]
        self._fixed = [i for i, role in enumerate(roles) if role in {Role.WEIGHT, Role.STATIC}]
        self._fresh = [i for i, role in enumerate(roles) if role is Role.FRESH]
        self._weights = {i for i, role in enumerate(roles) if role is Role.WEIGHT}
        self._halves = halves(part)
        self._results = [part.outputs[i].meta["val"] for i in part.returned]
        self._constants = folded(part)
        self._uploaded: tuple[Device, dict[fx.Node, Buffer | None]] | None = None
        self._copied: dict[int, State] = {}
        self._refresh = states.Refresher()
        self._held: _Held | None = None
        self._seen: _Seen | None = None
        self._last: tuple[Device, list[Given], Recorded] | None = None
        self._watched: dict[int, weakref.ref[Tensor]] = {}
        self._recorded: Programs[tuple[int, ...], Recorded] = Programs()
        self._lock = threading.Lock()
        self._first()

    def _first(self) -> None:
        """Record the program for the tensors of the first call, so that an error leaves the whole graph to torch.

        Not one of stale values: torch would compute with them.
        """
        values = [one.example if one.role is Role.NUMBER else one.value for one in self._part.inputs]
        if all(values[i] is not None for i in (*self._states, *self._fixed)):
            with self._lock, contextlib.suppress(StaleValuesError):
                device, given, _ = self._placed(values)
                self._program(device, given)

    def __call__(self, values: Sequence[object]) -> Sequence[Tensor]:
        """Run the program, and wait for it."""
        with self._lock:
            return self._run(values)

    def _run(self, values: Sequence[object]) -> Sequence[Tensor]:
        device, given, held = self._placed(values)
        recorded = self._program(device, given)
        inputs = self._words([values[i] for i in self._fresh])  # type: ignore[misc]
        outputs = [torch.empty(like.shape, dtype=host_dtype(like.dtype), device="cpu") for like in self._results]
        recorded.program.run(inputs, outputs)
        tensors: list[Tensor] = [values[i] for i in self._states]  # type: ignore[misc]
        me = threading.get_ident()
        for at in self._deferred:
            held[at].thread = me
            if self._states[at] in self._copied:
                states.read_into(held[at].buffer, tensors[at])
            elif held[at].sentinels is None:
                held[at].advance(tensors[at])
        states.take_each([held[at] for at in self._returned], [tensors[at] for at in self._returned], recorded.returned)
        if recorded.flags is not None:
            self._check(int(recorded.flags.item()))
        return [y.to(like.dtype) for y, like in zip(outputs, self._results, strict=True)]

    def _words(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the program takes for arguments. Raises `PartRefused` for integers that do not fit."""
        try:
            return [words_of(states.current(tensor)) for tensor in tensors]
        except OverflowError as error:
            raise PartRefused(str(error), once=True) from error

    def _check(self, flags: int) -> None:
        """Raise what a run has noted: `PartRefused` where torch can repeat it."""
        if flags & OUT_OF_RANGE:
            raise IndexError("an index of an embedding, a cache or an indexing operation is out of range.")
        if flags & OVERFLOW and self._states:
            raise OverflowError(TOO_LARGE)
        if flags & OVERFLOW:
            raise PartRefused(TOO_LARGE, once=True)

    def _placed(self, values: Sequence[object]) -> tuple[Device, list[Given], list[State]]:
        """The device, and what each input is on it."""
        given = self._fixed_inputs(values)
        device = self._device(given)
        tensors: list[Tensor] = [values[i] for i in self._states]  # type: ignore[misc]
        last = self._held  # read once, as above
        held = last.states if last is not None and last.fits(device, tensors) else None
        if held is None:
            stale: list[states.Stale] = []
            held = [self._state(device, i, tensor, stale) for i, tensor in zip(self._states, tensors, strict=True)]
            if stale:
                self._refresh(device, stale)
            self._held = None if self._copied else _Held(device, [*map(id, tensors)], held)
        for i, state in zip(self._states, held, strict=True):
            given[i] = state.buffer
        return device, given, held

    def _device(self, given: Sequence[Given]) -> Device:
        return next((given[i].device for i in self._fixed), None) or devices.get()  # type: ignore[union-attr]

    def _fixed_inputs(self, values: Sequence[object]) -> list[Given]:
        """Weights, parameters and buffers: those of the last call if the tensors are the same."""
        tensors: list[Tensor] = [values[i] for i in self._fixed]  # type: ignore[misc]
        known = [*map(id, tensors)]
        seen = self._seen  # read once: the end of a tensor may take it away at any time
        same = _is_same(seen, known, tensors)
        if not same or states.are_among(known):
            for tensor in tensors:
                states.current(tensor)  # another graph may have written it
            same = _is_same(seen, known, tensors)
        if seen is not None and same and not (self._fixed and self._device(seen[2]).lost):
            return [*seen[2]]
        self._seen = None
        given = self._place(tensors, len(values))
        for tensor in tensors:
            self._watch(tensor)
        self._seen = known, Stamp(*tensors), given
        return [*given]

    def _watch(self, tensor: Tensor) -> None:
        """Let the end of a tensor be that of the programs: they hold its memory on the device."""
        found = self._watched.get(id(tensor))
        if found is None or found() is not tensor:
            self._watched[id(tensor)] = weakref.ref(tensor, partial(_forget, weakref.ref(self), id(tensor)))

    def _place(self, tensors: Sequence[Tensor], count: int) -> list[Given]:
        weights = [one for i, one in zip(self._fixed, tensors, strict=True) if i in self._weights]
        bound = next((found for one in weights if (found := known(one)) is not None), None)
        device = devices.get() if bound is None else bound.device
        own = residents.on(device)
        given: list[Given] = [None] * count
        for i, tensor in zip(self._fixed, tensors, strict=True):
            given[i] = self._own(own, i, tensor)
        return given

    def _own(self, own: residents.Residents, i: int, tensor: Tensor) -> Given:
        if i in self._weights:
            return own.weight(tensor)
        return own.half(tensor) if self._part.inputs[i].name in self._halves else own.static(tensor)

    def _state(self, device: Device, i: int, tensor: Tensor, stale: list[states.Stale]) -> State:
        self._watch(tensor)
        found = states.get(device, tensor, stale)
        if found is not None:
            self._copied.pop(i, None)
            return found
        kept = self._copied.get(i)
        if kept is None or kept.device is not device or device.lost:
            kept = self._copied[i] = State(device, tensor)
        else:
            kept.buffer.write(words_of(tensor))
        return kept

    def _program(self, device: Device, given: list[Given]) -> Recorded:
        last = self._last
        if last is None or last[0] is not device or last[1] != given:
            last = self._last = device, given, self._recorded_for(device, given)
        return last[2]

    def _recorded_for(self, device: Device, given: Sequence[Given]) -> Recorded:
        key = tuple(id(one) for one in (device, *given))

        def record() -> Recorded:
            return Lowering(self._part, device, given, self._constants_on(device), rule_of).recorded()

        return self._recorded.get(key, record)

    def _constants_on(self, device: Device) -> dict[fx.Node, Buffer | None]:
        if self._uploaded is None or self._uploaded[0] is not device:
            made = {
                node: None if value is None else residents.static(device, value)
                for node, value in self._constants.items()
            }
            self._uploaded = device, made
        return self._uploaded[1]


def _is_same(seen: _Seen | None, known: list[int], tensors: Sequence[Tensor]) -> bool:
    """Whether tensors of these identities are those that were seen last, and have not changed."""
    return seen is not None and known == seen[0] and seen[1].fits(*tensors)


class _Held(NamedTuple):
    """The states of the last call."""

    device: Device
    ids: list[int]
    states: list[State]

    def fits(self, device: Device, tensors: Sequence[Tensor]) -> bool:
        """Whether these are their tensors, and torch has not written to one."""
        same = self.device is device and not device.lost and self.ids == [*map(id, tensors)]
        if not same or any(state.replaced for state in self.states):
            return False
        return Stamp.fit_each([state.stamp for state in self.states], tensors)


def _forget(program: weakref.ref[Program], key: int, _dead: Any) -> None:
    """Drop what was recorded and placed for a tensor that has died."""
    found = program()
    if found is not None:
        found._watched.pop(key, None)  # noqa: SLF001 - a method would keep the program alive
        found._seen = None  # noqa: SLF001
        found._last = found._held = None  # noqa: SLF001
        found._recorded.clear()  # noqa: SLF001
        found._refresh.clear()  # noqa: SLF001
