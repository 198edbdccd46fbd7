"""Sizes of convolutions; imports no Triton, so that eligibility checks can use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from qcore.plugin_api import convolved_size


class Geometry(NamedTuple):
    """Height and width of kernel, stride, padding and dilation, and the number of channel groups."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @classmethod
    def of(
        cls, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
    ) -> Geometry:
        """From an op's arguments, pairs that torch gives as lists."""
        return cls(_pair(kernel), _pair(stride), _pair(padding), _pair(dilation), groups)

    def output(self, height: int, width: int) -> tuple[int, int]:
        """(OH, OW) for an image of (height, width)."""
        return convolved_size((height, width), self.kernel, self.stride, self.padding, self.dilation)


def _pair(values: Sequence[int]) -> tuple[int, int]:
    height, width = values
    return height, width


def power_of_two(size: int) -> int:
    """``size`` rounded up to a power of two."""
    return 1 << max(0, size - 1).bit_length()


def column_size(taps: int, channels: int) -> int:
    """Elements that `kernels.conv.quantize_columns` holds for a column of ``taps`` times ``channels``."""
    return power_of_two(taps) * power_of_two(channels)
