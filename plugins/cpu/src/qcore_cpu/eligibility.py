"""Why requests are refused, in sentences that a user can act on."""

from __future__ import annotations

from qcore import Conv2dRequest, DynamicInt8, StaticInt8
from qcore.plugin_api import AnyRequest, why_not_dtypes, why_not_empty

from .kinds import Kind, kind_of

_FEWEST_CHANNELS = 8
"""Output channels of a group: fewer would leave most of 32 columns empty."""
_FEWEST_INPUTS = 4
"""Input channels of a group: gathering fewer took two to four times as long as torch ops (benchmarks/cpu_rank.py)."""
_LARGEST_K = 1 << 30
"""The library indexes packed columns with 32-bit integers."""


def why_not(request: AnyRequest) -> str:
    """Why a request is refused; empty if a kernel supports it."""
    if request.device.type != "cpu":
        return f"qcore-cpu runs on the CPU, but the tensors are on {request.device}; move them with .to('cpu')."
    return why_not_empty(request) or why_not_dtypes(request) or _why_not_activation(request) or _why_not_size(request)


def _why_not_activation(request: AnyRequest) -> str:
    activation = getattr(request, "activation", None)
    if activation is None:
        return ""
    if not isinstance(activation, (DynamicInt8, StaticInt8)):
        return "no CPU kernel supports fp8 activations; torch ops run this layer."
    if kind_of(request.weight.element) in (Kind.FLOAT4, Kind.FLOAT8):
        return f"{request.weight.dtype} weights with int8 activations have no CPU kernel; torch ops run this layer."
    return ""


def _why_not_size(request: AnyRequest) -> str:
    if request.k > _LARGEST_K:
        return f"K={request.k} is too large for this kernel's 32-bit column indices; torch ops run this layer."
    if not isinstance(request, Conv2dRequest):
        return ""
    inputs = request.in_channels // request.groups
    if inputs < _FEWEST_INPUTS and not isinstance(request.activation, DynamicInt8):
        return f"{inputs} input channels take longer to gather than to multiply; torch ops run this layer."
    own = request.out_channels // request.groups
    if request.groups > 1 and own < _FEWEST_CHANNELS:
        return (
            f"a convolution of {request.groups} groups with {own} output channels each leaves most of a block of 32 "
            f"empty; torch ops run this layer."
        )
    return ""
