"""A part of a captured graph as steps of a program: values, how long they live, and what is written in place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from qcore.plugin_api import GraphPart, Role, base_name, is_whole

from .memory import ARENA, Arena, Value, collapsed, is_same_view, meta
from .steps import DIMS, MOST_BESIDE, Copy, Elementwise, Operation, Steps

VIEWS = frozenset({
    "view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "squeeze", "unsqueeze", "slice", "select",
    "alias", "detach", "split_with_sizes",
})  # fmt: skip
"""Ops whose result is other strides of the same memory, or a copy if strides do not allow it."""

Rule = Callable[["Lowering", fx.Node], "Value | None"]
"""Appends the steps of a node and returns its value; None if torch has to run it."""


@dataclass(frozen=True)
class InTorch:
    """A node that torch runs in the middle of a program: arguments with values in the place of nodes, and its slot."""

    target: Callable[..., Any]
    args: Any
    slot: int


@dataclass(frozen=True)
class LayerSlots:
    """A quantized layer of a program: what identifies it, and the slots of its packed tensors.

    **Fields:** ``position``: of its weight among the inputs; ``contract``, ``scheme``, ``x_dtype``, ``out_dtype``,
    ``form``, ``scale_dtype``: of the layer that the step was made for; ``slots``: of its packed tensors, by name.
    """

    position: int
    contract: str
    scheme: str
    x_dtype: torch.dtype
    out_dtype: torch.dtype
    form: bytes
    scale_dtype: torch.dtype
    slots: dict[str, int]


@dataclass
class Lowered:
    """A part as a program.

    **Fields:** ``steps``; ``segments``: ranges of steps and what torch runs between them; ``arena``: its bytes;
    ``slots``: how many bases there are; ``outputs``: slot and a tensor like it for each result; ``constants``, by slot;
    ``layers``.
    """

    steps: Steps
    segments: list[tuple[int, int] | InTorch] = field(default_factory=list)
    arena: int = 0
    slots: int = 1
    outputs: list[tuple[int, Tensor]] = field(default_factory=list)
    constants: dict[int, Tensor] = field(default_factory=dict)
    layers: list[LayerSlots] = field(default_factory=list)


class Lowering:
    """Appends the steps of a part, one node after the other; rules get this as their first argument."""

    def __init__(self, part: GraphPart, constants: Mapping[fx.Node, Tensor], rule_of: Callable[[Any], Rule]) -> None:
        self.part, self._constants, self._rule_of = part, constants, rule_of
        self.done = Lowered(Steps())
        self._nodes = _siblings_together(part.graph.graph.nodes)
        self._last = _last_uses(self._nodes)
        self._values: dict[fx.Node, Any] = {}
        self._arena, self._ranges = Arena(), dict[fx.Node, list[tuple[int, int]]]()
        self._now, self._from = 0, 0
        self._places = part.graph.graph.find_nodes(op="placeholder")
        self._states = {i + 1 for i, one in enumerate(part.inputs) if one.role is Role.STATE}
        returned = [part.outputs[i] for i in part.returned]
        self._direct = {one for one in returned if part.outputs.count(one) == 1 and one.op == "call_function"}
        self._result_slots: dict[fx.Node, int] = {}

    # For rules.

    def value(self, node: Any) -> Value:
        """The value of an argument that is a tensor."""
        found = self._values[node]
        assert isinstance(found, Value)
        return found

    def position(self, node: fx.Node) -> int:
        """Which input a placeholder is."""
        return self._places.index(node)

    def slot(self) -> int:
        """A new base."""
        self.done.slots += 1
        return self.done.slots - 1

    def new(self, shape: Sequence[int], dtype: torch.dtype, *, scratch: bool = False) -> Value:
        """Memory for a contiguous value of the present node; ``scratch``: that is not its result."""
        like, node = meta(shape, dtype), self._nodes[self._now]
        if not scratch and node in self._direct and node not in self._result_slots:
            slot = self._result_slots[node] = self.slot()
            return Value(slot, 0, like)
        offset, size = self._arena.take(max(1, like.untyped_storage().nbytes()))
        self._ranges.setdefault(node, []).append((offset, size))
        return Value(ARENA, offset, like)

    def contiguous(self, x: Value) -> Value:
        """The value in row-major order, copied if it is not."""
        return x if x.meta.is_contiguous() else self.copied(x)

    def copied(self, x: Value) -> Value:
        """The value in memory of its own, in row-major order."""
        made = self.new(x.meta.shape, x.meta.dtype, scratch=True)
        self.copy(x, made)
        return made

    def rows(self, x: Value) -> Value:
        """The value with numbers of the last dimension next to each other, copied if they are not."""
        return x if x.meta.shape[-1] == 1 or x.meta.stride(-1) == 1 else self.contiguous(x)

    def copy(self, x: Value, to: Value) -> None:
        """Copy a value, broadcast to another one of the same dtype."""
        whole = x.meta.expand(to.meta.shape)
        sizes, (source, strides) = collapsed(to.meta.shape, whole.stride(), to.meta.stride())
        if len(sizes) > DIMS:
            dim = min((size, dim) for dim, size in enumerate(whole.shape) if size > 1)[1]
            for one, other in zip(whole.unbind(dim), to.meta.unbind(dim), strict=True):
                self.copy(x.viewed(one), to.viewed(other))
            return
        step = Copy(x.place, to.place, len(sizes), x.meta.itemsize)
        step.sizes[: len(sizes)], step.source_strides[: len(sizes)] = sizes, source
        step.to_strides[: len(sizes)] = strides
        self.done.steps.append(step)

    def elementwise(
        self,
        operation: Operation,
        operands: Sequence[Value | float],
        to: Value,
        *,
        alpha: float = 1,
        whole: bool = False,
    ) -> Value:
        """``to`` (contiguous) of tensors that are broadcast to it, and numbers; ``whole``: in integers of 64 bits."""
        shape = to.meta.shape
        tensors = [one for one in operands if isinstance(one, Value)]
        sizes, strides = collapsed(shape, to.meta.stride(), *(one.meta.expand(shape).stride() for one in tensors))
        count = len(_few(sizes))
        step = Elementwise(operation, whole, count, len(operands))
        step.sizes[:count] = sizes
        step.alpha, step.whole_alpha, step.to = float(alpha), int(alpha) if whole else 0, to.place
        own = iter(strides[1:])
        for place, one in zip(step.operands, operands, strict=False):
            if isinstance(one, Value):
                place.at, place.strides[:count] = one.place, next(own)
            else:
                place.at.slot, place.number, place.whole = -1, float(one), int(one) if whole else 0
        self.done.steps.append(step)
        return to

    def written_in_place(self, x: Value) -> bool:
        """Whether the present node may write into ``x``: a whole state, of which nobody reads what it holds now."""
        if x.slot not in self._states or x.meta.numel() * x.meta.itemsize != self._state(x.slot).nbytes:
            return False
        held = [
            node
            for node, value in self._values.items()
            if any(isinstance(one, Value) and one.slot == x.slot for one in (value if type(value) is list else [value]))
        ]
        return x.meta.is_contiguous() and all(self._last[node] <= self._now for node in held)

    def _state(self, slot: int) -> Any:
        return self.part.inputs[slot - 1].example

    # The part.

    def run(self) -> Lowered:
        """Append the whole part."""
        for position, (place, given) in enumerate(zip(self._places, self.part.inputs, strict=True)):
            slot = self.slot()
            assert slot == position + 1
            if isinstance(given.example, Tensor):
                strides = given.example.stride() if given.role is Role.STATE else None
                self._values[place] = Value(slot, 0, meta(given.example.shape, given.example.dtype, strides))
            else:
                self._values[place] = given.example
        for now, node in enumerate(self._nodes):
            self._now = now
            if node.op in {"call_function", "get_attr"}:
                self._values[node] = self._evaluated(node)
                self._release(now)
        self._finish()
        self._cut()
        self.done.arena = self._arena.bytes
        return self.done

    def _evaluated(self, node: fx.Node) -> Any:
        if node in self._constants:
            slot = self.slot()
            self.done.constants[slot] = self._constants[node].contiguous()
            return Value(slot, 0, meta(self._constants[node].shape, self._constants[node].dtype))
        if node.target is operator.getitem:
            return self._values[node.args[0]][node.args[1]]  # type: ignore[index]
        if is_view(node):
            return self._view(node)
        found = self._rule_of(node.target)(self, node)
        return self._in_torch(node) if found is None else found

    def _view(self, node: fx.Node) -> Any:
        x = self.value(node.args[0])
        rest = fx.node.map_arg(node.args[1:], lambda one: one.meta["val"])  # sizes may be numbers of the graph
        try:
            made: Any = node.target(x.meta, *rest, **node.kwargs)  # type: ignore[operator]
            shared = all(_shares(one, x.meta) for one in (made if isinstance(made, (list, tuple)) else [made]))
        except RuntimeError:
            shared = False
        if not shared:
            x = self.contiguous(x)
            made = node.target(x.meta, *rest, **node.kwargs)  # type: ignore[operator]
        return [x.viewed(one) for one in made] if isinstance(made, (list, tuple)) else x.viewed(made)

    def _in_torch(self, node: fx.Node) -> Value:
        """Let torch run a node; its result has memory of its own."""
        self._cut()
        slot, like = self.slot(), node.meta["val"]
        args = fx.node.map_arg(node.args, lambda one: self._values[one])
        self.done.segments.append(InTorch(node.target, args, slot))  # type: ignore[arg-type]
        return Value(slot, 0, meta(like.shape, like.dtype))

    def _cut(self) -> None:
        """End a range of steps."""
        if self.done.steps.count > self._from:
            self.done.segments.append((self._from, self.done.steps.count))
            self._from = self.done.steps.count

    def _release(self, now: int) -> None:
        for node in [one for one in self._ranges if self._last[one] <= now]:
            for offset, size in self._ranges.pop(node):
                self._arena.free(offset, size)

    def _finish(self) -> None:
        """Copy results to memory of their own, then new values of states into them."""
        part = self.part
        for position in part.returned:
            value = self.value(part.outputs[position])
            if self._result_slots.get(part.outputs[position]) != value.slot or not value.meta.is_contiguous():
                made = Value(self.slot(), 0, meta(value.meta.shape, value.meta.dtype))
                self.copy(value, made)
                value = made
            self.done.outputs.append((value.slot, value.meta))
        writes = []
        for position, output in part.updates.items():
            value, own = self.value(part.outputs[output]), self._values[self._places[position]]
            if value.slot == own.slot and is_same_view(value.meta, own.meta):
                continue
            if value.slot in self._states:  # which may be written before it is read
                value = self.copied(value)
            writes.append((value, own))
        for value, own in writes:
            self.copy(value, own)


def _few(sizes: list[int]) -> list[int]:
    if len(sizes) > DIMS:
        raise ValueError(f"a tensor has more than {DIMS} dimensions of its own")
    return sizes


def _shares(made: Tensor, source: Tensor) -> bool:
    return bool(made.untyped_storage()._cdata == source.untyped_storage()._cdata)  # noqa: SLF001 - no public name


def _siblings_together(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes in an order where linear layers on the same x follow each other, which the library runs at once."""
    given, readers = list(nodes), dict[Any, list[fx.Node]]()
    for node in given:
        if is_whole(node.target) and base_name(node.target) == "linear":
            readers.setdefault(node.args[0], []).append(node)
    siblings = {node: others for others in readers.values() for node in others}
    order: dict[fx.Node, None] = {}
    for node in given:
        if node in order:
            continue
        order[node] = None
        ready = [one for one in siblings.get(node, ()) if all(other in order for other in one.all_input_nodes)]
        # No more than run at once: the results of others would only take memory for longer.
        order |= dict.fromkeys([one for one in ready if one not in order][: MOST_BESIDE - 1])
    return list(order)


def _last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The position of the last node that reads each node's memory, through views and parts of tuples as well."""
    at = {node: position for position, node in enumerate(nodes)}
    last = dict(at)
    for node in reversed(nodes):
        for user in node.users:
            through = user.target is operator.getitem or (user.op == "call_function" and is_view(user))
            last[node] = max(last[node], last[user] if through else at[user])
    return last


def is_view(node: fx.Node) -> bool:
    """Whether a node's result is a view."""
    return base_name(node.target) in VIEWS and not is_whole(node.target)
