"""A part of a captured graph as steps of a program: values, their lifetimes, and what is written in place."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from qcore.plugin_api import GraphPart, Role, base_name

from .. import native
from ..builder import Place, Program, Ref
from ..device import Buffer, Device
from ..steps.operand import Operand, new, over
from ..steps.pointwise import binary, checked, convert, fill
from . import order, sentinels
from .numbers import host_dtype, on_device
from .planner import Planner
from .residents import Weight
from .views import overlaps, reshaped

Rule = Callable[..., Any]
"""``rule(lowering, node, *args, **kwargs)``: the node's arguments with values in the place of nodes, to its value."""

OUT_OF_RANGE, OVERFLOW = 1, 2
"""Flags: an index was out of range, or an integer of 64 bits in torch did not fit 32."""

Given = Buffer | Weight | None
"""What an input of a part is on the device: None for one that the host writes at each call, and for a number."""


@dataclass(frozen=True)
class Recorded:
    """A part recorded for certain buffers.

    **Fields:** ``program``: takes the part's fresh inputs, returns its results; ``returned``: where each run leaves the
    words of the `undeferred` states; ``flags``: where it leaves 0, or `OUT_OF_RANGE` and `OVERFLOW`, if it checks
    anything; ``given``: kept alive, as the program names them.
    """

    program: Program
    returned: list[Tensor]
    flags: Tensor | None
    given: tuple[Given, ...]


class Lowering:
    """Records the nodes of a part one after the other; rules get this as their first argument."""

    def __init__(
        self,
        part: GraphPart,
        device: Device,
        given: Sequence[Given],
        constants: Mapping[fx.Node, Buffer | None],
        rule_of: Callable[[Any], Rule],
    ) -> None:
        self.b, self._rule_of = Planner(device), rule_of
        self._part, self._given, self._constants = part, given, constants
        self._values: dict[fx.Node, Any] = {}
        self._nodes = order.ordered(part)
        self._last, self._halves = _last_uses(self._nodes), halves(part)
        self._now: fx.Node | None = None
        self._holders: dict[Hashable, set[fx.Node]] = {}
        self._states = {one for one, role in zip(given, _roles(part), strict=True) if role is Role.STATE}
        self._checked: dict[tuple[fx.Node, int, bool], Operand] = {}
        self._flags: Ref | None = None
        self.ahead: dict[fx.Node, Any] = {}

    # For rules. They may leave values of later nodes in `ahead`, whose rules are not called then.

    def known(self, node: Any) -> Any:
        """The value of an argument of any node, a node or not; None if it is not there yet."""
        return self._values.get(node) if isinstance(node, fx.Node) else node

    def cast(self, x: Operand, dtype: torch.dtype) -> Operand:
        """The operand in a dtype of the device."""
        if x.dtype == dtype:
            return x
        if x.dtype == torch.bool and dtype == torch.int32:
            return replace(x, dtype=dtype)
        return convert(self.b, x, dtype)

    def filled(self, value: float, dtype: torch.dtype, shape: Sequence[int] = ()) -> Operand:
        """An operand of equal elements."""
        return fill(self.b, new(self.b, shape, dtype), value)

    def contiguous(self, x: Operand) -> Operand:
        """The operand in row-major order, copied if it is not."""
        return x if x.is_contiguous else convert(self.b, x, x.dtype)

    def reshaped(self, x: Operand, shape: Sequence[int]) -> Operand:
        """The operand in another shape, copied if its strides do not allow it."""
        found = reshaped(x, shape)
        return self.contiguous(x).reshape(shape) if found is None else found

    def index(self, node: Any, size: int, *, wrap: bool = False) -> Operand:
        """The indices that ``node`` gives, int32 and within ``0..size-1``; a call with others raises `IndexError`.

        ``wrap``: negative ones count from the end. Copied once, however often they are used.
        """
        key = (node, size, wrap)
        found = self._checked.get(key)
        if found is None:
            value = self.cast(self._values[node], torch.int32)
            found = self._checked[key] = checked(self.b, value, size, self.flags, wrap)
        return found

    def ends(self, node: Any, rows: int) -> Operand:
        """The ends of experts' rows that ``node`` gives, int32; a call whose ends do not ascend raises `IndexError`."""
        is_new = (node, rows + 1, False) not in self._checked
        found = self.index(node, rows + 1)
        if is_new and found.numel > 1:
            count = found.numel - 1
            own = binary(self.b, "sub", found.slice(0, 1, count), found.slice(0, 0, count))
            checked(self.b, own, rows + 1, self.flags, wrap=False)
        return found

    @property
    def flags(self) -> Ref:
        """A word in which steps set `OUT_OF_RANGE` and `OVERFLOW`."""
        if self._flags is None:
            self._flags = self.b.output(4)
            self.b.fill(self._flags)
            self.b.atomic(self._flags)
        return self._flags

    def writable(self, node: Any) -> Operand:
        """The value of ``node``, an argument of the present node, in memory that the present node may write.

        A copy unless nothing else needs it.
        """
        assert self._now is not None
        x = self.written_by(self._now, node)
        return convert(self.b, self._values[node], self._values[node].dtype) if x is None else x

    def written_by(self, writer: fx.Node, node: Any) -> Operand | None:
        """The value of ``node``, if the present node may write its memory in the place of ``writer``, a later one.

        None if anything else needs it from now on.
        """
        x: Operand = self._values[node]
        holders = self._holders.get(_memory(x.ref), set())
        owned = x.ref.buffer == native.ARENA or x.ref.buffer in self._states
        alone = all(self._last[one] is writer for one in holders)
        readers = {reader for one in holders for reader in one.users} - {writer}
        read = writer is not self._now and not all(reader in self._values for reader in readers)
        pinned = any(x.ref == one.ref for one in self._checked.values())
        if not owned or not alone or read or pinned or overlaps(x):
            return None
        self.b.forget(x.ref)
        return x

    # The part.

    def recorded(self) -> Recorded:
        """Record the part. Raises `OutOfMemory` if the device has no room for what lives at once."""
        places = iter(zip(self._part.inputs, self._given, strict=True))
        inputs: list[Place] = []
        for node in self._nodes:
            if node.op == "placeholder":
                one, given = next(places)
                self._keep(node, self._input(one.name, one.example, one.role, given, inputs))
            elif node in self._constants:
                self._constant(node, self._constants[node])
            elif node.op == "call_function":
                self._call(node)
        outputs = [self._output(self._values[node]) for node in _returned(self._part)]
        self._update()
        back = [(self._given[i], self._part.inputs[i].example) for i in undeferred(self._part)]
        outputs += [self._output(_whole(given, example)) for given, example in back]  # type: ignore[arg-type]
        returned = [torch.empty(example.shape, dtype=host_dtype(example.dtype), device="cpu") for _, example in back]
        flags = None if self._flags is None else torch.zeros(1, dtype=torch.int32, device="cpu")
        if self._flags is not None:
            outputs.append(Place(self._flags, 1, 4, 4))
        program = self.b.program(inputs, outputs, each=os.environ.get("QCORE_VULKAN_STEP_TIMES") == "1")
        program.keep_outputs(returned if flags is None else [*returned, flags])
        return Recorded(program, returned, flags, tuple(self._given))

    def _input(self, name: str, example: Any, role: Role, given: Given, inputs: list[Place]) -> Any:
        if role is Role.NUMBER or isinstance(given, Weight):
            return example if given is None else given
        if isinstance(given, Buffer):
            whole = _whole(given, example)
            half = Ref(given, 0, given.nbytes)
            return replace(whole, ref=half, dtype=example.dtype) if name in self._halves else whole
        nbytes = 4 * example.numel()
        ref = self.b.input(nbytes)
        inputs.append(Place(ref, 1, nbytes, nbytes))
        if not self.b.device.description.local_input:
            local = self.b.scratch(nbytes)
            self.b.copy(ref, local)
            ref = local
        return over(ref, tuple(example.shape), on_device(example.dtype))

    def _constant(self, node: fx.Node, buffer: Buffer | None) -> None:
        if buffer is not None:  # else only other constants need it
            self._keep(node, _whole(buffer, node.meta["val"]))

    def _call(self, node: fx.Node) -> None:
        self._now = node
        if node in self.ahead:
            self._keep(node, self.ahead.pop(node))
        elif node.target is operator.getitem:
            source, at = node.args
            self._keep(node, self._values[source][at])  # type: ignore[index]
        else:
            mark = self.b.mark()
            args: Any = fx.node.map_arg(node.args, self._values.__getitem__)
            kwargs: Any = fx.node.map_arg(node.kwargs, self._values.__getitem__)
            value = self._rule_of(node.target)(self, node, *args, **kwargs)
            kept = (value, tuple(self._checked.values()), *self.ahead.values())
            self.b.settle(mark, (one.ref for group in kept for one in _operands(group)))
            self._keep(node, value)
        for one in (node, *node.all_input_nodes):
            if self._last[one] is node:
                self._release(one)

    def _keep(self, node: fx.Node, value: Any) -> None:
        self._values[node] = value
        for one in _operands(value):
            self._holders.setdefault(_memory(one.ref), set()).add(node)

    def _release(self, node: fx.Node) -> None:
        """Free the memory of a value if no other value is in it."""
        pinned = {_memory(one.ref) for one in self._checked.values()}
        for one in _operands(self._values.get(node)):
            key = _memory(one.ref)
            holders = self._holders.get(key, set())
            holders.discard(node)
            if not holders and key not in pinned:
                self.b.free(one.ref)

    def _output(self, x: Operand) -> Place:
        nbytes = 4 * x.numel
        ref = self.b.output(nbytes)
        if x.is_contiguous:
            self.b.copy(Ref(x.ref.buffer, x.ref.offset + 4 * x.offset, nbytes), ref)
        else:
            convert(self.b, x, x.dtype, out=over(ref, x.shape, x.dtype))
        return Place(ref, 1, nbytes, nbytes)

    def _update(self) -> None:
        """Write into states what was not computed in place."""
        pairs = []
        for at, output in self._part.updates.items():
            state, value = self._given[at], self._values[self._part.outputs[output]]
            assert isinstance(state, Buffer)
            target = _whole(state, self._part.inputs[at].example)
            if value == target:
                continue
            if value.ref.buffer in self._states:  # it may be overwritten before it is read
                value = convert(self.b, value, value.dtype)
            pairs.append((value, target))
        for value, target in pairs:
            convert(self.b, value, target.dtype, out=target)


_SMALL = 256
"""Elements."""


def undeferred(part: GraphPart) -> list[int]:
    """Positions of the states that each run returns: small ones (lengths, positions), and those without sentinels.

    The program around a model reads the small ones from call to call. Of dtypes outside of `sentinels.DTYPES` host
    memory that is behind could not be told from values.
    """
    states = [(i, one.example) for i, one in enumerate(part.inputs) if one.role is Role.STATE]
    return [i for i, example in states if example.numel() <= _SMALL or example.dtype not in sentinels.DTYPES]


def _roles(part: GraphPart) -> list[Role]:
    return [one.role for one in part.inputs]


def _whole(buffer: Buffer, example: Any) -> Operand:
    nbytes = 4 * example.numel()
    return over(Ref(buffer, 0, nbytes), tuple(example.shape), on_device(example.dtype))


def _memory(ref: Ref) -> Hashable:
    return ref.buffer, ref.offset


def _operands(value: Any) -> Iterable[Operand]:
    if isinstance(value, Operand):
        return (value,)
    return tuple(one for one in value if isinstance(one, Operand)) if isinstance(value, tuple) else ()


def _returned(part: GraphPart) -> list[fx.Node]:
    return [part.outputs[at] for at in part.returned]


def halves(part: GraphPart) -> frozenset[str]:
    """Names of the static inputs of 16-bit floats that only products and tables read: these take them as they are."""
    places = {one.name for one in part.inputs if one.role is Role.STATIC and one.example.dtype in _HALVES}
    nodes = part.graph.graph.find_nodes(op="placeholder")
    return frozenset(
        node.name for node in nodes if node.name in places and all(_is_weight(u, node) for u in node.users)
    )


_HALVES = frozenset({torch.float16, torch.bfloat16})


GROUPED = frozenset({"_grouped_mm", "grouped_mm_fallback"})
"""Names of torch's product of rows sorted by expert, and of what transformers takes in its place."""


def _is_weight(user: fx.Node, node: fx.Node) -> bool:
    if user.target is torch.ops.aten.permute.default:
        return all(base_name(one.target) in GROUPED and _is_weight(one, user) for one in user.users)
    table = user.target is torch.ops.aten.embedding.default
    product = user.target is torch.ops.qcore_graph.dense.default or base_name(user.target) in GROUPED
    return (table or product) and [i for i, one in enumerate(user.args) if one is node] == [0 if table else 1]


def _last_uses(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The last node that reads the value of each node: the graph's output for what it returns."""
    found: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        found[node] = node
        for source in node.all_input_nodes:
            found[source] = node
    return found
