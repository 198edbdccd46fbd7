"""The exceptions of qcore. Each message says what failed, where, why and what to do, in two to four short lines."""

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
    """Bytes, shapes, dtypes or text that do not describe a valid quantized tensor, format or scheme."""


class UnsupportedError(QcoreError, RuntimeError):
    """No kernel supports a request under the current settings; the message contains the decision table."""


class PluginError(QcoreError, RuntimeError):
    """A plugin that the user named is broken; the original exception is chained."""


class CheckpointError(QcoreError, ValueError):
    """A checkpoint file is truncated, inconsistent or hostile; the message names the file and the tensor."""


class ConformanceError(QcoreError, AssertionError):
    """A kernel broke its contract; the message contains the case and the numbers."""


class QcoreWarning(UserWarning):
    """A problem that qcore can work around: a broken plugin, an unknown name, a slow path."""


_MAX_WORD = 100
_MAX_NAMES = 500
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlong = 40
_SHORT.maxlevel = 3


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion to append to an error about an unknown name: ``" Did you mean 'x'?"``, or an empty string.

    Takes milliseconds at most: a long word is cut, and of very many names only those of similar length are compared.
    """
    word = word[:_MAX_WORD]
    # difflib's default cutoff of 0.6 rules out names shorter than 3/7 or longer than 7/3 of the word.
    candidates = (name for name in known if 3 * len(word) <= 7 * len(name) <= 17 * len(word))
    names = heapq.nsmallest(_MAX_NAMES, candidates, key=lambda name: abs(len(name) - len(word)))
    close = difflib.get_close_matches(word, names, n=1) or difflib.get_close_matches(word.lower(), names, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def quoted(value: object) -> str:
    """The ``repr`` of a value read from a file, cut to at most 200 characters in bounded time."""
    try:
        return _SHORT.repr(value)[:200]
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return f"<{type(value).__name__}>"


def dtype_name(dtype: object) -> str:
    """The name of a torch dtype without its module: ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def message_of(error: BaseException) -> str:
    """The message of a third party's exception, whose ``__str__`` may raise."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - it may raise anything
        return "(without words)"


def first_line(error: BaseException) -> str:
    """The first line of an exception's message; its type if it has no message."""
    return next(iter(message_of(error).splitlines()), "") or type(error).__name__


def clipped(text: str, length: int) -> str:
    """The text, or its first ``length`` characters and its total length."""
    return text if len(text) <= length else f"{text[:length]}... ({len(text):,} characters)"
