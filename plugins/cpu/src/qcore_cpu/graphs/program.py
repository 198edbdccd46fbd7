"""A compiled part: its program, and the memory that a call works on."""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qcore.plugin_api import GraphPart, PartRefused, Role, constant_value, is_constant

from .layers import layer_of
from .lowering import InTorch, Lowered, Lowering
from .memory import ARENA, Value, view_of
from .rules import rule_of


class _Room:
    """What one call uses at a time: the bases, and the memory behind the arena and the constants.

    **Fields:** ``bases``: addresses by slot; ``arena``: uint8; ``markers``: of the layers whose packed tensors are
    among the bases, held weakly.
    """

    def __init__(self, lowered: Lowered) -> None:
        self.bases = (ctypes.c_void_p * lowered.slots)()
        self.arena = torch.empty(lowered.arena + 64, dtype=torch.uint8, device="cpu")  # whatever the default device is
        self.bases[ARENA] = self.arena.data_ptr()
        for slot, constant in lowered.constants.items():
            self.bases[slot] = constant.data_ptr()
        self.markers: list[weakref.ref[Tensor]] = []


class Program:
    """Runs a part; calls from several threads have memory of their own."""

    def __init__(self, part: GraphPart) -> None:
        values: dict[fx.Node, Any] = {}
        known: dict[fx.Node, bool] = {}
        nodes = [node for node in part.graph.graph.nodes if node.op in {"call_function", "get_attr"}]
        constants = {
            node: constant_value(part.graph, node, values)
            for node in nodes
            if isinstance(node.meta.get("val"), Tensor) and is_constant(node, known)
        }
        self._lowered = lowered = Lowering(part, constants, rule_of).run()
        roles = [(i, one.role) for i, one in enumerate(part.inputs) if isinstance(one.example, Tensor)]
        self._states = [(i, tuple(part.inputs[i].example.stride())) for i, role in roles if role is Role.STATE]
        self._read = [position for position, role in roles if role not in {Role.WEIGHT, Role.STATE}]
        self._layers = [one.position for one in lowered.layers]
        self._rooms: list[_Room] = []

    def __call__(self, values: Sequence[Any]) -> Sequence[Tensor]:
        """The results of the part. Raises `PartRefused` if a state or a layer is not as it was compiled for."""
        try:
            room = self._rooms.pop()
        except IndexError:  # other threads use what there is
            room = _Room(self._lowered)
        try:
            return self._run(room, values)
        finally:
            if not self._rooms:  # one is kept for the next call
                self._rooms.append(room)

    def _run(self, room: _Room, values: Sequence[Any]) -> list[Tensor]:
        bases, held = room.bases, list(values)
        self._bind(room, values)
        for position, strides in self._states:
            given = values[position]
            if given.stride() != strides:
                raise PartRefused(f"a state that it writes has the strides {given.stride()} instead of {strides}")
            bases[position + 1] = given.data_ptr()
        for position in self._read:
            given = values[position]
            if not given.is_contiguous() or given.is_neg():
                given = held[position] = given.contiguous().resolve_neg()
            bases[position + 1] = given.data_ptr()
        outputs = self._lowered.outputs
        results = {slot: torch.empty(like.shape, dtype=like.dtype, device="cpu") for slot, like in outputs}
        for slot, one in results.items():
            bases[slot] = one.data_ptr()
        memory = {ARENA: room.arena, **results}
        for segment in self._lowered.segments:
            if isinstance(segment, InTorch):
                made = memory[segment.slot] = self._in_torch(segment, memory, held)
                bases[segment.slot] = made.data_ptr()
            else:
                self._lowered.steps.run(*segment, bases)
        return [results[slot] for slot, _ in outputs]

    def _bind(self, room: _Room, values: Sequence[Any]) -> None:
        """Point to the packed tensors of the layers of this call."""
        markers = [values[position] for position in self._layers]
        if len(room.markers) == len(markers) and all(map(operator.is_, map(_target, room.markers), markers)):
            return
        room.markers = []
        for layer, marker in zip(self._lowered.layers, markers, strict=True):
            found = layer_of(marker, layer.contract, layer.scheme, layer.x_dtype, layer.out_dtype)
            if found is None or found[0].form != layer.form:
                raise PartRefused("a layer is bound to another kernel than when it was compiled")
            packed = found[1]
            if packed["scale"].dtype != layer.scale_dtype:
                raise PartRefused("a layer has scales of another dtype than when it was compiled")
            for name, slot in layer.slots.items():
                room.bases[slot] = packed[name].data_ptr()
        room.markers = [weakref.ref(marker) for marker in markers]

    def _in_torch(self, node: InTorch, memory: dict[int, Tensor], held: Sequence[Any]) -> Tensor:
        def tensor(value: Any) -> Any:
            if not isinstance(value, Value):
                return value
            if value.slot in self._lowered.constants:
                return view_of(self._lowered.constants[value.slot], value)
            given = memory.get(value.slot)
            if given is not None:
                return view_of(given, value)
            own, like = held[value.slot - 1], value.meta
            whole = own.dtype == like.dtype and own.shape == like.shape and own.stride() == like.stride()
            # An op may know a weight by its tensor.
            return own if whole and not like.storage_offset() else view_of(own, value)

        args: Any = torch.utils._pytree.tree_map(tensor, node.args)  # noqa: SLF001 - torch has no public one
        made: Tensor = node.target(*args)
        return made.contiguous()


def _target(ref: weakref.ref[Tensor]) -> Tensor | None:
    return ref()
