"""The ``qcore`` command; each command is a module of its own with `add` and `run`.

Nothing here imports torch or a module that does before a command runs: `qcore_command`, the entry point, shows help
without ``qcore/__init__``, which imports it.
"""

from __future__ import annotations

from .app import main

__all__ = ["main"]
