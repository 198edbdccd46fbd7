"""Tells what torch runs behind a graph that it captures: nothing, or code that Dynamo could not record.

Dynamo cuts a function at a graph break and runs what it could not record between two graphs. At a break in a loop it
records nothing of the function around it, only those called from there. Such code may read what graphs have written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import torch

_SHOWN = "torch.compile(model, fullgraph=True) says what to change."
_EAGER = ("eager_on_recompile", "eager_then_compile")
TORCH = str(Path(torch.__file__).parent) + os.sep
"""What paths of torch's own files begin with."""


def why_broken() -> str:
    """Why torch runs code behind the graph that Dynamo is compiling, a sentence; "" if the function ends with it."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        reason = InstructionTranslator.current_tx().output.compile_subgraph_reason
        is_broken = reason.graph_break
    except AttributeError:  # a backend called by hand
        return ""
    if not is_broken:
        return ""
    line = reason.user_stack[-1].line if reason.user_stack else ""
    return f"there is a graph break{f' at {line!r}' if line else ''}. {_SHOWN}"


def why_unrecorded() -> str:
    """Why torch runs code behind the call of a graph, a sentence: a function around it is not recorded; else "".

    Of each call, as Dynamo shares what it has compiled: a model may be called alone, and in another one that breaks.
    """
    caller = next(_callers(), None)
    return "" if caller is None else f"a graph break within {caller.co_name!r} leaves that to torch. {_SHOWN}"


def why_eager() -> str:
    """Why torch may run the next call without its backend, a sentence; "" if it may not."""
    stance = getattr(getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None), "stance", "")
    if stance not in _EAGER:
        return ""
    return f"its stance is {stance!r}. With 'default' or 'fail_on_recompile' what models write stays on the device."


def _callers() -> Iterator[CodeType]:
    """Functions around the one that calls a graph that run as they were written, up to torch.compile's own."""
    from torch._dynamo import convert_frame, eval_frame

    around, recorded = iter(_stack()), getattr(convert_frame, "output_codes", ())
    if not any(code in recorded for code in around):  # consumes what is above it: the graph is called by hand
        return
    for code in around:
        if code.co_filename == eval_frame.__file__:
            return
        if not code.co_filename.startswith(TORCH) and code not in recorded:
            yield code


def _stack() -> Iterator[CodeType]:
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - public in all but name
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back
