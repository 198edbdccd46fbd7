"""Repeats a call of a compiled model without torch's checks of the model.

Before each call of a compiled model Dynamo checks that nothing the model reads has changed, and looks up each of its
parameters: for 22 decoder blocks that takes as long as a small model's step on a GPU. A `Replay` does this once. What
it repeats is one graph, so a call that does more than run one is refused.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import UnsupportedError
from .snapshots import SIMPLE, changes, snapshot

_calls = threading.local()


def note_call(graph: Callable[..., Any], values: Sequence[Any], results: Sequence[Any]) -> None:
    """Let `make_replay` know of a call of a captured graph, if it waits for one in this thread."""
    noted = getattr(_calls, "noted", None)
    if noted is not None:
        noted.append(_Call(graph, values, results))


class _Call(NamedTuple):
    graph: Callable[..., Any]
    values: Sequence[Any]
    results: Sequence[Any]


def make_replay(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Replay:
    """Call a model that is compiled for a graph backend of qcore, and return a function that repeats this call.

    ``compiled``: what `torch.compile` returned, which has been called with such arguments before, so that it is
    compiled for them. The call is an ordinary one, whose result is `Replay.result`.

    Raises `UnsupportedError` if the call does anything but run one captured graph: if torch runs a part of it outside
    of the graph, if it changes an attribute of the model or of an argument (a cache that counts in Python), or if it
    returns tensors in objects that torch does not look into. It has been made then nevertheless.
    """
    roots = {"the model": _original(compiled), **{f"argument {name!r}": one for name, one in _named(args, kwargs)}}
    before = snapshot(roots)
    _calls.noted = noted = list[_Call]()
    try:
        result = compiled(*args, **kwargs)
    finally:
        _calls.noted = None
    changed = next(iter(changes(before, snapshot(roots))), None)
    del before
    if len(noted) != 1:
        raise UnsupportedError(
            f"a replay repeats one graph, and this call ran {len(noted)} of qcore's graph backends: torch runs code "
            f"between them or has given up compiling (TORCH_LOGS=graph_breaks,recompiles), or the model is compiled "
            f"for another backend."
        )
    if changed is not None:
        raise UnsupportedError(
            f"a replay would not change {changed}, as this call does. If it prepares something, as first calls do, try "
            f"again; a cache has to count in tensors, as a static cache of full attention does."
        )
    inputs, outputs = _Inputs(args, kwargs, noted[0].values), _Outputs(result, noted[0], (*args, *kwargs.values()))
    graph = noted.pop().graph
    inputs.check_lasting()
    return Replay(graph, inputs, outputs, result)


def _original(compiled: Any) -> Any:
    """What was compiled: a module, or the objects that a function reads."""
    while (inner := getattr(compiled, "_torchdynamo_orig_callable", None)) is not None:
        compiled = inner
    if isinstance(compiled, MethodType):
        return compiled.__self__
    if isinstance(compiled, FunctionType):
        return [cell.cell_contents for cell in compiled.__closure__ or ()]
    return getattr(compiled, "_orig_mod", compiled)


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[int | str, Any]]:
    return [*enumerate(args), *kwargs.items()]


class Replay:
    """Repeats a call of a compiled model with other tensors; made by `make_replay`.

    It is called as the model was: with tensors of the same shapes, dtypes and devices in the place of tensors, and all
    else the same. What the model reads besides (weights, buffers, caches) are the tensors of the recorded call, which
    it keeps alive; they may be written to in place. It computes no gradients. Raises `ValueError` for other arguments.

    Attribute ``result``: what the recorded call returned.
    """

    def __init__(self, graph: Callable[..., Any], inputs: _Inputs, outputs: _Outputs, result: Any) -> None:
        self.result = result
        self._graph, self._inputs, self._outputs = graph, inputs, outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on these tensors."""
        values = self._inputs.values(args, kwargs)
        with torch.no_grad():
            return self._outputs.filled(self._graph(*values))


class _Inputs:
    """The arguments of a graph, and which of them are arguments of the call."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Any]) -> None:
        places: dict[int, list[int]] = {}
        for place, value in enumerate(values):
            places.setdefault(id(value), []).append(place)
        self._count, self._names = len(args), tuple(kwargs)
        self._slots: list[tuple[int, Any, list[int]]] = []
        self._others: list[tuple[int, Any, tuple[int, ...]]] = []
        for i, (name, one) in enumerate(_named(args, kwargs)):
            if not isinstance(one, Tensor):
                self._others.append((i, one, _elements(one)))
            elif id(one) in places:
                self._slots.append((i, _form(one), places[id(one)]))
            else:
                raise UnsupportedError(
                    f"a replay passes tensors to the graph, which does not take argument {name!r}, a tensor of "
                    f"{_described(_form(one))}: leave it out, or pass what it decides as a number."
                )
        replaced = {place for _, _, found in self._slots for place in found}
        self._held = [None if place in replaced else value for place, value in enumerate(values)]

    def check_lasting(self) -> None:
        """Raise `UnsupportedError` for a tensor that torch made on the way to the graph: nothing else holds it."""
        refs = [weakref.ref(one) if isinstance(one, Tensor) else None for one in self._held]
        others = [None if isinstance(one, Tensor) else one for one in self._held]
        self._held = []
        gc.collect()
        self._held = [one if ref is None else ref() for ref, one in zip(refs, others, strict=True)]
        for ref, one in zip(refs, self._held, strict=True):
            if ref is not None and one is None:
                raise UnsupportedError(
                    "a replay passes the tensors of the call and of the model to the graph, and this call makes one of "
                    "its own before the graph: a number that changes from call to call, or code that is not captured."
                )

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments of the graph for those of another call."""
        if len(args) != self._count or len(kwargs) != len(self._names) or any(n not in kwargs for n in self._names):
            raise ValueError(
                f"the recorded call had {self._count} positional arguments and {sorted(self._names)}; this one has "
                f"{len(args)} and {sorted(kwargs)}. {_AGAIN}"
            )
        given, values = (*args, *[kwargs[name] for name in self._names]), [*self._held]
        for i, form, places in self._slots:
            one = given[i]
            if not isinstance(one, Tensor) or _form(one) != form:
                raise ValueError(f"argument {self._name(i)!r} has to be a tensor of {_described(form)}. {_AGAIN}")
            for place in places:
                values[place] = one
        for i, known, elements in self._others:
            one = given[i]
            if (one is not known and not _is_equal(one, known)) or (elements and _elements(one) != elements):
                raise ValueError(f"argument {self._name(i)!r} is another than in the recorded call. {_AGAIN}")
        return values

    def _name(self, i: int) -> int | str:
        return i if i < self._count else self._names[i - self._count]


_AGAIN = "Make another replay for such calls."


def _form(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device


def _described(form: Any) -> str:
    shape, dtype, device = form
    return f"shape {tuple(shape)}, {dtype}, on {device}"


def _is_equal(one: Any, known: Any) -> bool:
    """Whether two simple values are equal; of all others only the same object will do."""
    return isinstance(one, SIMPLE) and type(one) is type(known) and bool(one == known)


def _elements(one: Any) -> tuple[int, ...]:
    """The identities of what a list, tuple or dict holds, which can change while it stays the same object."""
    held = one.values() if isinstance(one, Mapping) else one if isinstance(one, (list, tuple)) else ()
    return tuple(map(id, held))


class _Outputs:
    """Where the results of a graph are in what the model returns."""

    def __init__(self, result: Any, call: _Call, given: Sequence[Any]) -> None:
        self._leaves, self._spec = tree_flatten(result)
        at = {id(value): position for position, value in enumerate(call.results) if isinstance(value, Tensor)}
        known = {*map(id, given), *map(id, call.values)}
        for leaf in self._leaves:
            if id(leaf) not in at and id(leaf) not in known and not isinstance(leaf, SIMPLE):
                made = "a tensor that it does not" if isinstance(leaf, Tensor) else f"an object of {type(leaf)}"
                raise UnsupportedError(f"a replay returns what the graph computes, and this call returns {made}.")
        self._places = [(i, at[id(leaf)]) for i, leaf in enumerate(self._leaves) if id(leaf) in at]

    def filled(self, results: Sequence[Any]) -> Any:
        """What the model returns for these results of the graph."""
        leaves = [*self._leaves]
        for i, position in self._places:
            leaves[i] = results[position]
        return tree_unflatten(leaves, self._spec)
