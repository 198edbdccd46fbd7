"""Element types: what the codes of a weight are."""

from __future__ import annotations

from typing import Literal

ElementType = Literal["int4", "int8"]

CODE_RANGE: dict[str, tuple[int, int]] = {"int4": (-8, 7), "int8": (-128, 127)}
"""The smallest and the largest code of each element type."""
