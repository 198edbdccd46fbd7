"""Which requests a kernel supports, and why others are refused, in sentences that a user can act on."""

from __future__ import annotations

import torch

from qcore import Conv2dRequest, DynamicFP8, StaticFP8
from qcore.plugin_api import AnyRequest, GroupedLinearRequest, why_not_dtypes, why_not_empty

from .layout import ROWS, Geometry, experts_per_part, rows_per_part, why_not_packed


def why_not(request: AnyRequest) -> str:
    """Why a request is refused; empty if it is supported."""
    return (
        _why_not_device(request.device)
        or why_not_empty(request)
        or _why_not_encoding(request)
        or why_not_packed(request.weight, request.k)
        or why_not_dtypes(request)
        or _why_not_sizes(request, largest_range())
    )


def _why_not_encoding(request: AnyRequest) -> str:
    activation = getattr(request, "activation", None)
    if isinstance(activation, (DynamicFP8, StaticFP8)):
        return "fp8 activations have no kernel here; use float ones (a16), or let torch ops run this layer."
    if activation is not None and not request.weight.element.is_integer:
        return f"{request.weight.dtype} weights have no kernel with int8 activations; use float ones (a16)."
    return ""


def largest_range() -> int:
    """Bytes that shaders can address at once on every usable device: the weight's device is not known yet."""
    from .device import devices

    usable = [one.limits for one in devices() if not one.missing]
    return min((min(limits.max_storage_range, limits.max_allocation) for limits in usable), default=1 << 30)


def _why_not_sizes(request: AnyRequest, largest: int) -> str:
    geometry = Geometry.of(request.weight, request.n, request.k)
    heads = request.groups if isinstance(request, Conv2dRequest) else 1
    if max(ROWS * geometry.row_bytes, 4 * heads * geometry.columns) > largest:
        return f"rows of {heads * request.k} values exceed a buffer of {largest} bytes; torch ops run this layer."
    if isinstance(request, GroupedLinearRequest) and not experts_per_part(geometry, largest):
        return f"the weight of an expert must fit into one buffer, here of {largest} bytes; torch ops run this layer."
    if not isinstance(request, Conv2dRequest):
        return ""
    if heads > 1 and rows_per_part(geometry, largest) < request.n:
        return (
            f"the weight of a convolution in {heads} channel groups must fit into one buffer, "
            f"here of {largest} bytes; torch ops run this layer."
        )
    return _why_not_window(request)


def _why_not_window(request: Conv2dRequest) -> str:
    from .steps import Geometry2d

    sizes = (request.kernel_size, request.stride, request.padding, request.dilation, request.groups)
    return Geometry2d(*sizes).why_not(request.k)


def _why_not_device(device: torch.device) -> str:
    if device.type == "cpu":
        return ""
    return f"qcore-vulkan supports CPU tensors, but these are on {device}; move them with .to('cpu')."
