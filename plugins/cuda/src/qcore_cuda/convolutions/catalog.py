"""The kernels that convolve, in order of preference: the first that supports a call computes it."""

from __future__ import annotations

from typing import Any

from .base import Convolution
from .columns import COLUMNS
from .conv_hopper import CONV_HOPPER
from .gathered import GATHERED

CONVOLUTIONS: tuple[Convolution[Any], ...] = (CONV_HOPPER, GATHERED, COLUMNS)
