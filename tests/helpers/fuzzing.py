"""How much the fuzz tests do: a seeded sample by default, more by the environment."""

from __future__ import annotations

import os


def rounds(default: int) -> int:
    """How often a fuzz test draws: QCORE_FUZZ=N beats the default."""
    return int(os.environ.get("QCORE_FUZZ", default))
