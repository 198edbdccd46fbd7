"""Tells when torch may run a compiled function without its backend: once it has compiled it as often as it may.

Torch compiles a function anew for arguments that fit nothing it has compiled, up to ``torch._dynamo.config``'s
``recompile_limit``. From then on it runs such calls in Python, without a word to the backend. They read host memory,
which a backend that defers writes has to keep current for them: before the first of them, as none announces itself.
"""

from __future__ import annotations

import weakref
from types import CodeType
from typing import Any

import torch

# ruff: noqa: SLF001 - Dynamo counts what it has compiled under private names only

_reached: weakref.WeakSet[Limit] = weakref.WeakSet()


class Limit:
    """The limit of the function that Dynamo compiles at construction; lives as long as what it compiles."""

    def __init__(self) -> None:
        from torch._dynamo import config
        from torch._guards import CompileContext

        code, one_graph = _compiling()
        number, self._name = CompileContext.current_compile_id(), "" if code is None else code.co_name
        # With fullgraph torch raises instead. Weakly, as torch frees compiled code with its function.
        self._code = None if code is None or one_graph else weakref.ref(code)
        self._region = getattr(_frames(), "get_eval_frame_isolate_recompiles_id", lambda: -1)()
        self._now: int = config.recompile_limit
        self._own: int | None = None
        self._called = False
        made = 0 if number is None or number.frame_compile_id is None else number.frame_compile_id + 1
        self._is_last = made >= config.accumulated_recompile_limit

    def why_near(self) -> str:
        """Why torch may run a function without its backend: this one, called just now, or another before; or "".

        That lasts until ``torch._dynamo.reset``: a larger limit does not bring back what torch has given up.
        """
        code = None if self._code is None else self._code()
        if code is not None and self not in _reached and self._is_reached(code):
            _reached.add(self)
        return _why(self._name) if _reached else ""

    def _is_reached(self, code: CodeType) -> bool:
        from torch._dynamo import config

        now: int = config.recompile_limit
        if not self._called:  # torch.compile's own recompile_limit holds while it compiles, and not in this call
            self._called, self._own = True, self._now if self._now != now else None
        if self._is_last or len(_entries(code, self._region)) >= (self._own or now):
            return not config.fail_on_recompile_limit_hit
        return False


def _why(name: str) -> str:
    return (
        f"it has compiled {name!r} or another function as often as its recompile_limit allows, and may run it without "
        f"the backend from now on, until torch._dynamo.reset(). Raise torch._dynamo.config.recompile_limit before the "
        f"first call, and pass numbers as tensors."
    )


def _compiling() -> tuple[CodeType | None, bool]:
    """The function that Dynamo is compiling, and whether it has to be one graph; None if it compiles none."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        found = InstructionTranslator.current_tx().output.root_tx
        return found.f_code, bool(getattr(found, "one_graph", False))
    except AttributeError:  # a backend called by hand
        return None, False


def _entries(code: CodeType, region: int) -> list[object]:
    """The entries of a function in Dynamo's cache: what it has compiled and not dropped."""
    frames = _frames()
    of_region = getattr(frames, "_get_cache_entries_for_region", None)
    found: list[object] = frames._debug_get_cache_entry_list(code) if of_region is None else of_region(code, region)
    return found


def _frames() -> Any:
    return torch._C._dynamo.eval_frame
