"""The errors qcore raises. Each text says what, where, why, and what to do, in two to four short lines."""

from __future__ import annotations

import difflib
import heapq
import reprlib
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "ConformanceError",
    "FormatError",
    "PluginError",
    "QcoreError",
    "QcoreWarning",
    "UnsupportedError",
]


class QcoreError(Exception):
    """Base of every error that qcore raises on purpose."""


class FormatError(QcoreError, ValueError):
    """Bytes, shapes, dtypes or a text that do not mean a valid quantized tensor, format or scheme."""


class UnsupportedError(QcoreError, RuntimeError):
    """No kernel can serve a request under the settings in force; the text holds the decision table."""


class PluginError(QcoreError, RuntimeError):
    """A plugin that the user named is broken; the original exception is chained."""


class CheckpointError(QcoreError, ValueError):
    """A checkpoint file is truncated, inconsistent or hostile; the text names the file and the tensor."""


class ConformanceError(QcoreError, AssertionError):
    """A kernel broke its contract; the text holds the case and the numbers."""


class QcoreWarning(UserWarning):
    """Something is wrong that did not stop qcore: a broken plugin, an unknown name, a slow path."""


_LONGEST_WORD = 100
_MOST_NAMES = 500
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlong = 40
_SHORT.maxlevel = 3


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A closing hint for an error about an unknown name: ``" Did you mean 'x'?"``, or an empty string.

    Takes milliseconds at most: a long word is cut, and among very many names those of about its length are compared.
    """
    word = word[:_LONGEST_WORD]
    # What is less than 3/7 or more than 7/3 as long cannot be similar enough.
    able = (name for name in known if 3 * len(word) <= 7 * len(name) <= 17 * len(word))
    names = heapq.nsmallest(_MOST_NAMES, able, key=lambda name: abs(len(name) - len(word)))
    close = difflib.get_close_matches(word, names, n=1) or difflib.get_close_matches(word.lower(), names, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def quoted(value: object) -> str:
    """The ``repr`` of a value that comes from a file, cut to a sane length, in a time that does not grow with it."""
    try:
        return _SHORT.repr(value)[:200]
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return f"<{type(value).__name__}>"


def clipped(text: str, length: int) -> str:
    """A text, or its start and how long it is."""
    return text if len(text) <= length else f"{text[:length]}... ({len(text):,} characters)"
