"""The kernels that multiply, in order of preference.

Without a measurement or an estimate, the first kernel that has a rule for a problem computes it.
"""

from __future__ import annotations

from typing import Any

from .base import FloatProduct, Int8Product
from .chunks import GEMV_CHUNKS, INT8_GEMV_CHUNKS
from .dense import DENSE
from .float32_split import FLOAT32_SPLIT, SplitRows
from .gemm import GEMM
from .gemm_hopper import GEMM_HOPPER, GEMM_HOPPER_64, GEMM_HOPPER_192
from .gemv import GEMV
from .groups_hopper import W4A8_GROUPS_HOPPER, W8A8_GROUPS_HOPPER
from .int8_gemv import INT8_GEMV
from .int8_groups_hopper import INT8_GROUPS_HOPPER
from .int8_hopper import INT8_HOPPER
from .int8_persistent import INT8_PERSISTENT
from .int8_slices import INT8_SLICES
from .int8_tiles import INT8_TILES
from .slices import SLICES
from .w4a8_hopper import W4A8_HOPPER
from .w4a8_units_hopper import W4A8_UNITS_HOPPER, W4A8_UNITS_HOPPER_64, W4A8_UNITS_HOPPER_192

FLOAT_PRODUCTS: tuple[FloatProduct[Any], ...] = (
    GEMV, SLICES, GEMM_HOPPER, GEMM_HOPPER_64, GEMM_HOPPER_192, GEMV_CHUNKS, DENSE, GEMM, SplitRows(GEMV),
    SplitRows(SLICES), FLOAT32_SPLIT,
)  # fmt: skip
INT8_PRODUCTS: tuple[Int8Product[Any], ...] = (
    INT8_HOPPER, W8A8_GROUPS_HOPPER, INT8_GROUPS_HOPPER, W4A8_HOPPER, W4A8_GROUPS_HOPPER, W4A8_UNITS_HOPPER,
    W4A8_UNITS_HOPPER_64, W4A8_UNITS_HOPPER_192, INT8_GEMV, INT8_SLICES, INT8_GEMV_CHUNKS, INT8_PERSISTENT, INT8_TILES,
)  # fmt: skip
