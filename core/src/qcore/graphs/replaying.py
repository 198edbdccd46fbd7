"""Repeats a call of a compiled model without torch's checks of the model.

Before each call of a compiled model Dynamo checks that nothing the model reads has changed, and looks up each of its
parameters: for 22 decoder blocks that takes as long as a small model's step on a GPU. A `Replay` does this once. What
it repeats is one graph, so a call that does more than run one is refused.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import UnsupportedError
from .noting import Note, noted
from .snapshots import SIMPLE, Contents, changes, snapshot

# ruff: noqa: SLF001 - the public function looks at one device, by name
_any_autocast = torch._C._is_any_autocast_enabled


def make_replay(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Replay:
    """Call a model that is compiled for a graph backend of qcore, and return a function that repeats this call.

    ``compiled``: a module that `torch.compile` returned, or a compiled method of one, called with such arguments
    before, so that it is compiled for them. The call is an ordinary one, whose result is `Replay.result`. Call it under
    `torch.no_grad` or `torch.inference_mode`, without autocast.

    Raises `UnsupportedError`, with the call made, if it was not one captured graph that did it all: torch ran code
    before, after or in place of it, it changed an attribute of the model or of an argument (a cache that counts in
    Python), or it returned something else than what the graph computes.
    """
    if torch.is_grad_enabled() or _any_autocast():
        raise UnsupportedError("a replay computes no gradients and has no autocast: make it under torch.no_grad().")
    model = _model_of(compiled)
    roots = {"the model": model, **{f"argument {name!r}": one for name, one in _named(args, kwargs)}}
    before = snapshot(roots)
    with noted() as notes:
        result = compiled(*args, **kwargs)
    after = snapshot(roots)
    _check_unchanged(before, after, roots)
    del before, after
    _check_alone(notes)
    inputs, outputs = _Inputs(model, args, kwargs, notes[0].values), _Outputs(result, notes[0], (args, kwargs))
    graph = notes.pop().graph
    inputs.check_lasting(graph._scalars)  # type: ignore[attr-defined]
    return Replay(graph, inputs, outputs, result)


def _model_of(compiled: Any) -> nn.Module:
    """The module that was compiled, or whose method was."""
    found = getattr(compiled, "_orig_mod", None)
    while found is None and (inner := getattr(compiled, "_torchdynamo_orig_callable", None)) is not None:
        found = inner.__self__ if isinstance(inner, MethodType) else None
        compiled = inner
    if not isinstance(found, nn.Module):
        raise UnsupportedError("a replay repeats calls of what torch.compile made of a module, or of a method of one.")
    return found


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[int | str, Any]]:
    return [*enumerate(args), *kwargs.items()]


def _check_unchanged(before: Mapping[str, Any], after: Mapping[str, Any], roots: Mapping[str, Any]) -> None:
    changed = next(iter(changes(before, after)), None)
    if changed is not None:
        raise UnsupportedError(
            f"a replay would not change {changed}, as this call does. If it prepares something, as first calls do, try "
            f"again; a cache has to count in tensors, as a static cache of full attention does."
        )
    given = {id(one) for one in roots.values() if isinstance(one, Tensor)}
    kept = next((path for path, one in after.items() if id(one) in given and path not in roots), None)
    if kept is not None:
        raise UnsupportedError(f"a replay takes other tensors, and {kept} is an argument of this call: pass a copy.")


def _check_alone(notes: Sequence[Note]) -> None:
    if not notes:
        raise UnsupportedError(
            "the model is not compiled for a graph backend of qcore, or torch has given up compiling it "
            "(TORCH_LOGS=recompiles,graph_breaks says why)."
        )
    beside = notes[0].beside if len(notes) == 1 else f"this call ran {len(notes)} graphs"
    if not beside and notes[0].globals is not None and (changed := notes[0].globals.changed()):
        beside = f"it changes {changed}"
    if beside:
        raise UnsupportedError(
            f"a replay repeats one graph, and that is not all this call does: {beside}. TORCH_LOGS=graph_breaks says "
            f"where torch stops capturing."
        )
    refused = next((report.refused for report in notes[0].graph._record.reports if report.refused), "")  # type: ignore[attr-defined]
    if refused:
        raise UnsupportedError(f"the model ran in torch, and a replay would go on doing so: {refused}")


class Replay:
    """Repeats a call of a compiled model with other tensors; made by `make_replay`.

    It is called as the model was: with tensors of the same shapes, strides, dtypes and devices in the place of
    tensors, which share no memory with each other, and all else the same. Parameters, buffers and caches are those of
    the recorded call, which may be written to in place and are kept alive. It computes no gradients.

    Raises `ValueError` for other arguments, for objects among them that hold others than before, if a parameter or
    buffer or the mode of the model was replaced, under autocast and with another default dtype. Not checked, other than
    by Dynamo: numbers among the model's attributes and globals, modes of its submodules, hooks that were added.

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

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        raise TypeError("a replay belongs to one model and cannot be copied; make another one.")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a replay belongs to one process and cannot be pickled.")


class _Inputs:
    """The arguments of a graph, and which of them are arguments of the call of the model."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Any]) -> None:
        places: dict[int, list[int]] = {}
        for place, value in enumerate(values):
            places.setdefault(id(value), []).append(place)
        self._count, self._names = len(args), tuple(kwargs)
        self._slots: list[tuple[int, Any, int]] = []
        self._others: list[tuple[int, Any, Contents | None]] = []
        for i, (name, one) in enumerate(_named(args, kwargs)):
            if not isinstance(one, Tensor):
                self._others.append((i, one, None if isinstance(one, SIMPLE) else Contents(one)))
                continue
            found = places.get(id(one), [])
            if type(one) is not Tensor or one.requires_grad or len(found) != 1:
                raise UnsupportedError(
                    f"a replay passes plain tensors to the graph, each to one place, and argument {name!r}, a tensor "
                    f"of {_described(_form(one))}, has {len(found)}: leave out what the graph does not read."
                )
            self._slots.append((i, _form(one), found[0]))
        replaced = {place for _, _, place in self._slots}
        self._held = [None if place in replaced else value for place, value in enumerate(values)]
        self._memories = {_memory(one) for one in self._held if isinstance(one, Tensor)}
        self._check_apart([values[place] for _, _, place in self._slots])
        self._state = _ModelState(model, self._held)

    def check_lasting(self, floats: Collection[int]) -> None:
        """Raise `UnsupportedError` for a tensor that torch made on the way to the graph: nothing else holds it.

        Except for tensors of ``floats``, positions at which torch passes a float: once models differ in one, their
        head size or epsilon, it is no constant of the graph, and still one of each model.
        """
        kept = [i in floats or not isinstance(one, Tensor) for i, one in enumerate(self._held)]
        refs = [None if keep else weakref.ref(one) for one, keep in zip(self._held, kept, strict=True)]
        others = [one if keep else None for one, keep in zip(self._held, kept, strict=True)]
        self._held = []
        gc.collect()
        self._held = [one if ref is None else ref() for ref, one in zip(refs, others, strict=True)]
        for ref, one in zip(refs, self._held, strict=True):
            if ref is not None and one is None:
                raise UnsupportedError(
                    "a replay passes the tensors of the call and of the model to the graph, and this call makes one of "
                    "its own before the graph: a number that changes from call to call, for instance."
                )

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments of the graph for those of another call."""
        if len(args) != self._count or len(kwargs) != len(self._names) or any(n not in kwargs for n in self._names):
            raise ValueError(
                f"the recorded call had {self._count} positional arguments and {sorted(self._names)}; this one has "
                f"{len(args)} and {sorted(kwargs)}. {_AGAIN}"
            )
        self._state.check()
        given, values = (*args, *[kwargs[name] for name in self._names]), [*self._held]
        for i, form, place in self._slots:
            one = given[i]
            if type(one) is not Tensor or one.requires_grad or _form(one) != form:
                raise ValueError(f"argument {self._name(i)!r} has to be a plain tensor of {_described(form)}. {_AGAIN}")
            values[place] = one
        for i, known, contents in self._others:
            if given[i] is not known and not _is_equal(given[i], known):
                raise ValueError(f"argument {self._name(i)!r} is another than in the recorded call. {_AGAIN}")
            if contents is not None and not contents.is_same():
                raise ValueError(f"argument {self._name(i)!r} holds others than in the recorded call. {_AGAIN}")
        self._check_apart([given[i] for i, _, _ in self._slots])
        return values

    def _check_apart(self, tensors: Sequence[Tensor]) -> None:
        """Raise `ValueError` if tensors share memory with each other or with what the graph holds: it may write."""
        memories = {_memory(one) for one in tensors}
        if len(memories) < len(tensors) or not memories.isdisjoint(self._memories):
            raise ValueError("tensors of a replay may not share memory with each other or with the model: pass copies.")

    def _name(self, i: int) -> int | str:
        return i if i < self._count else self._names[i - self._count]


class _ModelState:
    """The parameters and buffers of a model that a graph takes, and the modes in which it was called."""

    def __init__(self, model: nn.Module, held: Sequence[Any]) -> None:
        own = {id(one) for one in held if isinstance(one, Tensor)}
        tables: list[dict[str, Any]] = []
        for module in model.modules():
            tables += [module._parameters, module._buffers]
        self._places = [(table, name) for table in tables for name, one in table.items() if id(one) in own]
        self._members: list[Any] = [table[name] for table, name in self._places]
        self._model, self._training, self._dtype = model, model.training, torch.get_default_dtype()

    def check(self) -> None:
        """Raise `ValueError` if they are others now."""
        now = [table.get(name) for table, name in self._places]
        if not all(map(operator.is_, now, self._members)) or self._model.training != self._training:
            raise ValueError(f"a parameter or buffer of the model was replaced, or its mode. {_AGAIN}")
        if _any_autocast() or torch.get_default_dtype() != self._dtype:
            raise ValueError("replays have no autocast, and the default dtype of the recorded call.")


_AGAIN = "Make another replay for such calls."


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _form(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device


def _described(form: Any) -> str:
    shape, strides, offset, dtype, device = form
    return f"shape {tuple(shape)}, strides {strides}, {dtype}, on {device}, at {offset} of its memory"


def _is_equal(one: Any, known: Any) -> bool:
    """Whether two simple values are equal; of all others only the same object will do."""
    return isinstance(one, SIMPLE) and type(one) is type(known) and repr(one) == repr(known)


class _Outputs:
    """Where the results of a graph are in what the model returns."""

    def __init__(self, result: Any, note: Note, arguments: tuple[Sequence[Any], Mapping[str, Any]]) -> None:
        leaves, self._spec = tree_flatten(result)
        at = {id(value): position for position, value in enumerate(note.results) if isinstance(value, Tensor)}
        args, kwargs = arguments
        given = {id(one): one for one in (*args, *kwargs.values())}
        known = {i for i, one in given.items() if not isinstance(one, (Tensor, *SIMPLE))}
        known |= {id(one) for one in note.values if isinstance(one, Tensor)} - given.keys()
        for leaf in leaves:
            if id(leaf) not in at and id(leaf) not in known and leaf is not None:
                raise UnsupportedError(
                    f"a replay returns what the graph computes, and this call returns an object of {type(leaf)} "
                    f"that it does not."
                )
        if any(value is not None and not isinstance(value, Tensor) for value in note.results):
            raise UnsupportedError("a replay returns tensors, and the graph of this call computes numbers as well.")
        self._places = [(i, at[id(leaf)]) for i, leaf in enumerate(leaves) if id(leaf) in at]
        self._leaves = [None if id(leaf) in at else leaf for leaf in leaves]

    def filled(self, results: Sequence[Any]) -> Any:
        """What the model returns for these results of the graph."""
        leaves = [*self._leaves]
        for i, position in self._places:
            leaves[i] = results[position]
        return tree_unflatten(leaves, self._spec)
