"""The ``qcore`` command line; each command is a module with `add` and `run`.

Nothing here imports torch before a command runs, so that ``--help`` is fast: the entry point `qcore_command` bypasses
``qcore/__init__``, which imports torch.

May import: every package; commands import when they run. Imported by: `qcore`. Its ``__init__`` does so when the first
progress bar is drawn.
"""

from __future__ import annotations

from .app import main

__all__ = ["main"]
