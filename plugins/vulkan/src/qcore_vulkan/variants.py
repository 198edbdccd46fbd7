"""The SPIR-V modules for every device, and the variant of each that a device supports."""

from __future__ import annotations

from .device import Device
from .native import Unsupported

TILES = (
    "prepare", "quantize", "gemm_float", "gemm_float_long", "gemm_int_dot", "gemm_int_plain", "gemm_int_long",
    "conv_direct", "finish", "embedding", "elementwise",
)  # fmt: skip
"""Modules that together support every request."""


def float_variant(device: Device) -> str:
    """The tile for float activations."""
    return _first(device, *_long(device, "gemm_float_long"), "gemm_float")


def int_variant(device: Device) -> str:
    """The tile for int8 activations: with integer dot products if the device has them."""
    dot = ("gemm_int_dot",) if device.description.features.get("integer_dot") else ()
    return _first(device, *_long(device, "gemm_int_long"), *dot, "gemm_int_plain")


def _long(device: Device, variant: str) -> tuple[str, ...]:
    """A CPU loads 64-bit words faster, and runs integer dot products with ordinary instructions."""
    return (variant,) if device.profile == "cpu" and device.description.features.get("int64") else ()


def _first(device: Device, *variants: str) -> str:
    """The first that the device's compiler can compile; the last is not tried."""
    for variant in variants[:-1]:
        try:
            device.pipeline(variant)
        except Unsupported:
            continue
        return variant
    return variants[-1]
