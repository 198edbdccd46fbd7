"""The errors qcore raises. Each text says what, where, why, and what to do, in two to four short lines."""

from __future__ import annotations

import difflib
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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A closing hint for an error about an unknown name: ``" Did you mean 'x'?"``, or an empty string."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1) or difflib.get_close_matches(word.lower(), names, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
