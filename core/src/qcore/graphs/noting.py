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
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import torch

from .snapshots import changes, snapshot

_calls = threading.local()


class Globals:
    """The global variables that a function's code names, with the members of modules and classes that it names there.

    Holds a snapshot of their values at construction.
    """

    def __init__(self, frame: FrameType) -> None:
        code = frame.f_code
        self._names, self._known = code.co_names, frame.f_globals
        self._words = {*code.co_names, *(one for one in code.co_consts if isinstance(one, str))}
        self._before = snapshot(self._roots())

    def changed(self) -> str:
        """The path of a value that has changed since; empty if none has."""
        return next(iter(changes(self._before, snapshot(self._roots()))), "")

    def _roots(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        passed: list[Any] = []
        queue = [(name, self._known[name]) for name in self._names if name in self._known]
        while queue:
            path, one = queue.pop()
            if not isinstance(one, (ModuleType, type)):
                found[path] = one
            elif not any(one is other for other in passed):
                passed.append(one)
                queue += [(f"{path}.{word}", vars(one)[word]) for word in self._words if word in vars(one)]
        return {path: one for path, one in found.items() if not path.startswith(_GRAPH)}


class Note(NamedTuple):
    """**Fields:** ``graph``; its arguments and results; ``beside``: what else the call does, empty if nothing.

    ``globals``: those of the one function that torch has made of the call; None if there is no such function.
    """

    graph: Callable[..., Any]
    values: Sequence[Any]
    results: Sequence[Any]
    beside: str
    globals: Globals | None


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


def _beside(frame: FrameType | None) -> tuple[str, Globals | None]:
    """What the frames above the graph do besides calling it, and the globals of the function that torch has made."""
    made: list[FrameType] = []
    while frame is not None and frame is not _calls.until:
        code = frame.f_code
        if any(name.startswith(_GRAPH) for name in code.co_names):
            made.append(frame)
        elif code.co_filename not in _TORCH or code.co_name == "inner":  # which runs hooks
            return f"{code.co_name} in {Path(code.co_filename).name} calls it, which torch has not compiled", None
        frame = frame.f_back
    if len(made) != 1:
        return f"it is called by {len(made)} functions that torch has made, where one is expected", None
    code = made[0].f_code
    if any(name.startswith(_RANDOM) for name in code.co_names):
        return "it takes random numbers of Python", None
    return _of_code(code), Globals(made[0])


def _of_code(code: CodeType) -> str:
    if code.co_name.startswith("torch_dynamo_resume_in"):
        return "torch runs code before the graph"
    if _SETTER in (*code.co_names, *code.co_consts) and "cell_contents" in code.co_names:
        return "it writes attributes of what a closure holds"
    owners = _Owners()
    for step in dis.get_instructions(code):
        if step.opname in _WRITES:
            return f"it writes {step.argval!r} ({step.opname})"
        if str(step.argval).startswith("__resume_at"):
            return "torch runs code after the graph"
        if step.opname == "STORE_ATTR" and not owners.is_top():
            return f"it writes {step.argval!r} ({step.opname})"
        owners.follow(step)
    return ""


class _Owners:
    """Simulates the stack of a function: which slots hold global objects or attributes of such.

    Takes instructions in order, and keeps the stack at the targets of jumps.
    """

    def __init__(self) -> None:
        self._stack: list[bool] = []
        self._locals: dict[Any, bool] = {}
        self._at: dict[int, list[bool]] = {}
        self._left = False  # whether the last instruction goes on elsewhere

    def is_top(self) -> bool:
        return bool(self._stack) and self._stack[-1]

    def follow(self, step: dis.Instruction) -> None:
        """Apply an instruction; results of instructions that are not listed count as other objects."""
        jumped = self._at.get(step.offset)
        if jumped is not None:
            both = zip(jumped, self._stack, strict=False)
            self._stack = jumped if self._left else [one and other for one, other in both]
        if step.opcode in _JUMPS:
            self._at[step.argval] = self._after(step, jump=True)
        self._left = step.opname.startswith(_LEAVING)
        self._stack = self._after(step, jump=False)

    def _after(self, step: dis.Instruction, *, jump: bool) -> list[bool]:
        top, stack = self.is_top(), [*self._stack]
        if step.opname in _IDLE:
            return stack
        if step.opname == "STORE_FAST":
            self._locals[step.argval] = top
        elif step.opname.startswith("STORE_FAST_"):  # two in one, since Python 3.13
            self._locals.clear()
        if step.opname == "SWAP" and step.arg and step.arg <= len(stack):
            stack[-1], stack[-step.arg] = stack[-step.arg], stack[-1]
            return stack
        depth = max(len(stack) + dis.stack_effect(step.opcode, step.arg, jump=jump), 0)
        stack = [*stack[:depth], *[False] * (depth - len(stack))]
        if stack and (not step.opname.startswith(_POPS) or step.opname.endswith("_LOAD_FAST")):
            known = step.opname in _LOCAL and self._locals.get(step.argval, False)
            kept = top and (step.opname in ("LOAD_ATTR", "DUP_TOP") or (step.opname == "COPY" and step.arg == 1))
            stack[-1] = step.opname == "LOAD_GLOBAL" or known or kept
        return stack


_IDLE = frozenset(("EXTENDED_ARG", "NOP", "RESUME", "CACHE", "KW_NAMES"))
"""Instructions that leave the stack as it is: EXTENDED_ARG stands before any whose argument exceeds a byte."""
_POPS = ("STORE", "POP", "DELETE", "FOR", "END", "JUMP")
"""How the names of instructions begin that uncover what lies below; of others the top is a result."""
_LOCAL = frozenset(("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"))
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_LEAVING = ("JUMP_BACKWARD", "JUMP_FORWARD", "JUMP_ABSOLUTE", "RETURN", "RAISE", "RERAISE")
_INSIDE = Path(torch.__file__).parent
_TORCH = frozenset(map(str, (_INSIDE / "_dynamo" / "eval_frame.py", _INSIDE / "nn" / "modules" / "module.py")))
"""Files whose functions only pass calls on."""
_WRITES = frozenset(
    f"{verb}_{what}" for verb in ("STORE", "DELETE") for what in ("ATTR", "SUBSCR", "SLICE", "GLOBAL", "DEREF", "NAME")
) - {"STORE_ATTR"}
_SETTER = "object_setattr_ignore_descriptor"
"""By which torch 2.13 writes attributes."""
_GRAPH = "__compiled_fn"
"""How the names of captured graphs begin."""
_RANDOM = "__gen_rand_values"
"""How the names of functions begin that call `random` before the graph."""
