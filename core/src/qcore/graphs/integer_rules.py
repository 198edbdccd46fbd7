"""Where a tensor without dimensions can take the place of a Python integer in a recorded graph: a rule for each op."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .copying import IN_PLACE, is_in_order, may_be_copy, memory_of, name_of, plain, value_of, written_in


class Passed(NamedTuple):
    """**Fields:** ``number``: a node of the graph that is an integer; ``device``: of the tensor in its place."""

    number: fx.Node
    device: torch.device


Limits = tuple[int, int]
"""The least and the largest value of a number that is an index: others select otherwise, or are errors."""
ANY: Limits = (torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max)


def pass_as_tensors(graph: fx.Graph, numbers: Iterable[fx.Node]) -> dict[Passed, Limits]:
    """Let ``graph`` take tensors in the places of ``numbers``, nodes that are integers, where its ops can.

    Returns what it takes now: one int64 tensor without dimensions each, as further arguments, in this order.
    """
    passing = _Passing(graph, numbers)
    for node in list(graph.nodes):
        rule = _rule_of(node)
        if rule is not None and passing.reads(node):
            with graph.inserting_before(node):
                rule(passing, node)
    return {one: passing.limits.get(one.number, ANY) for one in passing.passed}


def symbols_of(value: Any) -> set[Any]:
    """The symbols of a size, a number or a tensor's shape."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return set(free_symbols(value))


def has_symbols(node: fx.Node) -> bool:
    """Whether a number differs from call to call."""
    return isinstance(value_of(node), torch.SymInt) and bool(symbols_of(value_of(node)))


class _Taken(NamedTuple):
    """What an index takes of a dimension.

    **Fields:** ``start``: a number; ``length``: in elements; ``is_slice``: whether it is a slice, in which a stop of 0
    is the beginning and not the end.
    """

    start: fx.Node
    length: int
    is_slice: bool


class _Passing:
    """Replaces numbers in one graph. Its methods add nodes where the graph inserts."""

    def __init__(self, graph: fx.Graph, numbers: Iterable[fx.Node]) -> None:
        self.graph, self._numbers = graph, frozenset(numbers)
        self.passed: dict[Passed, fx.Node] = {}
        self.limits: dict[fx.Node, Limits] = {}
        self._last: Any = graph.find_nodes(op="placeholder")[-1:]
        self._written: set[int] | None = None

    def reads(self, node: fx.Node) -> bool:
        return any(one in self._numbers for one in node.all_input_nodes)

    def is_number(self, one: Any) -> bool:
        return isinstance(one, fx.Node) and one in self._numbers

    def tensor(self, number: Any, device: torch.device) -> fx.Node:
        """The argument of int64 without dimensions that stands for ``number``."""
        key = Passed(number, device)
        if key not in self.passed:
            with self.graph.inserting_after(self._last[0]):
                place = self.graph.placeholder(f"{number.name}_as_tensor_{len(self.passed)}")
            place.meta["example_value"] = torch.zeros((), dtype=torch.int64)
            self.passed[key], self._last = place, [place]
        return self.passed[key]

    def limit(self, x: Any, dim: int, place: _Taken) -> bool:
        """Note what values of ``place`` are indices into ``x`` as in this call: of the same sign, and in range.

        Returns False if those of this call are not, or if ``x`` is no tensor of a known shape that takes indices.
        """
        value, start = value_of(x), value_of(place.start).node
        if memory_of(value) is None or value.dtype not in _INDEXED or any(map(symbols_of, value.shape)):
            return False
        size = int(value.shape[dim])
        low, high = (0, size - place.length) if start.hint >= 0 else (-size, -place.length - place.is_slice)
        return self.bound(place.start, low, high)

    def bound(self, number: Any, low: int, high: int) -> bool:
        """Let calls run in torch if ``number`` is not from ``low`` to ``high``. Returns False if this one would."""
        start, known = value_of(number).node, self.limits.get(number, ANY)
        if not start.has_hint() or not low <= start.hint <= high:
            return False
        self.limits[number] = max(low, known[0]), min(high, known[1])
        return True

    def indices(self, x: Any, dim: int, place: _Taken) -> fx.Node:
        """The indices of a dimension of ``x``, shape (length), after `limit`."""
        device, size = value_of(x).device, int(value_of(x).shape[dim])
        first = 0 if value_of(place.start).node.hint >= 0 else size
        form = (first, first + place.length)
        offsets = self.graph.call_function(torch.arange, form, {"device": device})
        return self.graph.call_function(torch.add, (offsets, self.tensor(place.start, device)))

    def may_be_copy(self, node: fx.Node) -> bool:
        """Whether a copy of a part does for the view that ``node`` takes."""
        if self._written is None:
            self._written = written_in(self.graph)
        return may_be_copy(node, self._written)

    def replace(self, node: fx.Node, new: fx.Node) -> None:
        """Put ``new`` in the place of ``node``."""
        new.meta = {**node.meta, **new.meta}
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)


_INDEXED = frozenset((
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
))  # fmt: skip
"""Dtypes that torch selects and copies by an index."""
_EXACT = (torch.int64, torch.int32, torch.float32, torch.float64)
"""Dtypes of tensors for which a number and a tensor of int64 give the same: in others they are rounded differently."""


def _takes(one: Any) -> bool:
    """Whether a number beside this operand may be a tensor: it must not change the dtype of the result."""
    value = value_of(one)
    if not isinstance(value, Tensor):
        return not isinstance(one, fx.Node) or not isinstance(value, (float, torch.SymFloat))
    return value.dtype in _EXACT and (value.dim() > 0 or value.dtype is not torch.int32)


def _elementwise(passing: _Passing, node: fx.Node) -> None:
    first = 1 if name_of(node) == "where" else 0
    operands, result = node.args[first:], value_of(node)
    if not isinstance(result, Tensor) or node.kwargs or not all(map(_takes, operands)):
        return
    if first == 0 and not any(isinstance(value_of(one), Tensor) for one in operands):
        return
    if passing.is_number(node.args[0]):
        _take_first(passing, node)
    for i, one in enumerate(node.args):
        if i >= first and passing.is_number(one):
            node.update_arg(i, passing.tensor(one, result.device))


def _take_first(passing: _Passing, node: fx.Node) -> None:
    """Let ``number / x`` compute what torch does, ``reciprocal(x) * number``; ``number += x`` writes to nothing."""
    name = name_of(node).removeprefix("i") if name_of(node) in IN_PLACE else name_of(node)
    if name == "truediv":
        node.args = (passing.graph.call_function(torch.reciprocal, node.args[1:]), node.args[0])
    node.target = operator.mul if name == "truediv" else getattr(operator, name, node.target)


def _arange(passing: _Passing, node: fx.Node) -> None:
    result, kwargs = value_of(node), dict(node.kwargs)
    start, _end, step = (*node.args, 1)[:3] if len(node.args) in {2, 3} else (None, None, 0)
    if not passing.is_number(start) or step != 1 or symbols_of(result) or result.dtype not in _EXACT[:2]:
        return
    offsets = passing.graph.call_function(torch.arange, (len(result),), kwargs)
    passing.replace(node, passing.graph.call_function(torch.add, (offsets, passing.tensor(start, result.device))))


def _filled(passing: _Passing, node: fx.Node) -> None:
    """``torch.full(size, number)`` and ``x.new_full(size, number)``."""
    result, number = value_of(node), node.kwargs.get("fill_value", (None, *node.args)[-1])
    if not passing.is_number(number) or symbols_of(result) or not _fits(passing, result, [number]):
        return
    graph, form = passing.graph, {"dtype": result.dtype, "device": result.device}
    zeros = graph.call_function(torch.zeros, (tuple(result.shape),), form)
    filling = graph.call_method("to", (passing.tensor(number, result.device), result.dtype))
    passing.replace(node, graph.call_function(torch.add, (zeros, filling)))


def _fits(passing: _Passing, result: Any, ones: Iterable[Any]) -> bool:
    """Whether numbers are elements of ``result``; torch raises errors for others that int32 does not hold."""
    low, high = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    numbers = [one for one in ones if passing.is_number(one)]
    return result.dtype in _EXACT and (
        result.dtype is not torch.int32 or all(passing.bound(one, low, high) for one in numbers)
    )


def _made(passing: _Passing, node: fx.Node) -> None:
    """``torch.tensor(number)`` and of a list of such, `torch.as_tensor`, `torch.scalar_tensor`."""
    result, given = value_of(node), (*node.args, None)[0]
    ones = given if isinstance(given, (list, tuple)) else [given]
    if not all(isinstance(one, int) or passing.is_number(one) for one in ones) or not _fits(passing, result, ones):
        return
    graph, form = passing.graph, {"dtype": torch.int64, "device": result.device}
    known = partial(graph.call_function, torch.full, kwargs=form)
    parts = [passing.tensor(one, result.device) if isinstance(one, fx.Node) else known(((), one)) for one in ones]
    whole = parts[0] if given is ones[0] else graph.call_function(torch.stack, (parts,))
    passing.replace(node, graph.call_method("to", (whole,), {"dtype": result.dtype, "copy": True}))


def _narrow(passing: _Passing, node: fx.Node) -> None:
    x, dim, start, length = node.args if len(node.args) == 4 else (None, None, None, None)
    if passing.is_number(start) and isinstance(dim, int) and isinstance(length, int) and passing.may_be_copy(node):
        taken = _Taken(start, length, is_slice=False)  # type: ignore[arg-type]
        if passing.limit(x, dim, taken):
            passing.replace(node, _selected(passing, x, dim, taken))


def _select(passing: _Passing, node: fx.Node) -> None:
    x, dim, at = node.args if len(node.args) == 3 else (None, None, None)
    if passing.is_number(at) and isinstance(dim, int) and passing.may_be_copy(node):
        taken = _Taken(at, 1, is_slice=False)  # type: ignore[arg-type]
        if passing.limit(x, dim, taken):
            passing.replace(node, passing.graph.call_function(torch.squeeze, (_selected(passing, x, dim, taken), dim)))


def _selected(passing: _Passing, x: Any, dim: int, taken: _Taken) -> fx.Node:
    return passing.graph.call_function(torch.index_select, (x, dim, passing.indices(x, dim, taken)))


class _Place(NamedTuple):
    """**Fields:** ``item``: which of an index's items has a number; ``dim``: of x; ``taken``: of this dimension."""

    item: int
    dim: int
    taken: _Taken


def _place(passing: _Passing, x: Any, index: Any) -> _Place | None:
    """The only item of an index that has a number; None if there are several, or others than slices and None."""
    value, items = value_of(x), index if isinstance(index, tuple) else (index,)
    if not isinstance(value, Tensor):
        return None
    found: list[_Place] = []
    dim, kept = 0, sum(item is not None and item is not Ellipsis for item in items)
    for i, item in enumerate(items):
        if item is Ellipsis:
            dim += value.dim() - kept
            continue
        if item is not None and item != slice(None):
            taken = _taken(passing, item)
            if taken is None:
                return None
            found.append(_Place(i, dim, taken))
        dim += item is not None
    return found[0] if len(found) == 1 and passing.limit(x, found[0].dim, found[0].taken) else None


def _taken(passing: _Passing, item: Any) -> _Taken | None:
    """What an item takes; None if it has no number, or another size from call to call."""
    if passing.is_number(item):
        return _Taken(item, 1, is_slice=False)
    if not isinstance(item, slice) or not passing.is_number(item.start) or item.step not in {None, 1}:
        return None
    start, stop = value_of(item.start), value_of(item.stop)
    if not isinstance(stop, torch.SymInt) or symbols_of(stop - start) or int(stop - start) < 0:
        return None
    return _Taken(item.start, int(stop - start), is_slice=True)


def _read(passing: _Passing, node: fx.Node) -> None:
    x, index = node.args
    if isinstance(value_of(x), Tensor) and passing.may_be_copy(node):
        place = _place(passing, x, index)
        if place is not None:
            items: list[Any] = [*index] if isinstance(index, tuple) else [index]
            items[place.item] = slice(None) if place.taken.is_slice else 0
            taken = _selected(passing, x, place.dim, place.taken)
            passing.replace(node, passing.graph.call_function(operator.getitem, (taken, tuple(items))))


def _write(passing: _Passing, node: fx.Node) -> None:
    x, index, new = node.args
    target, value = value_of(x), value_of(new)
    if (isinstance(index, tuple) and any(item is None for item in index)) or not is_in_order(target):
        return
    if isinstance(value, Tensor):
        if symbols_of(value) or value.device != target.device:
            return
    elif not isinstance(new, (bool, int, float)):
        return
    place = _place(passing, x, index)
    if place is None:
        return
    graph, dim, is_slice = passing.graph, place.dim, place.taken.is_slice
    shape = [*target.shape[:dim], *([place.taken.length] if is_slice else []), *target.shape[dim + 1 :]]
    if isinstance(value, Tensor):
        more = value.dim() - len(shape)  # of one element each
        new = graph.call_method("squeeze", (new, tuple(range(more)))) if more > 0 else new
        full = graph.call_method("expand", (graph.call_method("to", (new, target.dtype)), shape))
    else:
        full = graph.call_function(torch.full, (shape, new), {"dtype": target.dtype, "device": target.device})
    full = full if is_slice else graph.call_method("unsqueeze", (full, dim))
    graph.call_method("index_copy_", (x, dim, passing.indices(x, dim, place.taken), full))
    graph.erase_node(node)


def _rule_of(node: fx.Node) -> _Rule | None:
    name = plain(name_of(node))
    own = any(node.target == getattr(module, name, None) for module in (operator, torch, torch._refs))  # noqa: SLF001
    return _RULES.get(name) if own or node.op == "call_method" else None  # what users call "add" may need a number


_Rule = Callable[[_Passing, fx.Node], None]
_NAMES: Sequence[str] = ("add", "sub", "mul", "truediv", "floordiv", "mod", "eq", "ne", "lt", "le", "gt", "ge")
_RULES: dict[str, _Rule] = {
    **dict.fromkeys((*_NAMES, *(f"i{one}" for one in _NAMES[:6]), "where"), _elementwise),
    **dict.fromkeys(("div", "true_divide", "floor_divide", "remainder", "rsub"), _elementwise),
    **dict.fromkeys(("add_", "sub_", "mul_", "div_", "floor_divide_", "remainder_"), _elementwise),
    "arange": _arange,
    **dict.fromkeys(("full", "new_full"), _filled),
    **dict.fromkeys(("tensor", "as_tensor", "scalar_tensor"), _made),
    "narrow": _narrow,
    "select": _select,
    "getitem": _read,
    "setitem": _write,
}
