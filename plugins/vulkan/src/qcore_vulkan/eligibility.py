"""Which requests have a kernel here, and for the others why not, in a sentence that a user can act on."""

from __future__ import annotations

from typing import TypeAlias

import torch

from qcore import Conv2dRequest, EmbeddingRequest, LinearRequest, StaticInt8

from .layout import ROWS, Geometry, rows_per_part
from .layout import why_not as why_not_packed

Request: TypeAlias = LinearRequest | Conv2dRequest | EmbeddingRequest

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def why_not(request: Request) -> str:
    """Why a request is refused; empty where it is served."""
    return (
        _why_not_device(request.device)
        or why_not_packed(request.weight, request.n, request.k)
        or _why_not_dtypes(request)
        or _why_not_sizes(request, largest_range())
    )


def largest_range() -> int:
    """Bytes that shaders of every usable device see at once: it is not known yet where the weight will go."""
    from .device import devices

    usable = [one.limits for one in devices() if not one.missing]
    return min((min(limits.max_storage_range, limits.max_allocation) for limits in usable), default=1 << 30)


def _why_not_sizes(request: Request, largest: int) -> str:
    geometry = Geometry.of(request.weight, request.n, request.k)
    heads = request.groups if isinstance(request, Conv2dRequest) else 1
    if max(ROWS * geometry.row_bytes, 4 * heads * geometry.columns) > largest:
        return f"rows of {heads * request.k} values are longer than a buffer of {largest} bytes holds; torch ops serve."
    if not isinstance(request, Conv2dRequest):
        return ""
    if heads > 1 and rows_per_part(geometry, largest) < request.n:
        return (
            f"the weight of a convolution in {heads} channel groups must fit into one buffer, "
            f"here of {largest} bytes; torch ops serve."
        )
    return _why_not_window(request)


def _why_not_window(request: Conv2dRequest) -> str:
    from .steps import Geometry2d

    sizes = (request.kernel_size, request.stride, request.padding, request.dilation, request.groups)
    return Geometry2d(*sizes).why_not(request.k)


def _why_not_device(device: torch.device) -> str:
    if device.type == "cpu":
        return ""
    return f"qcore-vulkan takes CPU tensors, and these are on {device}; move them with .to('cpu')."


def _why_not_dtypes(request: Request) -> str:
    if isinstance(request, EmbeddingRequest):
        return _unless_float(request.out_dtype, "results")
    if request.output is None:
        reason = _unless_float(request.out_dtype, "results")
    elif request.activation is None:
        reason = "an int8 result goes with int8 activations here; use a scheme such as w8a8-o8."
    else:
        fits = request.out_dtype == torch.int8
        reason = "" if fits else f"a result with OutputInt8 is int8, not {request.out_dtype}."
    if request.x_dtype == torch.int8 and isinstance(request.activation, StaticInt8):
        return reason
    return reason or _unless_float(request.x_dtype, "activations")


def _unless_float(dtype: torch.dtype, what: str) -> str:
    if dtype in FLOATS:
        return ""
    name = str(dtype).removeprefix("torch.")
    return f"{what} of dtype {name} have no kernel here; use bfloat16, float16 or float32."
