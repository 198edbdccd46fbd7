"""How the shaders of strided.glsl walk their operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..device import Device
from .operand import MOST_DIMS, merge

STRIDED, VECTORS, NUMBER_P, NUMBER_Q = range(4)
"""How an operand is accessed: word by word, four words at a time, or as a number of the push constants."""


@dataclass(frozen=True)
class Walk:
    """Sizes and each operand's strides, innermost first; ``width``: elements of a lane, 1 or 4."""

    sizes: list[int]
    strides: list[list[int]]
    width: int

    @property
    def lanes(self) -> int:
        """Lanes that have something to do."""
        return math.prod(self.sizes) // self.width

    def push(self, most: int = MOST_DIMS) -> list[int | float]:
        """The push constants before the offsets, for a shader of ``most`` dimensions."""
        words: list[int | float] = [self.lanes, self.sizes[0] // self.width, *self.sizes[1:]]
        words += [0] * (most - len(self.sizes))
        for strides in self.strides:
            words += [*strides, *[0] * (most - len(strides))]
        return words

    def mode(self, operand: int, offset: int) -> int:
        """STRIDED, or VECTORS if fours along the innermost dimension are adjacent and aligned."""
        strides = self.strides[operand]
        aligned = strides[0] == 1 and offset % 4 == 0 and all(stride % 4 == 0 for stride in strides[1:])
        return VECTORS if self.width == 4 and aligned else STRIDED


def walk(shape: Sequence[int], *strides: Sequence[int], most: int = MOST_DIMS, single: bool = False) -> Walk:
    """The walk of a shader over ``shape``, by each operand's strides. ``single``: a lane takes one element.

    Raises ValueError if more than ``most`` dimensions remain after merging.
    """
    sizes, kept = merge(shape, *strides)
    if len(sizes) > most:
        raise ValueError(f"a view of {len(sizes)} dimensions that cannot be merged: copy it to contiguous memory first")
    return Walk(sizes, kept, 4 if sizes[0] % 4 == 0 and not single else 1)


def required_subgroup(device: Device) -> int:
    """The size to require of subgroups where a kernel depends on it; 0 if the device has only one."""
    subgroup = device.description.subgroup
    return subgroup.size if subgroup.control and subgroup.min <= subgroup.size <= subgroup.max else 0
