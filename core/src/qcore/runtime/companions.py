"""Libraries that qcore works with but never imports first: what it adds to them once a program has imported them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_waiting: dict[str, Callable[[], None]] = {}
_on_changed: list[Callable[[Any], None]] = []
_on_saving: list[Callable[[Any], bool]] = []


def when_imported(module: str, action: Callable[[], None]) -> None:
    """Have `run_pending` run ``action`` once if ``module`` is imported by then."""
    _waiting[module] = action


def run_pending() -> None:
    """Run the actions whose modules the program has imported by now."""
    for module in [name for name in _waiting if name in sys.modules]:
        action = _waiting.pop(module, None)
        if action is not None:  # no other thread was faster
            action()


def on_changed(action: Callable[[Any], None]) -> None:
    """Have `tell_changed` call ``action`` with each model."""
    _on_changed.append(action)


def tell_changed(model: Any) -> None:
    """Tell the libraries that layers of ``model`` were replaced by quantized ones."""
    for action in _on_changed:
        action(model)


def on_saving(action: Callable[[Any], bool]) -> None:
    """Have `tell_saving` call ``action``: it prepares the model, and returns whether its library may load the file."""
    _on_saving.append(action)


def tell_saving(model: Any) -> bool:
    """Tell the libraries that `qcore.save` writes ``model``; returns whether one of them may load what it writes."""
    run_pending()
    answers = [action(model) for action in _on_saving]  # each prepares the model
    return any(answers)
