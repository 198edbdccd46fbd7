"""How columns of x map to packed columns: groups padded to whole blocks of a multiple of 8 columns.

``geometry()`` and ``fold_of()`` in ``native/core.cpp`` compute the same.
"""

from __future__ import annotations

from typing import NamedTuple

_LARGEST_BLOCK, _LARGEST_FOLD = 128, 16384


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class Geometry(NamedTuple):
    """How K columns in groups map to packed columns."""

    k: int
    group: int
    groups: int
    block: int
    blocks: int

    @classmethod
    def of(cls, k: int, group: int) -> Geometry:
        """For K columns in groups of ``group``."""
        group = min(group, k)
        fewest = -(-group // _LARGEST_BLOCK)
        # Blocks as large as possible, unless smaller ones leave less padding; 16 columns are quantized at once.
        sizes = (
            (_round_up(-(-group // blocks), unit), blocks)
            for blocks in range(fewest, 2 * fewest + 1)
            for unit in (16, 8)
        )
        block, blocks = min(sizes, key=lambda size: size[0] * size[1] + (group // 8 if size[0] % 16 else 0))
        return cls(k, group, -(-k // group), block, blocks)

    @property
    def packed(self) -> int:
        """Packed columns."""
        return self.groups * self.blocks * self.block

    @property
    def fold(self) -> int:
        """Packed columns of int8 activations that are accumulated in int32."""
        blocks = min(self.blocks, _LARGEST_FOLD // self.block)
        while self.blocks % blocks:
            blocks -= 1
        return blocks * self.block
