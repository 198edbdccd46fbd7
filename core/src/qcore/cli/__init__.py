"""The ``qcore`` command. `main` is its entry point; each command is a module of its own with `add` and `run`.

Importing this package imports torch, because ``qcore/__init__`` does; nothing here adds to that until a command runs.
"""

from __future__ import annotations

from .app import main

__all__ = ["main"]
