"""How often a fuzz test draws: QCORE_FUZZ=N beats the default."""

from __future__ import annotations

import os


def rounds(default: int) -> int:
    """The number of rounds to draw: the environment variable QCORE_FUZZ, else ``default``."""
    return int(os.environ.get("QCORE_FUZZ") or default)
