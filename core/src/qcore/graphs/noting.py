"""Notes the captured graph that a call of a compiled model runs, and whether that is all it does.

What Dynamo makes of a function is a function of its own: it looks up the arguments of the graph, calls it, and builds
the results. That function, as it stands in the frames above the graph, says whether it also goes on in Python.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType, NoneType
from typing import Any, NamedTuple

import torch

_calls = threading.local()


class Write(NamedTuple):
    """An attribute that a call writes: its name, and what objects that may be meant held under it before."""

    name: str
    before: Sequence[tuple[Any, Any]]

    def changed(self) -> bool:
        """Whether it may have changed something: it has not if each of them holds the plain value of before."""
        same = [isinstance(value, _PLAIN) and getattr(owner, self.name, _NONE) is value for owner, value in self.before]
        return not same or not all(same)


class Note(NamedTuple):
    """**Fields:** ``graph``; its arguments and results; ``beside``: what else the call does, empty if nothing.

    ``writes``: attributes that it writes after the graph.
    """

    graph: Callable[..., Any]
    values: Sequence[Any]
    results: Sequence[Any]
    beside: str
    writes: Sequence[Write]


def note_call(graph: Callable[..., Any], values: Sequence[Any], results: Sequence[Any]) -> None:
    """Note a call of a captured graph, if `noted` waits for one in this thread."""
    notes = getattr(_calls, "notes", None)
    if notes is not None:
        notes.append(Note(graph, values, results, *_beside(sys._getframe(2))))  # noqa: SLF001 - there is no other way


@contextlib.contextmanager
def noted() -> Iterator[list[Note]]:
    """The calls of captured graphs that this thread makes meanwhile."""
    notes: list[Note] = []
    before, _calls.notes = getattr(_calls, "notes", None), notes
    _calls.until = sys._getframe(2)  # noqa: SLF001
    try:
        yield notes
    finally:
        _calls.notes, _calls.until = before, None


def _beside(frame: FrameType | None) -> tuple[str, Sequence[Write]]:
    """What the frames above the graph do besides calling it, and the attributes that they write."""
    made: list[FrameType] = []
    while frame is not None and frame is not _calls.until:
        code = frame.f_code
        if any(name.startswith("__compiled_fn") for name in code.co_names):
            made.append(frame)
        elif code.co_filename not in _TORCH or code.co_name == "inner":  # which runs hooks
            return f"{code.co_name} in {Path(code.co_filename).name} calls it, which torch has not compiled", ()
        frame = frame.f_back
    if len(made) != 1:
        return f"it is called by {len(made)} functions that torch has made, where one is expected", ()
    return _of_frame(made[0])


def _of_frame(frame: FrameType) -> tuple[str, Sequence[Write]]:
    code = frame.f_code
    if code.co_name.startswith("torch_dynamo_resume_in"):
        return "torch runs code before the graph", ()
    stored: list[str] = []
    given: list[str] = []
    by_function = False
    for step in dis.get_instructions(code):
        if step.opname in _WRITES:
            return f"it writes {step.argval!r} ({step.opname})", ()
        if str(step.argval).startswith("__resume_at"):
            return "torch runs code after the graph", ()
        by_function = by_function or step.argval == _SETTER
        if step.opname == "STORE_ATTR":
            stored.append(step.argval)
        elif by_function and step.opname == "LOAD_CONST" and isinstance(step.argval, str):
            given.append(step.argval)
    writes = [Write(name, before) for name, before in zip(stored + given, _before(frame, stored + given), strict=True)]
    # Strings may be other than names of attributes, and those of results that the call makes.
    return "", [write for i, write in enumerate(writes) if write.before or i < len(stored)]


def _before(frame: FrameType, names: Sequence[str]) -> Iterator[Sequence[tuple[Any, Any]]]:
    owners = _owners(frame)
    return ([(one, vars(one)[name]) for one in owners if name in vars(one)] for name in names)


def _owners(frame: FrameType) -> list[Any]:
    """The objects with attributes that a function finds by name in its own module or in another."""
    names, known = frame.f_code.co_names, frame.f_globals
    found = {id(one): one for name in names if (one := known.get(name)) is not None}
    for module in [one for one in found.values() if isinstance(one, ModuleType)]:
        inner = (vars(module).get(name) for name in names)
        found.update({id(one): one for one in inner if one is not None})
    return [one for one in found.values() if hasattr(one, "__dict__") and not isinstance(one, ModuleType | type)]


_INSIDE = Path(torch.__file__).parent
_TORCH = frozenset(map(str, (_INSIDE / "_dynamo" / "eval_frame.py", _INSIDE / "nn" / "modules" / "module.py")))
"""Files whose functions only pass calls on."""
_WRITES = frozenset(
    f"{verb}_{what}" for verb in ("STORE", "DELETE") for what in ("ATTR", "SUBSCR", "SLICE", "GLOBAL", "DEREF", "NAME")
) - {"STORE_ATTR"}
_SETTER = "object_setattr_ignore_descriptor"
"""By which torch 2.13 writes attributes; the name is a constant of the code."""
_PLAIN = (bool, int, float, str, NoneType)
_NONE = object()
