"""The names of kernels: the elements of weight and activation."""

from __future__ import annotations

from qcore import DynamicFP8, StaticFP8
from qcore.plugin_api import Conv2dRequest, GroupedLinearRequest, LinearRequest


def kernel_name(head: str, request: LinearRequest | Conv2dRequest | GroupedLinearRequest) -> str:
    """``xla.w4a16`` for a ``head`` of ``"w"``."""
    element, activation = request.weight.element, request.activation
    weight = element.bits if element.is_integer else element.name
    x = "16" if activation is None else "fp8" if isinstance(activation, (DynamicFP8, StaticFP8)) else "8"
    return f"xla.{head}{weight}a{x}"
