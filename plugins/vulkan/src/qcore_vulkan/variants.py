"""Which SPIR-V modules this package has, and which of them a device takes."""

from __future__ import annotations

from .description import Description

TILES = ("prepare", "quantize", "gemm_float", "gemm_int_dot", "gemm_int_plain", "finish", "embedding", "elementwise")
"""Modules that together serve every request."""


def int_variant(description: Description) -> str:
    """The tile for int8 activations: with the device's integer dot product, or with plain integers."""
    return "gemm_int_dot" if description.features.get("integer_dot") else "gemm_int_plain"
