"""Which SPIR-V modules this package has, and which of them a device takes."""

from __future__ import annotations

from collections.abc import Sequence

from .device import Device
from .native import Unsupported

TILES = (
    "prepare", "quantize", "gemm_float", "gemm_int_dot", "gemm_int_plain", "conv_direct", "finish", "embedding",
    "elementwise",
)  # fmt: skip
"""Modules that together serve every request."""


def int_variant(device: Device, constants: Sequence[int]) -> str:
    """The tile for int8 activations: with integer dot products where the device has them and its compiler is able."""
    if not device.description.features.get("integer_dot"):
        return "gemm_int_plain"
    try:
        device.pipeline("gemm_int_dot", constants)
    except Unsupported:
        return "gemm_int_plain"
    return "gemm_int_dot"
