"""Progress of long operations: the values of ``progress``, and the hook through which the top floor draws a bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from ..errors import UnsupportedError

Progress = Callable[[int, int, str], object]
"""Called with (done, total, name of the current item)."""

ProgressChoice = Progress | bool | None
"""None: a bar if standard error is a terminal; True: a bar anywhere; False: nothing; or a function to call."""

_Bar = Callable[[str, str, bool], AbstractContextManager[Progress]]


def _silent(_done: int, _total: int, _name: str) -> None:
    """Report nothing."""


def _no_bar(_title: str, _unit: str, _forced: bool) -> AbstractContextManager[Progress]:
    return contextlib.nullcontext(_silent)


_bar: _Bar = _no_bar


def install_bar(bar: _Bar) -> None:
    """Set the function that draws bars, called with title, unit and whether to draw without a terminal, too."""
    global _bar  # noqa: PLW0603 - one hook for the process: bars are drawn by a floor that this one cannot import
    _bar = bar


def shown(progress: ProgressChoice, title: str, unit: str) -> AbstractContextManager[Progress]:
    """Return a context manager that yields the function to report progress to, and draws the bar, if any, meanwhile.

    ``title``: the activity; ``unit``: ``bytes``, or the plural of the counted items. Raises `UnsupportedError` for any
    other ``progress``.
    """
    if progress is False:
        return contextlib.nullcontext(_silent)
    if progress is None or progress is True:
        return _bar(title, unit, progress is True)
    if not callable(progress):
        raise UnsupportedError(f"progress is {progress!r}; it must be None, True, False or a function.")
    return contextlib.nullcontext(progress)
