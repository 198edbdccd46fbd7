"""Libraries that qcore works with but never imports first: what it adds to them once a program has imported them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_waiting: dict[str, Callable[[], None]] = {}
_followers: list[Callable[[Any], None]] = []
_readers: list[Callable[[Any], bool]] = []


def when_imported(module: str, action: Callable[[], None]) -> None:
    """Have `meet` run ``action`` once if ``module`` is imported by then."""
    _waiting[module] = action


def meet() -> None:
    """Run the actions whose modules the program has imported by now."""
    for module in [name for name in _waiting if name in sys.modules]:
        action = _waiting.pop(module, None)
        if action is not None:  # no other thread was faster
            action()


def follow(action: Callable[[Any], None]) -> None:
    """Have `changed` call ``action`` with each model."""
    _followers.append(action)


def changed(model: Any) -> None:
    """Tell the libraries that layers of ``model`` were replaced by quantized ones."""
    for action in _followers:
        action(model)


def read(is_read: Callable[[Any], bool]) -> None:
    """Have `saving` call ``is_read`` with each model: it prepares the model, and says whether its library loads it."""
    _readers.append(is_read)


def saving(model: Any) -> bool:
    """Tell the libraries that `qcore.save` writes ``model``; returns whether one of them may load what it writes."""
    meet()
    answers = [is_read(model) for is_read in _readers]  # each prepares the model
    return any(answers)
